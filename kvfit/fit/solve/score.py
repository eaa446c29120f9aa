"""How good a weight is on one split, and the gain that gives its predictions the target's variance. Pure functions.

A weight W (F, G) is scored from a `System` as if from the rows behind it: its error, its R2, and the variance of its
predictions, before or after any gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvfit.fit.solve.ridge import DEAD, Factor
from kvfit.fit.solve.system import System

# Below this share of the target's variance a prediction is the mean, and there is nothing to scale up.
NOTHING_PREDICTED = 1e-6


@dataclass(frozen=True)
class Score:
    """What one weight does on one split, per output, in sums that give its error under any gain.

    Attributes:
        count: N of the split.
        total: sum of squares of the target about its mean.
        explained: ``diag(W' B)``.
        predicted: ``diag(W' A W)``, the predictions' sum of squares about their mean.
        source_drift: how far the mean prediction moved from the split that the bias was fitted on.
        target_drift: how far the mean of the target did.
    """

    count: int
    total: Tensor
    explained: Tensor
    predicted: Tensor
    source_drift: Tensor
    target_drift: Tensor

    def error(self, gain: Tensor | float = 1.0) -> Tensor:
        """Sum over rows of the squared error of each output, exactly as if from the rows.

        For predictions scaled by `gain` g about the mean: ``s - 2 g diag(W' B) + g^2 diag(W' A W) + N d^2`` with d the drift
        of the target less g times that of the predictions: 0 on the rows that the bias was fitted on, and on any other split
        what a shifted mean costs.
        """
        centred = self.total - 2 * gain * self.explained + gain * gain * self.predicted
        return centred.clamp(min=0.0) + self.count * (self.target_drift - gain * self.source_drift).square()


def score(
    system: System, weight: Tensor, *, fit_means: tuple[Tensor, Tensor] | None = None, factor: Factor | None = None
) -> Score:
    """The `Score` of a weight (F, G) on one split.

    Args:
        system: of the split.
        weight: W.
        fit_means: mean of inputs (F,) and outputs (G,) on the split that the bias was fitted on, where that is another split.
        factor: of this system, where W solves it: then ``diag(W' A W) = diag(W' B) - N diag(W' ridge W)``, which follows from
            ``(A + N ridge) W = B`` and spares F F G multiplications.
    """
    explained = _column_dots(weight, system.cross)
    if factor is None:
        # Transposed, so that the product comes out column-major like the weight; the scatter is symmetric.
        predicted = _column_dots(weight, (weight.T @ system.scatter).T)
    else:
        penalised = _column_dots(weight, weight * factor.ridge[:, None])
        predicted = (explained - factor.count * penalised).clamp_(min=0.0)
    source_mean, target_mean = fit_means or (system.source_mean, system.target_mean)
    return Score(
        system.count,
        system.target_square,
        explained,
        predicted,
        (system.source_mean - source_mean) @ weight,
        system.target_mean - target_mean,
    )


def _column_dots(a: Tensor, b: Tensor) -> Tensor:
    """``(a * b).sum(0)`` of (F, G) tensors, without the product in memory."""
    return torch.einsum("fg,fg->g", a, b)


def joined(panels: Sequence[Score], n_targets: int) -> Score:
    """One score per target block, (targets, outputs of a block), from those of the panels of an input set."""
    names = [field.name for field in fields(Score) if field.name != "count"]
    return Score(panels[0].count, **{name: by_target([getattr(one, name) for one in panels], n_targets) for name in names})


def by_target(panels: Sequence[Tensor], n_targets: int) -> Tensor:
    """Per-panel vectors over (target blocks x outputs of the panel) as (target blocks, outputs of all panels)."""
    return torch.stack([panel.view(n_targets, -1) for panel in panels], 1).view(n_targets, -1)


def r2(error: Tensor, total: Tensor) -> Tensor:
    """Share of variance explained, ``1 - error / total``; negative values stay as they are.

    Where nothing varies there is nothing to explain, and R2 is 0.
    """
    return torch.where(total > 0, 1 - error / torch.where(total > 0, total, 1.0), 0.0)


def variance_gain(target_square: Tensor, predicted: Tensor, width: int = 1) -> Tensor:
    """``sqrt(var(target) / var(prediction))`` per output, in the shape of its arguments, (..., G).

    A ridge prediction varies less than the truth; scaling each output about its mean gives the variance back. That costs R2
    and restores what attention does with keys and values (see docs/concepts/gain.md).

    Args:
        target_square: sum of squares of the target about its mean.
        predicted: sum of squares of the prediction about its mean, on the same rows.
        width: pool both sums over runs of this many outputs first (one gain per head).

    Returns:
        The gain of each output; 1 where the target does not vary or the prediction is the mean.
    """
    if width > 1:
        target_square, predicted = (
            sums.reshape(*sums.shape[:-1], -1, width).sum(-1).repeat_interleave(width, -1)
            for sums in (target_square, predicted)
        )
    usable = predicted > NOTHING_PREDICTED * target_square
    # An output that does not vary has rounding for a prediction.
    usable &= target_square > DEAD * target_square.amax(-1, keepdim=True)
    return torch.where(usable, target_square / torch.where(usable, predicted, 1.0), 1.0).sqrt()
