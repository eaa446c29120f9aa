"""The regressions of a problem, solved and scored on both splits, batch by batch of target layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvfit.fit.solve import ridge
from kvfit.fit.solve.ridge import Factor, PenaltyScale, Score
from kvfit.fit.solve.system import Problem, Reader
from kvfit.fit.stats.layout import SPLITS, Part


@dataclass(frozen=True)
class Solution:
    """Weights of a batch of target layers, before the gain. With L target layers and G = H * D outputs each:

    Attributes:
        problem: whose solution this is.
        weights: per panel, (F, L * G of the panel), layer-major.
        offset: mean of the inputs on the fit split times the weights, (L, G).
        target_mean: mean of the outputs on the fit split, (L, G).
        scores: per split, vectors of (L, G).
        damping: the largest of the factors'.
        condition: the largest of the factors'.
    """

    problem: Problem
    weights: list[Tensor]
    offset: Tensor
    target_mean: Tensor
    scores: dict[Part, Score]
    damping: float
    condition: float

    def weight(self, position: int) -> Tensor:
        """Of the target layer at a position: (F, G), or (H_target, F, D_target) with support ``head``."""
        return self.problem.weight(self.weights, position)


def solutions(reader: Reader, problem: Problem, penalty: float, *, scale: PenaltyScale = "mean-variance") -> Iterator[Solution]:
    """Solve a problem for one penalty: one factorisation per panel, whatever the number of target layers.

    Args:
        reader: reads the statistics, within its memory budget.
        problem: what is solved; its target layers come out in order, some at a time.
        penalty: at least 0.
        scale: what it multiplies, see `ridge.factorise`.

    Raises:
        SolveError: the memory budget is too small, or a system has no trustworthy solution.
        StoreError: a damaged chunk.
    """
    batches = list(reader.batches(problem))
    # First what stays, then what is overwritten: together they are what the budget allows for.
    holdout = reader.scatters(problem, "holdout")
    factors = _factors(reader, problem, penalty, scale)
    for batch in batches:
        yield _solved(reader, batch, factors, holdout)


def _solved(reader: Reader, problem: Problem, factors: list[Factor], holdout: list[Tensor]) -> Solution:
    count = {split: reader.store.count(split) for split in SPLITS}
    means = {split: reader.source_means(problem, split) for split in SPLITS}
    weights, fit_means, fit_scores, holdout_scores = [], [], [], []
    for factor, outputs in zip(factors, reader.outputs(problem, "fit"), strict=True):
        weight = ridge.solve(factor, outputs.cross_scatter, name=_name(problem))
        predicted = ridge.fitted_scatter(factor, outputs.cross_scatter, weight)
        weights.append(weight)
        fit_means.append(outputs.target_mean)
        fit_scores.append(ridge.score(outputs, weight, predicted, count["fit"]))
    del outputs  # the memory of the cross scatter is that of the next one
    for panel, outputs in enumerate(reader.outputs(problem, "holdout")):
        move = means["holdout"][panel] - means["fit"][panel]
        predicted = ridge.prediction_scatter(holdout[panel], weights[panel])
        holdout_scores.append(ridge.score(outputs, weights[panel], predicted, count["holdout"], move, fit_means[panel]))
    return Solution(
        problem=problem,
        weights=weights,
        offset=problem.by_output([mean @ weight for mean, weight in zip(means["fit"], weights, strict=True)]),
        target_mean=problem.by_output(fit_means),
        scores={"fit": _joined(problem, fit_scores), "holdout": _joined(problem, holdout_scores)},
        damping=max(factor.damping for factor in factors),
        condition=max(factor.condition for factor in factors),
    )


def _factors(reader: Reader, problem: Problem, penalty: float, scale: PenaltyScale) -> list[Factor]:
    def again(panel: int) -> Tensor:
        return reader.scatters(problem, "fit", to_change=True)[panel]

    return [
        ridge.factorise(
            scatter,
            reader.store.count("fit"),
            penalty,
            again=partial(again, panel),
            scale=scale,
            groups=len(problem.kinds),
            precision=reader.precision,
            name=_name(problem),
        )
        for panel, scatter in enumerate(reader.scatters(problem, "fit", to_change=True))
    ]


def _joined(problem: Problem, panels: list[Score]) -> Score:
    names = ("total", "explained", "predicted", "source_drift", "target_drift")
    return Score(panels[0].count, **{name: problem.by_output([getattr(panel, name) for panel in panels]) for name in names})


def _name(problem: Problem) -> str:
    """What is solved, for errors."""
    source = problem.source_layers
    layers = f"layer {source[0]}" if len(source) == 1 else f"layers {', '.join(map(str, source))}"
    return f"{' and '.join(problem.kinds)} of source {layers}"
