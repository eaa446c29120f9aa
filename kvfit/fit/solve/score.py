"""Score a weight on one split, and compute the gain that gives its predictions the target's variance. Pure functions.

A `System` is enough to compute what the rows themselves would give for a weight W (F, G): its error, its R2, and the variance
of its predictions, before or after any gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvfit.fit.solve.ridge import DEAD, Factor
from kvfit.fit.solve.system import System

# A prediction with less than this share of the target's variance is just the mean, with nothing to scale up.
NOTHING_PREDICTED = 1e-6


@dataclass(frozen=True)
class Score:
    """Sums for each output of one weight on one split, from which its error under any gain follows.

    Attributes:
        count: N of the split.
        total: the target's sum of squares about its mean.
        explained: ``diag(W' B)``.
        predicted: ``diag(W' A W)``, the predictions' sum of squares about their mean.
        source_drift: the mean prediction less its mean on the split that the bias was fitted on.
        target_drift: the target's mean less its mean on that split.
    """

    count: int
    total: Tensor
    explained: Tensor
    predicted: Tensor
    source_drift: Tensor
    target_drift: Tensor

    def error(self, gain: Tensor | float = 1.0) -> Tensor:
        """The sum over rows of the squared error of each output, exactly as the rows themselves would give it.

        For predictions scaled by `gain` g about the mean, it is ``s - 2 g diag(W' B) + g^2 diag(W' A W) + N d^2``, where d is
        the drift of the target less g times the drift of the predictions. d is 0 on the split that the bias was fitted on;
        on another split, the last term is the cost of a shifted mean.
        """
        centred = self.total - 2 * gain * self.explained + gain * gain * self.predicted
        return centred.clamp(min=0.0) + self.count * (self.target_drift - gain * self.source_drift).square()


def score(
    system: System, weight: Tensor, *, fit_means: tuple[Tensor, Tensor] | None = None, factor: Factor | None = None
) -> Score:
    """The `Score` of a weight (F, G) on one split.

    Args:
        system: the split's system.
        weight: W.
        fit_means: the means of inputs (F,) and outputs (G,) on the split that the bias was fitted on, where that is another
            one.
        factor: this system's factor, where W solves the system. Then ``(A + N ridge) W = B``, so that
            ``diag(W' A W) = diag(W' B) - N diag(W' ridge W)``, which saves F F G multiplications.
    """
    explained = _column_dots(weight, system.cross)
    if factor is None:
        # Transposed, so that the product is column-major like the weight; the scatter is symmetric.
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
    """``(a * b).sum(0)`` for (F, G) tensors, without the product in memory."""
    return torch.einsum("fg,fg->g", a, b)


def joined(panels: Sequence[Score], n_targets: int) -> Score:
    """Join the scores of an input set's panels into one with fields of shape (target blocks, outputs of a block)."""
    names = [field.name for field in fields(Score) if field.name != "count"]
    return Score(panels[0].count, **{name: by_target([getattr(one, name) for one in panels], n_targets) for name in names})


def by_target(panels: Sequence[Tensor], n_targets: int) -> Tensor:
    """Join the panels' vectors over (target blocks x outputs of the panel) into (target blocks, outputs of all panels)."""
    return torch.stack([panel.view(n_targets, -1) for panel in panels], 1).view(n_targets, -1)


def r2(error: Tensor, total: Tensor) -> Tensor:
    """The share of the variance that is explained, ``1 - error / total``; it may be negative.

    Where nothing varies, there is nothing to explain, and R2 is 0.
    """
    return torch.where(total > 0, 1 - error / torch.where(total > 0, total, 1.0), 0.0)


def variance_gain(target_square: Tensor, predicted: Tensor, width: int = 1) -> Tensor:
    """``sqrt(var(target) / var(prediction))`` for each output, in the shape of the arguments, (..., G).

    A ridge prediction varies less than the truth; scaling each output about its mean restores the variance. That lowers R2,
    and restores what attention does with keys and values (see docs/concepts/gain.md).

    Args:
        target_square: the target's sum of squares about its mean.
        predicted: the prediction's sum of squares about its mean, on the same rows.
        width: pool both sums over runs of this many outputs first, for one gain per head.

    Returns:
        The gain of each output; 1 where the target does not vary or the prediction is the mean.
    """
    if width > 1:
        target_square, predicted = (
            sums.reshape(*sums.shape[:-1], -1, width).sum(-1).repeat_interleave(width, -1)
            for sums in (target_square, predicted)
        )
    usable = predicted > NOTHING_PREDICTED * target_square
    # The prediction of an output that does not vary is rounding.
    usable &= target_square > DEAD * target_square.amax(-1, keepdim=True)
    return torch.where(usable, target_square / torch.where(usable, predicted, 1.0), 1.0).sqrt()
