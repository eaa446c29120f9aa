"""Which source layers each target layer reads.

Ranking uses single-source R2: how much of a target layer one source layer explains alone. It is taken on the holdout
split, because in-sample R2 misleads where inputs are many. Two rules choose from it: *independent* takes the best k by
that score; *greedy* adds, one at a time, the layer that helps the ones already chosen most.

Source: Heo et al., arXiv:2608.03893, section 3 (independent ranking); held-out scoring and the greedy rule are kvfit's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from kvfit.fit import ridge
from kvfit.fit.problem import Problem, Reader
from kvfit.fit.store import Split
from kvfit.spec import KINDS, Kind, Support

Select = Literal["independent", "greedy"]
Chosen = dict[Kind, list[tuple[int, ...]]]

# Probes need a factor, not a fit: this only keeps nearly collinear heads of one layer from failing.
PROBE_PENALTY = 1e-3


@dataclass(frozen=True)
class Probe:
    """Single-source R2 of one kind.

    Attributes:
        fit: (L_target, L_source, H_target), in sample.
        holdout: the same on the holdout split.
        fit_layers: (L_target, L_source), pooled over all outputs of the target layer.
        holdout_layers: the same on the holdout split.
    """

    fit: Tensor
    holdout: Tensor
    fit_layers: Tensor
    holdout_layers: Tensor


def probe(reader: Reader, kind: Kind, *, support: Support = "full", progress: bool = True) -> Probe:
    """Single-source R2 of every (target layer, source layer, target head).

    All target layers of one source layer share one factorisation.
    """
    source, target = reader.store.source, reader.store.target
    shape = (target.n_layers, source.n_layers, target.n_heads)
    errors: dict[Split, Tensor] = {split: torch.zeros(*shape, dtype=torch.float64) for split in ("fit", "holdout")}
    totals: dict[Split, Tensor] = {split: torch.zeros(*shape, dtype=torch.float64) for split in ("fit", "holdout")}
    for layer_index in tqdm(range(source.n_layers), desc=f"probe {kind}", disable=None if progress else True):
        for problem in Problem.of(reader.store, kind, (layer_index,), range(target.n_layers), support=support):
            found = {split: reader.moments(problem, split) for split in ("fit", "holdout")}
            fit = found["fit"]
            factor = ridge.factorise(fit.source_scatter, fit.count, PROBE_PENALTY, name=f"{kind} of source layer {layer_index}")
            weight = ridge.solve(factor, fit.cross_scatter)
            bias = ridge.bias(fit, weight)
            for split in errors:
                error = ridge.squared_error(found[split], weight, bias)
                errors[split][:, layer_index, problem.head_columns] = problem.per_head(error).cpu()
                totals[split][:, layer_index, problem.head_columns] = problem.per_head(found[split].target_scatter).cpu()
    return Probe(
        fit=1 - errors["fit"] / totals["fit"],
        holdout=1 - errors["holdout"] / totals["holdout"],
        fit_layers=1 - errors["fit"].sum(2) / totals["fit"].sum(2),
        holdout_layers=1 - errors["holdout"].sum(2) / totals["holdout"].sum(2),
    )


def rank(scores: Tensor) -> list[list[int]]:
    """Source layers of each target layer, best first. Scores (L_target, L_source); ties go to the earlier layer."""
    return [sorted(range(scores.shape[1]), key=lambda i: (-float(row[i]), i)) for row in scores]


def shared_scores(probes: dict[Kind, Probe], split: Literal["fit", "holdout"]) -> dict[Kind, Tensor]:
    """One score for both kinds: the mean over kinds of the R2, for maps whose keys and values read the same layers."""
    name = "fit_layers" if split == "fit" else "holdout_layers"
    mean = torch.stack([getattr(probes[kind], name) for kind in KINDS]).mean(0)
    return dict.fromkeys(KINDS, mean)


def take(ranking: Sequence[Sequence[int]], k: int) -> list[tuple[int, ...]]:
    """The best k source layers of each target layer, ascending."""
    return [tuple(sorted(order[:k])) for order in ranking]


def greedy(n_source: int, n_target: int, k: int, score: Callable[[tuple[int, ...]], Tensor], *, progress: bool = True) -> list[list[int]]:
    """Forward selection: source layers of each target layer in the order in which they were added.

    Args:
        n_source: source layers to choose from.
        n_target: target layers.
        k: how many to choose.
        score: R2 (L_target,) of one ascending set of source layers, for every target layer; called once per distinct set.
        progress: show a bar.
    """
    known: dict[tuple[int, ...], Tensor] = {}
    orders: list[list[int]] = [[] for _ in range(n_target)]
    for target_layer in tqdm(range(n_target), desc="greedy selection", disable=None if progress else True):
        order = orders[target_layer]
        while len(order) < min(k, n_source):
            best, best_score = -1, -float("inf")
            for candidate in range(n_source):
                if candidate in order:
                    continue
                chosen = tuple(sorted([*order, candidate]))
                if chosen not in known:
                    known[chosen] = score(chosen)
                if float(known[chosen][target_layer]) > best_score:
                    best, best_score = candidate, float(known[chosen][target_layer])
            order.append(best)
    return orders
