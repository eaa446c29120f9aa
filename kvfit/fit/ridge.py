"""Ridge regression from second moments alone.

Everything here is a pure function of centred scatters, means and counts. With N rows, inputs x (F,) and outputs y (G,),

    A = sum (x - mean x)(x - mean x)'     source scatter, (F, F)
    B = sum (x - mean x)(y - mean y)'     cross scatter, (F, G)
    s = sum (y - mean y)^2                target scatter, (G,), the diagonal only

the map ``y ~ x @ weight + bias`` minimises ``mean |y - x weight - bias|^2 + penalty * v * |weight|^2`` where v, the mean
variance of the inputs, makes the penalty a pure number. The bias is unpenalised. All tensors are float64.

Source: Hoerl and Kennard (1970); the pooling of rows over tokens follows Heo et al., arXiv:2608.03893, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfit.errors import SolveError

PenaltyScale = Literal["mean-variance", "covariance", "scatter"]

# Relative to the mean variance. The first rung is no damping at all; each failed factorisation climbs one.
DAMPING_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)


@dataclass(frozen=True)
class Moments:
    """Centred second moments of one regression problem on one split.

    Attributes:
        count: N, rows.
        source_scatter: (F, F).
        cross_scatter: (F, G).
        target_scatter: (G,).
        source_mean: (F,).
        target_mean: (G,).
    """

    count: int
    source_scatter: Tensor
    cross_scatter: Tensor
    target_scatter: Tensor
    source_mean: Tensor
    target_mean: Tensor


@dataclass(frozen=True)
class Factor:
    """A Cholesky factor of the penalised covariance of the live inputs.

    Attributes:
        lower: (F', F'), over the F' inputs that vary.
        live: (F,) bool, the inputs that vary; the others get weight 0.
        count: N.
        damping: what the ladder had to add, relative to the mean variance; 0 when nothing.
        condition: lower bound of the condition number, from the factor's diagonal.
    """

    lower: Tensor
    live: Tensor
    count: int
    damping: float
    condition: float


def mean_variance(source_scatter: Tensor, count: int) -> float:
    """v, the mean over inputs of their variance; a pure scale. Source scatter (F, F) in squared input units."""
    return float(source_scatter.diagonal().mean()) / max(count, 1)


def factorise(source_scatter: Tensor, count: int, penalty: float, *, scale: PenaltyScale = "mean-variance", name: str = "") -> Factor:
    """Factor ``A / N + penalty * unit * I``.

    Args:
        source_scatter: A, (F, F) float64, centred.
        count: N, rows behind it.
        penalty: at least 0.
        scale: what the penalty multiplies: the mean variance of the inputs (``mean-variance``), 1 (``covariance``), or
            1 / N (``scatter``: the penalty is added to A itself).
        name: what is solved, for the error.

    Raises:
        SolveError: no rung of the damping ladder gives a factor, or the scatter is not finite.
    """
    if count < 2:
        raise SolveError(f"{name}: found {count} tokens, needed at least 2: capture more text")
    variance = source_scatter.diagonal() / count
    if not bool(torch.isfinite(variance).all()):
        raise SolveError(f"{name}: found source statistics that are not finite, needed finite ones: capture again")
    unit = float(variance.mean())
    # A column whose variance is at rounding level next to the largest carries nothing but rounding.
    live = variance > variance.max() * 1e-14
    if unit <= 0 or not bool(live.any()):
        raise SolveError(f"{name}: found source inputs that never vary, needed at least one that does: check the source model")
    matrix = source_scatter / count if bool(live.all()) else source_scatter[live][:, live] / count
    matrix.diagonal().add_(penalty * {"mean-variance": unit, "covariance": 1.0, "scatter": 1.0 / count}[scale])
    added = 0.0
    for rung in DAMPING_LADDER:
        matrix.diagonal().add_((rung - added) * unit)
        added = rung
        lower, failed = torch.linalg.cholesky_ex(matrix)
        diagonal = lower.diagonal()
        if int(failed) == 0 and bool(torch.isfinite(diagonal).all()) and float(diagonal.min()) > 1e-9 * float(diagonal.max()):
            condition = (float(diagonal.max()) / float(diagonal.min())) ** 2
            return Factor(lower, live, count, rung, condition)
    raise SolveError(
        f"{name}: found a source covariance that Cholesky cannot factor even with {DAMPING_LADDER[-1]:g} of the mean variance "
        f"added, needed a positive definite one: raise --penalty or capture more text"
    )


def solve(factor: Factor, cross_scatter: Tensor) -> Tensor:
    """Weight (F, G) = (A / N + penalty)^-1 (B / N); inputs that never vary get 0."""
    right = cross_scatter[factor.live] / factor.count
    solved = torch.cholesky_solve(right, factor.lower)
    if bool(factor.live.all()):
        return solved
    weight = cross_scatter.new_zeros(cross_scatter.shape)
    weight[factor.live] = solved
    return weight


def bias(moments: Moments, weight: Tensor) -> Tensor:
    """The unpenalised bias, ``mean y - mean x @ weight``, (G,)."""
    return moments.target_mean - moments.source_mean @ weight


def prediction_scatter(source_scatter: Tensor, weight: Tensor) -> Tensor:
    """Centred sum of squares of each prediction, ``diag(W' A W)``, (G,)."""
    return (weight * (source_scatter @ weight)).sum(0)


def squared_error(moments: Moments, weight: Tensor, bias: Tensor) -> Tensor:
    """Sum over rows of the squared error of each output, (G,), exactly as if from the rows.

    With d = mean y - mean x W - bias, ``SSE = s - 2 diag(W' B) + diag(W' A W) + N d^2``: the last term is 0 on the rows that
    the bias was fitted on, and on any other split it is what a shifted mean costs.
    """
    centred = (
        moments.target_scatter
        - 2 * (weight * moments.cross_scatter).sum(0)
        + prediction_scatter(moments.source_scatter, weight)
    )
    shift = moments.target_mean - moments.source_mean @ weight - bias
    return centred + moments.count * shift.square()


def r2(error: Tensor, target_scatter: Tensor) -> float:
    """Share of variance explained, pooled over outputs: ``1 - sum SSE / sum SST``; negative values are reported as they are."""
    total = float(target_scatter.sum())
    return 1.0 - float(error.sum()) / total if total > 0 else float("nan")


def variance_gain(target_scatter: Tensor, predicted: Tensor, groups: int | None = None) -> Tensor:
    """``sqrt(var(target) / var(prediction))`` per output, (G,).

    A ridge prediction varies less than the truth; scaling each output about its mean gives the variance back. That costs R2
    and restores what attention does with the values (see docs/concepts).

    Args:
        target_scatter: s, (G,).
        predicted: `prediction_scatter` on the same rows, (G,).
        groups: pool both sums over this many equal groups of outputs first (one gain per head).

    Returns:
        The gain of each output; 1 where target or prediction does not vary.
    """
    if groups is not None:
        width = target_scatter.numel() // groups
        target_scatter = target_scatter.view(groups, width).sum(1).repeat_interleave(width)
        predicted = predicted.view(groups, width).sum(1).repeat_interleave(width)
    floor = 1e-12 * target_scatter.max()
    usable = (predicted > floor) & (target_scatter > floor)
    ratio = torch.where(usable, target_scatter / torch.where(usable, predicted, 1.0), 1.0)
    return ratio.sqrt()
