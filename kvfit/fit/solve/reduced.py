"""Choose a shared basis: its source layers, its penalty, and its rank.

Every choice is made on the holdout split, for the maps as they will be used, gain included. The criterion is the mean error
over outputs, each in units of its own variance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvfit.fit.solve.basis import prefix_scores
from kvfit.fit.solve.fitter import Fitted, Fitter, first_good_enough
from kvfit.fit.solve.regression import Basis, projections, reduced_solutions
from kvfit.fit.solve.score import Score
from kvfit.fit.solve.select import Probe, ranking_scores
from kvfit.fit.solve.system import InputSet
from kvfit.fit.stats.layout import Block, Part
from kvfit.spec import KINDS, Kind

# A basis has one penalty. All parts of the target agree on it well enough, so it is chosen on a few layers.
PENALTY_LAYERS = 6
# Ranks whose error is this close to the least count as equally good: maps that the target uses differently lie further apart.
RANK_INDIFFERENCE = 0.005
# With so many candidate ranks per octave, the cost differs by about a fifth between neighbours.
RANKS_PER_OCTAVE = 4


@dataclass(frozen=True)
class RankCurve:
    """The holdout error for each rank: 1 - R2 as used, averaged over outputs in units of their own variance.

    Attributes:
        ranks: the ranks, ascending.
        errors: the error for each rank.
    """

    ranks: list[int]
    errors: list[float]

    def best(self, most: int | None = None) -> int:
        """The smallest rank, not above `most`, whose error is within `RANK_INDIFFERENCE` of the least."""
        allowed = [(rank, error) for rank, error in zip(self.ranks, self.errors, strict=True) if most is None or rank <= most]
        least = min(error for _, error in allowed)
        return next(rank for rank, error in allowed if error <= least * (1 + RANK_INDIFFERENCE))

    def error(self, rank: int) -> float:
        """The error of a rank on the curve."""
        return self.errors[self.ranks.index(rank)]


def shared_inputs(fitter: Fitter, probes: dict[Kind, Probe]) -> InputSet:
    """The inputs of a shared basis: all source layers, or the `top_k` that explain the target's layers best on average."""
    n_source, top_k = fitter.reader.store.source.n_layers, fitter.options.top_k
    if not isinstance(top_k, int):
        return fitter.reads("keys", tuple(range(n_source)))
    scores = ranking_scores(probes, fitter.options.ranking, True)["keys"].mean(0)
    best = sorted(range(n_source), key=lambda i: (-float(scores[i]), i))[:top_k]
    return fitter.reads("keys", tuple(sorted(best)))


def shared_penalty(fitter: Fitter, inputs: InputSet) -> float:
    """The penalty of a basis: the best one of the grid for maps of full rank."""
    grid = fitter.options.penalties
    if len(grid) == 1:
        return grid[0]
    layers = sorted({t for _, t in fitter.targets})
    step = max(1, len(layers) // PENALTY_LAYERS)
    targets: list[Block] = [(kind, t) for kind in KINDS for t in layers[step // 2 :: step]]
    return grid[first_good_enough(fitter.errors(inputs, targets, grid).mean(1, keepdim=True))[0]]


def candidate_ranks(most: int) -> list[int]:
    """Ranks up to `most`, evenly spaced on a logarithmic scale, and `most` itself."""
    steps = range(RANKS_PER_OCTAVE * most.bit_length())
    return sorted({rank for rank in (round(2 ** (step / RANKS_PER_OCTAVE)) for step in steps) if rank < most} | {most})


def rank_curve(fitter: Fitter, basis: Basis, extra: Sequence[int] = ()) -> RankCurve:
    """The holdout error of the first directions of a basis, for every candidate rank and those of `extra`."""
    most = basis.weight.shape[1]
    ranks = sorted({*candidate_ranks(most), *(rank for rank in extra if 1 <= rank <= most)})
    rows = torch.tensor(ranks, device=basis.weight.device) - 1
    total, count = torch.zeros(len(ranks), dtype=torch.float64, device=rows.device), 0
    for targets, fit, holdout, weight in projections(fitter.reader, basis, fitter.targets):
        means = (fit.source_mean, fit.target_mean)
        scores: dict[Part, Score] = {"fit": prefix_scores(fit, weight), "holdout": prefix_scores(holdout, weight, means)}
        errors = scores["holdout"].error(fitter.gain(scores, targets[0]))[rows] / holdout.target_square
        live = holdout.target_square > 0
        total += errors[:, live].sum(1)
        count += int(live.sum())
    return RankCurve(ranks, (total / count).tolist())


def fit_reduced(fitter: Fitter, basis: Basis) -> Iterator[Fitted]:
    """Solve every target block's map from a basis."""
    for solution in reduced_solutions(fitter.reader, basis, fitter.targets):
        yield from fitter.fitted(solution, basis.penalty)
