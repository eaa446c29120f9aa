"""`Fitter`: the maps that a store allows under one set of options, and how good each would be.

Choices are made on the holdout split, by the error of the map *as it will be used*, gain included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from kvfit.fit.solve import ridge
from kvfit.fit.solve.options import Options
from kvfit.fit.solve.regression import Solution, solutions
from kvfit.fit.solve.select import Chosen, Layers, Probe, greedy, rank, ranking_scores, take
from kvfit.fit.solve.system import Problem, Reader
from kvfit.spec import KINDS, Kind

# Errors this close to the best are the same to the data. Then the smaller penalty keeps more of the variance, and the smaller
# set of layers makes a smaller bundle.
INDIFFERENCE = 1e-3
# The holdout split estimates a prediction's variance without the optimism of the fit split, but needs rows to do so.
HOLDOUT_ENOUGH = 2048
# Greedy selection compares sets at one penalty.
GREEDY_PENALTY = 1e-2
SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32)


# Kind, source layers, target layer, penalty.
Map = tuple[Kind, Layers, int, float]


class Quality(NamedTuple):
    """R2 of one layer map: on the fit and holdout split before the gain, and on the holdout split as used."""

    fit: float
    holdout: float
    used: float


@dataclass(frozen=True)
class Fitted:
    """One layer map with the gain folded in.

    Attributes:
        kind: what it predicts.
        layer_index: the target layer.
        source_layers: what it reads.
        penalty: of its fit.
        weight: (F, G), or (H_target, F, D_target) with support ``head``, float64.
        bias: (G,) float64.
        quality: its R2.
        heads: holdout R2 of each target head before the gain.
        gain: of each output, (G,).
        damping, condition: see `ridge.Factor`.
    """

    kind: Kind
    layer_index: int
    source_layers: Layers
    penalty: float
    weight: Tensor
    bias: Tensor
    quality: Quality
    heads: list[float]
    gain: Tensor
    damping: float
    condition: float


class Fitter:
    """The regressions of one store under one set of options; remembers what it measured."""

    def __init__(
        self, reader: Reader, options: Options, *, progress: bool = True, known: dict[Map, Quality] | None = None
    ) -> None:
        """Over a reader.

        Args:
            reader: of the store.
            options: what is asked for.
            progress: show bars.
            known: shared with fitters whose options differ in the choice of layers and penalties only.
        """
        self.reader = reader
        self.options = options
        self._hide = None if progress else True
        self._known: dict[Map, Quality] = {} if known is None else known

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, probes: dict[Kind, Probe]) -> Chosen:
        """The source layers of every kind and target layer."""
        n_source, top_k = self.reader.store.source.n_layers, self.options.top_k
        if top_k == "all" or (top_k != "auto" and top_k >= n_source):
            return {kind: take([range(n_source)] * self.reader.store.target.n_layers, n_source) for kind in KINDS}
        rankings = self._rankings(probes, n_source if top_k == "auto" else top_k)
        if top_k != "auto":
            return {kind: take(rankings[kind], top_k) for kind in KINDS}
        sizes = sorted({k for k in SIZES if k < n_source} | {n_source})
        sets = {kind: [take(rankings[kind], k) for k in sizes] for kind in KINDS}
        errors = {kind: torch.stack([self._least_errors(kind, of_size) for of_size in sets[kind]]) for kind in KINDS}
        if self.options.shared_layers:
            errors = dict.fromkeys(KINDS, errors["keys"] + errors["values"])
        chosen: Chosen = {}
        for kind in KINDS:
            first = (errors[kind] <= errors[kind].min(0).values * (1 + INDIFFERENCE)).int().argmax(0)
            chosen[kind] = [sets[kind][int(size)][layer_index] for layer_index, size in enumerate(first)]
        return chosen

    def _rankings(self, probes: dict[Kind, Probe], k: int) -> dict[Kind, list[list[int]]]:
        options = self.options
        if options.select == "independent":
            return {
                kind: rank(scores) for kind, scores in ranking_scores(probes, options.ranking, options.shared_layers).items()
            }
        store = self.reader.store
        penalty = GREEDY_PENALTY if options.penalty == "auto" else options.penalty

        def of(*kinds: Kind) -> list[list[int]]:
            def score(source_layers: Layers, target_layers: list[int]) -> list[float]:
                found = [self.measure(kind, source_layers, target_layers, (penalty,)) for kind in kinds]
                return [
                    sum(quality.used for quality in row) / len(kinds) for row in zip(*(one[0] for one in found), strict=True)
                ]

            return greedy(store.source.n_layers, store.target.n_layers, k, score, progress=self._hide is None)

        return dict.fromkeys(KINDS, of(*KINDS)) if options.shared_layers else {kind: of(kind) for kind in KINDS}

    def _least_errors(self, kind: Kind, sets: list[Layers]) -> Tensor:
        """Per target layer, 1 - R2 as used at the best penalty."""
        errors = torch.zeros(len(sets), dtype=torch.float64)
        for source_layers, members in tqdm(_groups(sets).items(), desc=f"layers {kind}", disable=self._hide):
            found = self.measure(kind, source_layers, members, self.options.penalties)
            errors[members] = (
                1 - torch.tensor([[quality.used for quality in row] for row in found], dtype=torch.float64).max(0).values
            )
        return errors

    def best_penalties(self, kind: Kind, source_layers: Layers, target_layers: Sequence[int]) -> list[float]:
        """The penalty of each target layer that reads one set."""
        grid = self.options.penalties
        if len(grid) == 1:
            return [grid[0]] * len(target_layers)
        found = self.measure(kind, source_layers, target_layers, grid)
        errors = 1 - torch.tensor([[quality.used for quality in row] for row in found], dtype=torch.float64)
        first = (errors <= errors.min(0).values * (1 + INDIFFERENCE)).int().argmax(0)
        return [grid[int(row)] for row in first]

    # -- solving -----------------------------------------------------------------------------------------------------

    def measure(
        self, kind: Kind, source_layers: Layers, target_layers: Sequence[int], penalties: Sequence[float]
    ) -> list[list[Quality]]:
        """R2 of the maps of some target layers from one set, a row per penalty; solves what it has not solved before."""
        for penalty in penalties:
            missing = [t for t in target_layers if (kind, source_layers, t, penalty) not in self._known]
            if not missing:
                continue
            for solution in solutions(
                self.reader, self._problem(kind, source_layers, missing), penalty, scale=self.options.penalty_scale
            ):
                qualities, _ = self._quality(solution, self._gain(solution))
                for layer_index, quality in zip(solution.problem.target_layers, qualities, strict=True):
                    self._known[kind, source_layers, layer_index, penalty] = quality
        return [[self._known[kind, source_layers, t, penalty] for t in target_layers] for penalty in penalties]

    def qualities(self, kind: Kind, sets: list[Layers], penalties: Sequence[float] = ()) -> list[tuple[float, Quality]]:
        """Penalty and quality of every target layer's map; measures `penalties` on the way, while the scatters are at hand."""
        found: list[tuple[float, Quality]] = [(0.0, Quality(0.0, 0.0, 0.0))] * len(sets)
        for source_layers, members in _groups(sets).items():
            self.measure(kind, source_layers, members, penalties)
            for layer_index, penalty in zip(members, self.best_penalties(kind, source_layers, members), strict=True):
                found[layer_index] = (penalty, self.measure(kind, source_layers, [layer_index], (penalty,))[0][0])
        return found

    def fit(self, kind: Kind, sets: list[Layers]) -> Iterator[Fitted]:
        """Every target layer's map of one kind, grouped by what they read: one factorisation per set and penalty."""
        with tqdm(total=len(sets), desc=f"solve {kind}", disable=self._hide) as bar:
            for source_layers, members in _groups(sets).items():
                by_penalty: dict[float, list[int]] = defaultdict(list)
                for layer_index, penalty in zip(members, self.best_penalties(kind, source_layers, members), strict=True):
                    by_penalty[penalty].append(layer_index)
                for penalty, layers in by_penalty.items():
                    problem = self._problem(kind, source_layers, layers)
                    for solution in solutions(self.reader, problem, penalty, scale=self.options.penalty_scale):
                        for fitted in self._fitted(solution, penalty):
                            yield fitted
                            bar.update()

    def _problem(self, kind: Kind, source_layers: Layers, target_layers: Sequence[int]) -> Problem:
        return self.reader.problem(kind, source_layers, target_layers, self.options.support, self.options.inputs)

    def _gain(self, solution: Solution) -> Tensor:
        """Gain of each output, (L, G)."""
        if self.options.gain == "none":
            return torch.ones_like(solution.offset)
        score = solution.scores["holdout" if solution.scores["holdout"].count >= HOLDOUT_ENOUGH else "fit"]
        width = self.reader.store.target.head_dim if self.options.gain == "head" else 1
        return ridge.variance_gain(score.total, score.predicted, width)

    def _quality(self, solution: Solution, gain: Tensor) -> tuple[list[Quality], Tensor]:
        """Of every target layer, and the holdout R2 of its heads before the gain, (L, H)."""
        fit, holdout = solution.scores["fit"], solution.scores["holdout"]
        r2 = [
            ridge.r2(error.sum(1), score.total.sum(1)).tolist()
            for score, error in ((fit, fit.error()), (holdout, holdout.error()), (holdout, holdout.error(gain)))
        ]
        error, total = (
            part.view(len(part), self.reader.store.target.n_heads, -1).sum(2) for part in (holdout.error(), holdout.total)
        )
        return [Quality(*row) for row in zip(*r2, strict=True)], ridge.r2(error, total)

    def _fitted(self, solution: Solution, penalty: float) -> Iterator[Fitted]:
        gain = self._gain(solution)
        qualities, heads = self._quality(solution, gain)
        bias = solution.target_mean - solution.offset * gain
        problem = solution.problem
        for position, layer_index in enumerate(problem.target_layers):
            weight, scale = solution.weight(position), gain[position]
            if problem.support == "head":
                scale = scale.view(len(weight), 1, -1)
            yield Fitted(
                kind=problem.kind,
                layer_index=layer_index,
                source_layers=problem.source_layers,
                penalty=penalty,
                weight=weight * scale,
                bias=bias[position],
                quality=qualities[position],
                heads=heads[position].tolist(),
                gain=gain[position],
                damping=solution.damping,
                condition=solution.condition,
            )


def _groups(sets: list[Layers]) -> dict[Layers, list[int]]:
    """Target layers by the set that they read: one factorisation serves a group."""
    groups: dict[Layers, list[int]] = defaultdict(list)
    for layer_index, chosen in enumerate(sets):
        groups[chosen].append(layer_index)
    return dict(groups)
