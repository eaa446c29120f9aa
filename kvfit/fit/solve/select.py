"""Choose the source layers that each target layer reads.

Single-source R2 says how much of a target layer one source layer explains alone. It is measured on the holdout split, because
in-sample R2 misleads where inputs are many. There are two rules: *independent* takes the k layers with the best single-source
R2; *greedy* adds one layer at a time, the one that most improves the layers already chosen.

Source: Heo et al., arXiv:2608.03893, section 3 (independent ranking); held-out scoring and the greedy rule are kvfit's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.fit.progress import track
from kvfit.fit.solve.options import Ranking
from kvfit.fit.solve.reader import Reader
from kvfit.fit.solve.regression import solutions
from kvfit.fit.solve.score import r2
from kvfit.fit.solve.system import Layers, input_set
from kvfit.fit.stats.layout import SPLITS, Part
from kvfit.spec import KINDS, Inputs, Kind, Support

Chosen = dict[Kind, list[Layers]]
# Returns the R2 (len(target_layers),) of some target layers on one ascending set of source layers.
ScoreOf = Callable[[Layers, list[int]], Sequence[float]]

# Only so that a layer with nearly collinear heads can be factored; probes need no good fit.
PROBE_PENALTY = 1e-3


@dataclass(frozen=True)
class Probe:
    """The single-source R2 of one kind.

    Attributes:
        heads: per split, (L_target, L_source, H_target); layers of fewer heads than the most have zeros behind theirs.
        layers: per split, (L_target, L_source), pooled over all outputs of the target layer.
        support: whether each target head was predicted from all heads of the source layer or from the matched one.
        penalty: the ridge penalty of the probes.
    """

    heads: dict[Part, Tensor]
    layers: dict[Part, Tensor]
    support: Support
    penalty: float


def probe(
    reader: Reader,
    kind: Kind,
    *,
    ranking: Ranking = "holdout",
    support: Support = "full",
    inputs: Inputs = "same",
    progress: bool = True,
) -> Probe:
    """Measure the single-source R2 of every (target layer, source layer, target head).

    All target layers of one source layer share one factorisation.

    Args:
        reader: reads the store.
        kind: ``keys`` or ``values``.
        ranking: with ``heo2026``, probes are least squares from the matched head of the same kind, whatever the map reads.
        support: the map's support.
        inputs: the map's inputs.
        progress: whether to show a bar.
    """
    penalty = PROBE_PENALTY
    if ranking == "heo2026":
        support, inputs, penalty = "head", "same", 0.0
    source, target = reader.store.source, reader.store.target
    shape = (target.n_layers, source.n_layers, max(target.shape(kind, t)[0] for t in range(target.n_layers)))
    heads = {split: torch.zeros(*shape, dtype=torch.float64) for split in SPLITS}
    layers = {split: torch.zeros(*shape[:2], dtype=torch.float64) for split in SPLITS}
    for layer_index in track(range(source.n_layers), f"probe {kind}", "source layers", show=progress):
        read = input_set(reader.models, kind, (layer_index,), support, inputs)
        for solution in solutions(reader, read, [(kind, t) for t in range(target.n_layers)], penalty):
            rows, (n_heads, _) = [t for _, t in solution.targets], target.shape(*solution.targets[0])
            for split, score in solution.scores.items():
                error, total = (sums.view(len(rows), n_heads, -1).sum(2).cpu() for sums in (score.error(), score.total))
                heads[split][rows, layer_index, :n_heads] = r2(error, total)
                layers[split][rows, layer_index] = r2(error.sum(1), total.sum(1))
    return Probe(heads, layers, support, penalty)


def ranking_scores(probes: dict[Kind, Probe], ranking: Ranking, shared_layers: bool) -> dict[Kind, Tensor]:
    """For each kind, the scores (L_target, L_source) by which source layers are ranked.

    Shared layers are ranked by the mean over kinds. ``heo2026`` takes the in-sample mean over heads.
    """
    if ranking == "heo2026":
        scores = {kind: probes[kind].heads["fit"].mean(2) for kind in KINDS}
    else:
        scores = {kind: probes[kind].layers["holdout"] for kind in KINDS}
    return dict.fromkeys(KINDS, (scores["keys"] + scores["values"]) / 2) if shared_layers else scores


def rank(scores: Tensor) -> list[list[int]]:
    """The source layers of each target layer, best first, from scores (L_target, L_source); ties go to the earlier layer."""
    return [sorted(range(len(row)), key=lambda i: (-row[i], i)) for row in scores.tolist()]


def take(ranking: Sequence[Sequence[int]], k: int) -> list[Layers]:
    """The k best source layers of each target layer, ascending."""
    return [tuple(sorted(order[:k])) for order in ranking]


def greedy(n_source: int, n_target: int, k: int, score: ScoreOf, *, progress: bool = True) -> list[list[int]]:
    """Forward selection: the source layers of each target layer, in the order in which they were added.

    All target layers take each step together, so that a set which several of them try is factored once.

    Args:
        n_source: the number of source layers to choose from.
        n_target: the number of target layers.
        k: how many to choose.
        score: is called once per step for every distinct set, with the target layers that try it.
        progress: whether to show a bar.
    """
    orders: list[list[int]] = [[] for _ in range(n_target)]
    for step in range(min(k, n_source)):
        tried: dict[Layers, list[int]] = defaultdict(list)
        for target_layer, order in enumerate(orders):
            for candidate in range(n_source):
                if candidate not in order:
                    tried[tuple(sorted([*order, candidate]))].append(target_layer)
        best: dict[int, tuple[float, int]] = {}
        for chosen, members in track(tried.items(), f"greedy, layer {step + 1} of {k}", "sets", show=progress):
            for target_layer, value in zip(members, score(chosen, members), strict=True):
                added = next(i for i in chosen if i not in orders[target_layer])
                best[target_layer] = min(best.get(target_layer, (float("inf"), 0)), (-float(value), added))
        for target_layer, (_, added) in best.items():
            orders[target_layer].append(added)
    return orders
