"""The regressions of an input set, solved and scored on both splits, batch by batch of outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.fit.solve import ridge
from kvfit.fit.solve.reader import Reader
from kvfit.fit.solve.ridge import Factor, PenaltyScale
from kvfit.fit.solve.score import Score, by_target, joined, score
from kvfit.fit.solve.system import InputSet, System
from kvfit.fit.stats.layout import Block, Part


@dataclass(frozen=True)
class Solution:
    """Weights of a batch of target blocks, before the gain. With T target blocks and G = H * D outputs each:

    Attributes:
        inputs: what they read.
        targets: the blocks predicted.
        weights: per panel, (F, T * G of the panel), target by target.
        offset: mean of the inputs on the fit split times the weights, (T, G).
        target_mean: mean of the outputs on the fit split, (T, G).
        scores: per split, vectors of (T, G).
        damping: the largest of the factors'.
        condition: the largest of the factors'.
    """

    inputs: InputSet
    targets: tuple[Block, ...]
    weights: list[Tensor]
    offset: Tensor
    target_mean: Tensor
    scores: dict[Part, Score]
    damping: float
    condition: float

    def weight(self, position: int) -> Tensor:
        """Of the target block at a position: (F, G), or (H_target, F, D_target) with support ``head``."""
        parts = [weight.T.reshape(len(self.targets), -1, len(weight))[position].T for weight in self.weights]
        return parts[0] if self.inputs.support == "full" else torch.stack(parts)


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
        factors = factors or [_factor(reader, inputs, system, penalty, scale) for system in systems]
        weights = [ridge.solve(*pair, name=inputs.name) for pair in zip(factors, (s.cross for s in systems), strict=True)]
        fit = [score(s, weight, factor=factor) for s, weight, factor in zip(systems, weights, factors, strict=True)]
        means = [(system.source_mean, system.target_mean) for system in systems]
        del systems  # the memory of these cross scatters is that of the next
        systems = reader.systems(inputs, batch, "holdout")
        holdout = [score(s, weight, fit_means=at) for s, weight, at in zip(systems, weights, means, strict=True)]
        del systems
        yield Solution(
            inputs=inputs,
            targets=batch,
            weights=weights,
            offset=by_target([mean @ weight for (mean, _), weight in zip(means, weights, strict=True)], len(batch)),
            target_mean=by_target([mean for _, mean in means], len(batch)),
            scores={"fit": joined(fit, len(batch)), "holdout": joined(holdout, len(batch))},
            damping=max(factor.damping for factor in factors),
            condition=max(factor.condition for factor in factors),
        )


def _factor(reader: Reader, inputs: InputSet, system: System, penalty: float, scale: PenaltyScale) -> Factor:
    return ridge.factorise(
        system.scatter,
        system.count,
        penalty,
        scale=scale,
        groups=inputs.groups,
        precision=reader.precision,
        name=inputs.name,
    )
