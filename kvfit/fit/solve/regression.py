"""Solve the regressions of an input set and score them on both splits, in batches of outputs.

`solutions` solves a separate map for every target block. `find_directions` and `reduced_solutions` solve maps of one rank from
one shared basis. Both return `Solution`, so everything after them is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvfit.fit.solve import ridge
from kvfit.fit.solve.basis import basis_of, coefficients, directions, leading_directions, projected, whitened
from kvfit.fit.solve.reader import EXACT_INPUTS, Reader
from kvfit.fit.solve.ridge import Factor, PenaltyScale, Precision
from kvfit.fit.solve.score import Score, by_target, joined, score
from kvfit.fit.solve.system import InputSet, System
from kvfit.fit.stats.layout import Block, Part, Split

Means = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Solution:
    """Weights of a batch of target blocks of one shape, before the gain. With T target blocks and G = H * D outputs each:

    Attributes:
        inputs: the set that the maps read.
        targets: the blocks that they predict.
        weights: per panel, (F, T * G of the panel), target by target; (r, T * G) with a shared basis.
        means: per panel, the means of the inputs and of the outputs on the fit split.
        holdout: per panel, the holdout system that the weights were scored on.
        scores: per split, the scores, (T, G).
        damping: the largest damping of the factors.
        condition: the largest condition of the factors.
    """

    inputs: InputSet
    targets: tuple[Block, ...]
    weights: list[Tensor]
    means: list[Means]
    holdout: list[System]
    scores: dict[Part, Score]
    damping: float
    condition: float

    def weight(self, position: int, weights: list[Tensor] | None = None) -> Tensor:
        """The weight of the target block at a position: (F, G), or (H_target, F, D_target) with support ``head``."""
        panels = self.weights if weights is None else weights
        parts = [weight.T.reshape(len(self.targets), -1, len(weight))[position].T for weight in panels]
        return parts[0] if self.inputs.support == "full" else torch.stack(parts)

    def stored(self, gain: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """The weights per panel, with a gain (T, G) folded in and rounded to `dtype`, and the biases (T, G) in float64.

        A bias is computed from the rounded weight. Otherwise, where the mean of an input is hundreds of times its spread, the
        weight's rounding times that mean would be an error of the prediction.
        """
        by_panel = gain.view(len(gain), len(self.weights), -1)
        weights = [(w * by_panel[:, panel].flatten()).to(dtype) for panel, w in enumerate(self.weights)]
        biases = [mean - inputs @ w.double() for (inputs, mean), w in zip(self.means, weights, strict=True)]
        return weights, by_target(biases, len(gain))

    def score_stored(self, weights: Sequence[Tensor]) -> Score:
        """The holdout score of the stored weights, (T, G)."""
        rows = zip(self.holdout, weights, self.means, strict=True)
        return joined([score(system, w.double(), fit_means=means) for system, w, means in rows], len(self.targets))


def factor_of(
    inputs: InputSet, system: System, penalty: float, scale: PenaltyScale, precision: Precision = "float64"
) -> Factor:
    """Factor a system of an input set."""
    return ridge.factorise(
        system.scatter, system.count, penalty, scale=scale, groups=inputs.groups, precision=precision, name=inputs.name
    )


def solutions(
    reader: Reader, inputs: InputSet, targets: Sequence[Block], penalty: float, *, scale: PenaltyScale = "mean-variance"
) -> Iterator[Solution]:
    """Solve the maps of some target blocks for one penalty, with one factorisation per panel.

    Args:
        reader: reads the statistics, within its memory budget.
        inputs: the set that the maps read.
        targets: the blocks that they predict; the solutions cover them some at a time, in order among those of one shape.
        penalty: the ridge penalty, at least 0.
        scale: what it multiplies, see `ridge.factorise`.

    Raises:
        SolveError: the memory budget is too small, or a system has no trustworthy solution.
        StoreError: a damaged chunk.
    """
    factors: list[Factor] = []
    for batch in reader.batches(inputs, targets):
        systems = reader.systems(inputs, batch, "fit")
        factors = factors or [factor_of(inputs, system, penalty, scale, reader.precision) for system in systems]
        weights = [ridge.solve(*pair, name=inputs.name) for pair in zip(factors, (s.cross for s in systems), strict=True)]
        fit = [score(s, weight, factor=factor) for s, weight, factor in zip(systems, weights, factors, strict=True)]
        means = [(system.source_mean, system.target_mean) for system in systems]
        del systems  # frees these cross scatters before the next ones are read
        yield _solution(inputs, batch, weights, means, reader.systems(inputs, batch, "holdout"), fit, factors)


def _solution(
    inputs: InputSet,
    targets: tuple[Block, ...],
    weights: list[Tensor],
    means: list[Means],
    holdout: list[System],
    fit: list[Score],
    factors: list[Factor],
) -> Solution:
    scores = [score(system, weight, fit_means=pair) for system, weight, pair in zip(holdout, weights, means, strict=True)]
    return Solution(
        inputs=inputs,
        targets=targets,
        weights=weights,
        means=means,
        holdout=holdout,
        scores={"fit": joined(fit, len(targets)), "holdout": joined(scores, len(targets))},
        damping=max(factor.damping for factor in factors),
        condition=max(factor.condition for factor in factors),
    )


@dataclass(frozen=True)
class Directions:
    """The directions of an input set that best explain the outputs of all target blocks, leading direction first.

    Attributes:
        inputs: the set that is projected.
        vectors: U, (F, F) float64; with very many inputs, only its leading columns.
        variance: the outputs' variance that each direction carries, each output in units of its own variance.
        total: the variance that all F directions carry.
        factor: the factor of the penalised covariance.
        penalty: its penalty.
    """

    inputs: InputSet
    vectors: Tensor
    variance: Tensor
    total: float
    factor: Factor
    penalty: float

    def basis(self, rank: int, dtype: torch.dtype = torch.float64) -> Basis:
        """The basis of the first directions, rounded to `dtype`."""
        weight = basis_of(self.factor, self.vectors[:, :rank]).to(dtype).double()
        return Basis(self.inputs, weight, self.factor, self.penalty)

    def kept(self, rank: int) -> float:
        """The first directions' share of the variance of all directions, on the fit split."""
        return float(self.variance[:rank].sum() / self.total)


