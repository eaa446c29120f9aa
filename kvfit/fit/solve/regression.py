"""The regressions of an input set, solved and scored on both splits, batch by batch of outputs.

`solutions` gives every target block a map of its own; `find_basis` and `reduced_solutions` give all of them maps of one rank
from one shared basis. Both come out as `Solution`, so everything after them is the same.
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
    """Weights of a batch of target blocks, before the gain. With T target blocks and G = H * D outputs each:

    Attributes:
        inputs: what they read.
        targets: the blocks predicted.
        weights: per panel, (F, T * G of the panel), target by target; (r, T * G) under a shared basis.
        means: per panel, mean of the inputs and of the outputs on the fit split.
        holdout: per panel, the holdout system that the weights were scored on.
        scores: per split, vectors of (T, G).
        damping: the largest of the factors'.
        condition: the largest of the factors'.
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
        """Of the target block at a position: (F, G), or (H_target, F, D_target) with support ``head``."""
        panels = self.weights if weights is None else weights
        parts = [weight.T.reshape(len(self.targets), -1, len(weight))[position].T for weight in panels]
        return parts[0] if self.inputs.support == "full" else torch.stack(parts)

    def stored(self, gain: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """Weights with a gain (T, G) folded in as `dtype` holds them, per panel, and the biases (T, G) float64 beside them.

        A bias is taken from the rounded weight: where inputs have means of hundreds of times their spread, it would else be
        off by the rounding of a mean.
        """
        by_panel = gain.view(len(gain), len(self.weights), -1)
        weights = [(w * by_panel[:, panel].flatten()).to(dtype) for panel, w in enumerate(self.weights)]
        biases = [mean - inputs @ w.double() for (inputs, mean), w in zip(self.means, weights, strict=True)]
        return weights, by_target(biases, len(gain))

    def score_stored(self, weights: Sequence[Tensor]) -> Score:
        """The holdout score of weights as they are stored, (T, G)."""
        rows = zip(self.holdout, weights, self.means, strict=True)
        return joined([score(system, w.double(), fit_means=means) for system, w, means in rows], len(self.targets))


def factor_of(
    inputs: InputSet, system: System, penalty: float, scale: PenaltyScale, precision: Precision = "float64"
) -> Factor:
    """The factor of a system of an input set."""
    return ridge.factorise(
        system.scatter, system.count, penalty, scale=scale, groups=inputs.groups, precision=precision, name=inputs.name
    )


def solutions(
    reader: Reader, inputs: InputSet, targets: Sequence[Block], penalty: float, *, scale: PenaltyScale = "mean-variance"
) -> Iterator[Solution]:
    """Solve for one penalty: one factorisation per panel, whatever the number of target blocks.

    Args:
        reader: reads the statistics, within its memory budget.
        inputs: what the maps read.
        targets: what they predict; they come out in order, some at a time.
        penalty: at least 0.
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
        del systems  # the memory of these cross scatters is that of the next
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
    scores = [score(system, weight, fit_means=at) for system, weight, at in zip(holdout, weights, means, strict=True)]
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
    """The directions of an input set that explain the outputs of all target blocks, leading direction first.

    Attributes:
        inputs: what is projected.
        vectors: U, (F, F) float64; for very many inputs only the leading columns.
        variance: what each carries of the outputs, each output in units of its own variance.
        total: what all F directions carry.
        factor: of the penalised covariance.
        penalty: of that.
    """

    inputs: InputSet
    vectors: Tensor
    variance: Tensor
    total: float
    factor: Factor
    penalty: float

    def basis(self, rank: int, dtype: torch.dtype = torch.float64) -> Basis:
        """The basis of the first directions, as `dtype` holds it."""
        weight = basis_of(self.factor, self.vectors[:, :rank]).to(dtype).double()
        return Basis(self.inputs, weight, self.factor, self.penalty)

    def kept(self, rank: int) -> float:
        """The share of the variance of all directions that the first ones carry, on the fit split."""
        return float(self.variance[:rank].sum() / self.total)


@dataclass(frozen=True)
class Basis:
    """A shared basis of an input set.

    Attributes:
        inputs: what is projected.
        weight: (F, r) float64.
        factor: of the penalised covariance that it was found with.
        penalty: of that.
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
    """The directions that a shared basis for all `targets` is made of, see `basis`.

    Args:
        reader: reads the statistics.
        inputs: what is projected.
        targets: what all maps together predict.
        penalty: of the covariance.
        scale: of the penalty.
        rank: how many directions are wanted, for very many inputs, where only these are found; at most a quarter of F.

    Raises:
        SolveError, StoreError: as `solutions`.
    """
    batches = reader.batches(inputs, targets, basis=True)
    (system,) = reader.systems(inputs, batches[0], "fit")
    # Refined solutions of a float32 factor are exact, its directions are not: this one is always float64.
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
    """The systems of a batch of target blocks on a basis, of both splits, and the weights (r, T * G) that the fit gives."""

    targets: tuple[Block, ...]
    fit: System
    holdout: System
    weight: Tensor


def projections(reader: Reader, basis: Basis, targets: Sequence[Block]) -> Iterator[Projected]:
    """Some target blocks on a basis, batch by batch.

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
    """The maps of some target blocks from a basis, as `projections`."""
    for batch, fit, holdout, weight in projections(reader, basis, targets):
        means = [(fit.source_mean, fit.target_mean)]
        yield _solution(basis.inputs, batch, [weight], means, [holdout], [score(fit, weight)], [basis.factor])
