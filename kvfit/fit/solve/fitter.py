"""`Fitter` solves the maps of a store under one set of options, and measures how good each would be.

It chooses on the holdout split, by the error of the map *as it will be used*, gain included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvfit.fit.progress import track
from kvfit.fit.solve.options import Options
from kvfit.fit.solve.reader import Reader
from kvfit.fit.solve.regression import Solution, solutions
from kvfit.fit.solve.score import Score, r2, variance_gain
from kvfit.fit.solve.select import Chosen, Probe, greedy, rank, ranking_scores, take
from kvfit.fit.solve.system import InputSet, Layers, input_set
from kvfit.fit.stats.layout import Block, Part
from kvfit.spec import KINDS, Kind

# The data cannot tell errors this close to the best apart. Of such maps, the one with the smaller penalty keeps more of the
# variance, and the one with fewer layers makes a smaller bundle.
INDIFFERENCE = 1e-3
# Greedy selection compares sets at one penalty.
GREEDY_PENALTY = 1e-2
SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32)


# What a map reads, what it predicts, and its penalty.
Map = tuple[InputSet, Block, float]
# What each target block reads.
Sets = dict[Block, InputSet]


class Quality(NamedTuple):
    """R2 of one layer map: on the fit and the holdout split before the gain, and on the holdout split with it (as used)."""

    fit: float
    holdout: float
    used: float


@dataclass(frozen=True)
class Fitted:
    """One layer map with the gain folded in.

    Attributes:
        kind: ``keys`` or ``values``.
        layer_index: the target layer.
        source_layers: the source layers that it reads.
        penalty: the ridge penalty.
        weight: (F, G), (r, G) with a shared basis, or (H_target, F, D_target) with support ``head``, in the stored dtype.
        bias: (G,) float32.
        quality: its R2.
        stored: its holdout R2 as used, with the weight rounded to the stored dtype.
        heads: the holdout R2 of each target head before the gain.
        gain: the gain of each output, (G,).
        damping, condition: see `ridge.Factor`.
    """

    kind: Kind
    layer_index: int
    source_layers: Layers
    penalty: float
    weight: Tensor
    bias: Tensor
    quality: Quality
    stored: float
    heads: list[float]
    gain: Tensor
    damping: float
    condition: float


class Fitter:
    """The regressions of one store under one set of options. It remembers what it has measured."""

    def __init__(
        self, reader: Reader, options: Options, *, progress: bool = True, known: dict[Map, Quality] | None = None
    ) -> None:
        """Solve from the statistics of a reader.

        Args:
            reader: reads the store.
            options: the options, from `Options.for_store`.
            progress: whether to show progress.
            known: measurements, shared with fitters whose options differ only in the choice of layers and penalties.
        """
        self.reader = reader
        self.options = options
        self.lags = options.lags(reader.store.lexical_lags)
        self.progress = progress
        self._known: dict[Map, Quality] = {} if known is None else known

    def changed(self, options: Options) -> Fitter:
        """A fitter of the same store whose options differ only in the choice of layers; it shares this one's measurements."""
        return Fitter(self.reader, options, progress=self.progress, known=self._known)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, probes: dict[Kind, Probe], most: int | None = None) -> Chosen:
        """Choose the source layers for every kind and target layer; of ``auto``, at most `most` for each."""
        n_source, top_k = self.reader.store.source.n_layers, self.options.top_k
        if top_k == "all" or (top_k != "auto" and top_k >= n_source):
            return {kind: take([range(n_source)] * self.reader.store.target.n_layers, n_source) for kind in KINDS}
        rankings = self._rankings(probes, n_source if top_k == "auto" else top_k)
        if top_k != "auto":
            return {kind: take(rankings[kind], top_k) for kind in KINDS}
        largest = n_source if most is None else most
        sizes = sorted({k for k in SIZES if k < largest} | {largest})
        sets = {kind: [take(rankings[kind], k) for k in sizes] for kind in KINDS}
        errors = {kind: torch.stack([self._least_errors(kind, of_size) for of_size in sets[kind]]) for kind in KINDS}
        if self.options.shared_layers:
            errors = dict.fromkeys(KINDS, errors["keys"] + errors["values"])
        chosen: Chosen = {}
        for kind in KINDS:
            smallest = first_good_enough(errors[kind])
            chosen[kind] = [sets[kind][size][layer_index] for layer_index, size in enumerate(smallest)]
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
                per_kind = [
                    self.measure(self.reads(kind, source_layers), [(kind, t) for t in target_layers], (penalty,))[0]
                    for kind in kinds
                ]
                return [sum(quality.used for quality in row) / len(kinds) for row in zip(*per_kind, strict=True)]

            return greedy(store.source.n_layers, store.target.n_layers, k, score, progress=self.progress)

        return dict.fromkeys(KINDS, of(*KINDS)) if options.shared_layers else {kind: of(kind) for kind in KINDS}

    def _least_errors(self, kind: Kind, layers: list[Layers]) -> Tensor:
        """For each target layer, 1 - R2 as used, at the best penalty."""
        errors = torch.zeros(len(layers), dtype=torch.float64)
        sets = {(kind, t): self.reads(kind, source_layers) for t, source_layers in enumerate(layers)}
        for inputs, targets in track(groups(sets).items(), f"layers {kind}", "sets", show=self.progress):
            errors[[t for _, t in targets]] = self.errors(inputs, targets, self.options.penalties).min(0).values
        return errors

    def errors(self, inputs: InputSet, targets: Sequence[Block], penalties: Sequence[float]) -> Tensor:
        """1 - R2 as used, (penalties, targets)."""
        rows = self.measure(inputs, targets, penalties)
        return 1 - torch.tensor([[quality.used for quality in row] for row in rows], dtype=torch.float64)

    def best_penalties(self, inputs: InputSet, targets: Sequence[Block]) -> list[float]:
        """The best penalty for each of some target blocks that read one set."""
        grid = self.options.penalties
        if len(grid) == 1:
            return [grid[0]] * len(targets)
        return [grid[row] for row in first_good_enough(self.errors(inputs, targets, grid))]

    def reads(self, kind: Kind, source_layers: Layers) -> InputSet:
        """The inputs of a map of some kind that reads some source layers."""
        options = self.options
        assert options.inputs != "auto", "options of a fitter are those for its store"
        places = [self.reader.store.lexical_lags.index(lag) for lag in self.lags]
        return input_set(self.reader.models, kind, source_layers, options.support, options.inputs, places)

    @property
    def targets(self) -> list[Block]:
        """The target blocks that are mapped. With lexical inputs, target layer 0 is exact and has no map."""
        first = 1 if self.lags else 0
        return [(kind, t) for kind in KINDS for t in range(first, self.reader.store.target.n_layers)]

    def sets(self, chosen: Chosen) -> Sets:
        """The inputs of each target block."""
        return {(kind, t): self.reads(kind, chosen[kind][t]) for kind, t in self.targets}

    # -- solving -----------------------------------------------------------------------------------------------------

    def measure(self, inputs: InputSet, targets: Sequence[Block], penalties: Sequence[float]) -> list[list[Quality]]:
        """R2 of the maps of some target blocks from one set, a row per penalty; only what is not known yet is solved."""
        for penalty in penalties:
            missing = [target for target in targets if (inputs, target, penalty) not in self._known]
            for solution in self._solutions(inputs, missing, penalty):
                qualities, _ = self._quality(solution, self.gain(solution.scores, solution.targets[0]))
                for target, quality in zip(solution.targets, qualities, strict=True):
                    self._known[inputs, target, penalty] = quality
        return [[self._known[inputs, target, penalty] for target in targets] for penalty in penalties]

    def qualities(self, sets: Sets, penalties: Sequence[float] = ()) -> dict[Block, tuple[float, Quality]]:
        """Penalty and quality of every target block's map.

        The quality at `penalties` is measured as well, while the scatters are in memory.
        """
        chosen: dict[Block, tuple[float, Quality]] = {}
        for inputs, targets in groups(sets).items():
            self.measure(inputs, targets, penalties)
            for target, penalty in zip(targets, self.best_penalties(inputs, targets), strict=True):
                chosen[target] = (penalty, self.measure(inputs, [target], (penalty,))[0][0])
        return chosen

    def fit(self, sets: Sets) -> Iterator[Fitted]:
        """Solve every target block's map, grouped by inputs, so that each set and penalty is factored once."""
        for inputs, targets in groups(sets).items():
            by_penalty: dict[float, list[Block]] = defaultdict(list)
            for target, penalty in zip(targets, self.best_penalties(inputs, targets), strict=True):
                by_penalty[penalty].append(target)
            for penalty, members in by_penalty.items():
                yield from self._fit(inputs, members, penalty)

    def _fit(self, inputs: InputSet, targets: Sequence[Block], penalty: float) -> Iterator[Fitted]:
        # A generator of its own, so that the last solution, and with it this set's scatters, is freed before the next set's.
        for solution in self._solutions(inputs, targets, penalty):
            yield from self.fitted(solution, penalty)

    def _solutions(self, inputs: InputSet, targets: Sequence[Block], penalty: float) -> Iterator[Solution]:
        return solutions(self.reader, inputs, targets, penalty, scale=self.options.penalty_scale)

    def gain(self, scores: Mapping[Part, Score], target: Block) -> Tensor:
        """The gain of each output, in the shape of the scores. They are of target blocks of the shape of `target`."""
        score = scores[self.options.gain_from(self.reader.store)]
        if self.options.gain == "none":
            return torch.ones_like(score.predicted)
        width = self.reader.store.target.shape(*target)[1] if self.options.gain == "head" else 1
        return variance_gain(score.total, score.predicted, width)

    def _quality(self, solution: Solution, gain: Tensor) -> tuple[list[Quality], Tensor]:
        """The quality of every target block, and the holdout R2 of its heads before the gain, (T, H)."""
        fit, holdout = solution.scores["fit"], solution.scores["holdout"]
        per_block = [
            r2(error.sum(1), score.total.sum(1)).tolist()
            for score, error in ((fit, fit.error()), (holdout, holdout.error()), (holdout, holdout.error(gain)))
        ]
        n_heads, _ = self.reader.store.target.shape(*solution.targets[0])
        error, total = (part.view(len(part), n_heads, -1).sum(2) for part in (holdout.error(), holdout.total))
        return [Quality(*row) for row in zip(*per_block, strict=True)], r2(error, total)

    def fitted(self, solution: Solution, penalty: float) -> Iterator[Fitted]:
        """The maps of a solution in the form in which they are stored."""
        gain = self.gain(solution.scores, solution.targets[0])
        qualities, heads = self._quality(solution, gain)
        dtype: torch.dtype = getattr(torch, self.options.dtype)
        weights, bias = solution.stored(gain, dtype)
        stored = [quality.used for quality in qualities]
        if dtype != torch.float32:
            score = solution.score_stored(weights)
            stored = r2(score.error().sum(1), score.total.sum(1)).tolist()
        for position, (kind, layer_index) in enumerate(solution.targets):
            yield Fitted(
                kind=kind,
                layer_index=layer_index,
                source_layers=solution.inputs.source_layers,
                penalty=penalty,
                weight=solution.weight(position, weights),
                bias=bias[position].float(),
                quality=qualities[position],
                stored=stored[position],
                heads=heads[position].tolist(),
                gain=gain[position],
                damping=solution.damping,
                condition=solution.condition,
            )


def first_good_enough(errors: Tensor) -> list[int]:
    """For each column, the first row whose error is within `INDIFFERENCE` of the least."""
    good = errors <= errors.min(0).values * (1 + INDIFFERENCE)
    return [int(row) for row in good.int().argmax(0)]


def groups(sets: Sets) -> dict[InputSet, list[Block]]:
    """Group target blocks by the set that they read, since one factorisation serves a group."""
    by_inputs: dict[InputSet, list[Block]] = defaultdict(list)
    for target, inputs in sets.items():
        by_inputs[inputs].append(target)
    return dict(by_inputs)