@dataclass(frozen=True)
class Basis:
    """A shared basis of an input set.

    Attributes:
        inputs: the set that is projected.
        weight: the basis, (F, r) float64.
        factor: the factor of the penalised covariance that it was computed with.
        penalty: the penalty of that covariance.
    """

    inputs: InputSet
    weight: Tensor
    factor: Factor
    penalty: float


def find_directions(
    reader: Reader,
    inputs: InputSet,
    targets: Sequence[Block],
    penalty: float,
    scale: PenaltyScale = "mean-variance",
    *,
    rank: int | None = None,
) -> Directions:
    """Find the directions for a shared basis of all `targets`, see `basis`.

    Args:
        reader: reads the statistics.
        inputs: the set that is projected.
        targets: the blocks that all maps together predict.
        penalty: the ridge penalty.
        scale: what it multiplies, see `ridge.factorise`.
        rank: with very many inputs, how many directions to find, at most a quarter of F; otherwise all are found.

    Raises:
        SolveError, StoreError: as in `solutions`.
    """
    batches = reader.batches(inputs, targets, basis=True)
    (system,) = reader.systems(inputs, batches[0], "fit")
    # Solutions from a float32 factor are exact after refinement, directions are not, so this factor is always float64.
    factor = factor_of(inputs, system, penalty, scale)
    del system

    def read() -> Iterator[Tensor]:
        return (whitened(factor, *reader.systems(inputs, batch, "fit")) for batch in batches)

    f = inputs.n_inputs
    if f <= EXACT_INPUTS:
        gram = torch.zeros(f, f, dtype=torch.float64, device=reader.device)
        for z in read():
            gram.addmm_(z, z.T)
        vectors, variance = directions(gram)
        return Directions(inputs, vectors, variance, float(variance.sum()), factor, penalty)
    wanted = max(1, min(rank or f, f // 4))
    vectors, variance, total = leading_directions(read, f, wanted, reader.device)
    return Directions(inputs, vectors, variance, total, factor, penalty)


class Projected(NamedTuple):
    """A batch of target blocks on a basis: the systems of both splits, and the weights (r, T * G) from the fit split."""

    targets: tuple[Block, ...]
    fit: System
    holdout: System
    weight: Tensor


def projections(reader: Reader, basis: Basis, targets: Sequence[Block]) -> Iterator[Projected]:
    """Project the systems of some target blocks onto a basis, batch by batch.

    Raises:
        StoreError: a damaged chunk.
    """
    scatters: dict[Split, Tensor] = {}

    def read(batch: tuple[Block, ...], split: Split) -> System:
        (system,) = reader.systems(basis.inputs, batch, split)
        system = projected(system, basis.weight, scatters.get(split))
        scatters[split] = system.scatter
        return system

    for batch in reader.batches(basis.inputs, targets, basis=True):
        fit = read(batch, "fit")
        yield Projected(batch, fit, read(batch, "holdout"), coefficients(basis.factor, basis.weight, fit))


def reduced_solutions(reader: Reader, basis: Basis, targets: Sequence[Block]) -> Iterator[Solution]:
    """Solve the maps of some target blocks from a basis; errors are those of `projections`."""
    for batch, fit, holdout, weight in projections(reader, basis, targets):
        means = [(fit.source_mean, fit.target_mean)]
        yield _solution(basis.inputs, batch, [weight], means, [holdout], [score(fit, weight)], [basis.factor])
