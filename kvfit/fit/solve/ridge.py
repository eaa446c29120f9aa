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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfit.errors import SolveError

PenaltyScale = Literal["mean-variance", "covariance", "scatter"]
Precision = Literal["float64", "mixed"]

# Relative to the mean variance. The first rung is no damping at all; each failed factorisation climbs one.
DAMPING_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
# A column whose variance is at rounding level next to the largest carries nothing but rounding.
DEAD = 1e-14
EPSILON = 2.2e-16
# Refinement stops at this relative residual, or when a step no longer halves it; what stops above the second is refused.
REFINED, REFINED_ENOUGH, REFINEMENTS = 1e-14, 1e-9, 30
# Below this share of the target's variance a prediction is the mean, and there is nothing to scale up.
NOTHING_PREDICTED = 1e-6


@dataclass(frozen=True)
class Outputs:
    """What a regression knows of its outputs on one split.

    Attributes:
        cross_scatter: B, (F, G).
        target_scatter: s, (G,).
        target_mean: (G,).
    """

    cross_scatter: Tensor
    target_scatter: Tensor
    target_mean: Tensor


@dataclass(frozen=True)
class Factor:
    """A Cholesky factor of the penalised covariance.

    Attributes:
        lower: (F, F) float64; where `covariance` is kept for refinement, float32 and of the covariance over its mean diagonal.
        ridge: (F,), what was added to the covariance's diagonal, damping included.
        live: (F,) bool, the inputs that vary; the others get weight 0.
        count: N.
        damping: what the ladder had to add, relative to the mean variance; 0 when nothing.
        condition: lower bound of the condition number, from the factor's diagonal.
        covariance: the penalised covariance (F, F) float64, or None.
    """

    lower: Tensor
    ridge: Tensor
    live: Tensor
    count: int
    damping: float
    condition: float
    covariance: Tensor | None = None


def factorise(
    scatter: Tensor,
    count: int,
    penalty: float,
    *,
    again: Callable[[], Tensor] | None = None,
    scale: PenaltyScale = "mean-variance",
    groups: int = 1,
    precision: Precision = "float64",
    name: str = "",
) -> Factor:
    """Factor ``A / N + penalty * unit * I``.

    Args:
        scatter: A, (F, F) float64, symmetric. **Overwritten**: at the scale of a large pair there is no room for two.
        count: N, rows behind it.
        penalty: at least 0.
        again: gives A again, to be overwritten too, where a rung of the ladder fails; by default a copy is made for that.
        scale: what the penalty multiplies: the mean variance of the inputs (``mean-variance``), 1 (``covariance``), or
            1 / N (``scatter``: the penalty is added to A itself).
        groups: equal runs of inputs with a mean variance of their own: keys and values differ in scale by orders of
            magnitude, and each is penalised relative to its own.
        precision: ``mixed`` factors in float32 and refines solutions in float64, for devices where float64 is slow. Where
            the covariance is too ill-conditioned for that, the factor is float64 all the same.
        name: what is solved, for the error.

    Raises:
        SolveError: no rung of the damping ladder gives a factor, or the scatter is not finite.
    """
    if count < 2:
        raise SolveError(f"{name}: found {count} tokens, needed at least 2: capture more text")
    if again is None:
        again = scatter.clone().clone
    variance = scatter.diagonal() / count
    if not bool(torch.isfinite(variance).all()):
        raise SolveError(f"{name}: found source statistics that are not finite, needed finite ones: capture again")
    live = variance > variance.max() * DEAD
    if not bool(live.any()):
        raise SolveError(f"{name}: found source inputs that never vary, needed at least one that does: check the source model")
    unit = variance.view(groups, -1).mean(1).repeat_interleave(len(variance) // groups)
    # A group that never varies at all still needs a positive diagonal.
    unit = torch.where(unit > 0, unit, variance.mean())
    per_unit = {"mean-variance": unit, "covariance": torch.ones_like(unit), "scatter": torch.full_like(unit, 1 / count)}[scale]
    for rung in DAMPING_LADDER:
        matrix = again() if rung else scatter
        ridge = penalty * per_unit + rung * unit
        matrix.div_(count)
        if not bool(live.all()):
            matrix[~live] = 0.0
            matrix[:, ~live] = 0.0
        matrix.diagonal().copy_(torch.where(live, variance + ridge, unit))
        found = _mixed(matrix) if precision == "mixed" else None
        lower, covariance = found or (_cholesky(matrix, EPSILON * len(variance)), None)
        if lower is not None:
            pivots = lower.diagonal().double().square()
            return Factor(lower, ridge, live, count, rung, float(pivots.max() / pivots.min()), covariance)
    raise SolveError(
        f"{name}: found a source covariance that Cholesky cannot factor even with {DAMPING_LADDER[-1]:g} of the mean variance "
        f"added, needed a positive definite one: raise --penalty or capture more text"
    )


def _cholesky(matrix: Tensor, limit: float) -> Tensor | None:
    """The lower factor in the memory of a symmetric matrix, None where less than `limit` of an input is its own."""
    diagonal = matrix.diagonal().clone()
    # The transpose is the column-major layout that the routine works on, so it makes no copy.
    lower, failed = torch.linalg.cholesky_ex(matrix.T, out=(matrix.T, torch.empty((), dtype=torch.int32, device=matrix.device)))
    # What is left of each input once the earlier ones are taken out of it; where all should go, rounding leaves F epsilon.
    left = lower.diagonal().square() / diagonal
    return lower if int(failed) == 0 and bool((left > limit).all()) else None


def _mixed(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """A float32 factor of ``matrix / unit`` and the matrix, None where refinement with it does not converge."""
    unit = float(matrix.diagonal().mean())
    lower = _cholesky(torch.div(matrix, unit, out=torch.empty_like(matrix, dtype=torch.float32)), 0.0)
    if lower is None:
        return None
    # Alternating signs are near no eigenvector of a covariance by accident, so every part of the spectrum is tried.
    trial = torch.ones(len(matrix), 1, dtype=matrix.dtype, device=matrix.device)
    trial[::2] = -1.0
    _, residual = _refine(lower, matrix, trial, unit)
    return (lower, matrix) if residual <= REFINED_ENOUGH else None


def _refine(lower: Tensor, matrix: Tensor, right: Tensor, unit: float) -> tuple[Tensor, float]:
    """``matrix^-1 right`` by float32 solves and float64 residuals, and the largest relative residual of a column.

    Source: Wilkinson (1963), iterative refinement.
    """
    size = right.norm(dim=0)
    size = torch.where(size > 0, size, 1.0)
    solution, rest, before = torch.zeros_like(right), right, float("inf")
    for _ in range(REFINEMENTS):
        level = rest.norm(dim=0)
        level = torch.where(level > 0, level, 1.0)
        solution = solution + _substitute(lower, (rest / level).float()).double() * (level / unit)
        rest = right - matrix @ solution
        now = float((rest.norm(dim=0) / size).max())
        if now <= REFINED or not now < before / 2:
            return solution, now
        before = now
    return solution, before


def _substitute(lower: Tensor, right: Tensor) -> Tensor:
    """``(L L')^-1 right`` in the memory of `right`; `torch.cholesky_solve` would copy the factor."""
    torch.linalg.solve_triangular(lower, right, upper=False, out=right)
    torch.linalg.solve_triangular(lower.T, right, upper=True, out=right)
    return right


def solve(factor: Factor, cross_scatter: Tensor, *, name: str = "") -> Tensor:
    """Weight (F, G) = (A / N + ridge)^-1 (B / N); inputs that never vary get 0.

    Raises:
        SolveError: refinement did not reach the precision that it reached on trial.
    """
    right = cross_scatter / factor.count
    if not bool(factor.live.all()):
        right[~factor.live] = 0.0
    if factor.covariance is None:
        return _substitute(factor.lower, right)
    solution, residual = _refine(factor.lower, factor.covariance, right, float(factor.covariance.diagonal().mean()))
    if not residual <= REFINED_ENOUGH:
        raise SolveError(f"{name}: found a residual of {residual:.1e}, needed {REFINED_ENOUGH:g}: use --precision float64")
    return solution


def prediction_scatter(source_scatter: Tensor, weight: Tensor) -> Tensor:
    """Centred sum of squares of each prediction, ``diag(W' A W)``, (G,)."""
    # Transposed, so that the product comes out column-major like the weight; the scatter is symmetric.
    return _column_dots(weight, (weight.T @ source_scatter).T)


def fitted_scatter(factor: Factor, cross_scatter: Tensor, weight: Tensor) -> Tensor:
    """`prediction_scatter` on the rows of the fit, (G,), without A: ``diag(W' B) - N diag(W' ridge W)``.

    Follows from ``(A + N ridge) W = B``; it spares a second copy of A beside its factor, and F F G multiplications.
    """
    penalised = _column_dots(weight, weight * factor.ridge[:, None])
    return (_column_dots(weight, cross_scatter) - factor.count * penalised).clamp_(min=0.0)


def _column_dots(a: Tensor, b: Tensor) -> Tensor:
    """``(a * b).sum(0)`` of (F, G) tensors, without the product in memory."""
    return torch.einsum("fg,fg->g", a, b)


@dataclass(frozen=True)
class Score:
    """What one weight does on one split, per output, in sums that give its error under any gain.

    Attributes:
        count: N of the split.
        total: s, the target scatter.
        explained: ``diag(W' B)``.
        predicted: ``diag(W' A W)``.
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
    outputs: Outputs,
    weight: Tensor,
    predicted: Tensor,
    count: int,
    source_move: Tensor | None = None,
    fit_mean: Tensor | None = None,
) -> Score:
    """The `Score` of a weight (F, G) on one split.

    Args:
        outputs: of the split.
        weight: W.
        predicted: ``diag(W' A W)`` of the split.
        count: N of the split.
        source_move: mean of the inputs on the split less that on the fit split, (F,); None on the fit split.
        fit_mean: mean of the outputs on the fit split, (G,); None on the fit split.
    """
    zero = torch.zeros_like(predicted)
    return Score(
        count,
        outputs.target_scatter,
        _column_dots(weight, outputs.cross_scatter),
        predicted,
        zero if source_move is None else source_move @ weight,
        zero if fit_mean is None else outputs.target_mean - fit_mean,
    )


def r2(error: Tensor, total: Tensor) -> Tensor:
    """Share of variance explained, ``1 - error / total``; negative values stay as they are.

    Where nothing varies there is nothing to explain, and R2 is 0.
    """
    return torch.where(total > 0, 1 - error / torch.where(total > 0, total, 1.0), 0.0)


def variance_gain(target_scatter: Tensor, predicted: Tensor, width: int = 1) -> Tensor:
    """``sqrt(var(target) / var(prediction))`` per output, in the shape of its arguments, (..., G).

    A ridge prediction varies less than the truth; scaling each output about its mean gives the variance back. That costs R2
    and restores what attention does with keys and values (see docs/guides/solve.md).

    Args:
        target_scatter: s.
        predicted: `prediction_scatter` on the same rows.
        width: pool both sums over runs of this many outputs first (one gain per head).

    Returns:
        The gain of each output; 1 where the target does not vary or the prediction is the mean.
    """
    if width > 1:
        target_scatter, predicted = (
            sums.reshape(*sums.shape[:-1], -1, width).sum(-1).repeat_interleave(width, -1)
            for sums in (target_scatter, predicted)
        )
    usable = predicted > NOTHING_PREDICTED * target_scatter
    # An output that does not vary has rounding for a prediction.
    usable &= target_scatter > DEAD * target_scatter.amax(-1, keepdim=True)
    return torch.where(usable, target_scatter / torch.where(usable, predicted, 1.0), 1.0).sqrt()
