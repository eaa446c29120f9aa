"""Solve ridge regressions from second moments alone.

Everything here is a pure function. With N rows, inputs x (F,) and outputs y (G,),

    A = sum (x - mean x)(x - mean x)'     source scatter, (F, F)
    B = sum (x - mean x)(y - mean y)'     cross scatter, (F, G)

the map ``y ~ x @ weight + bias`` minimises ``mean |y - x weight - bias|^2 + penalty * v * |weight|^2``. The mean variance v of
the inputs makes the penalty a pure number. The bias is not penalised. All tensors are float64.

Source: Hoerl and Kennard (1970); the pooling of rows over tokens follows Heo et al., arXiv:2608.03893, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfit.errors import SolveError

PenaltyScale = Literal["mean-variance", "covariance", "scatter"]
Precision = Literal["float64", "mixed"]

# Relative to the mean variance. The first rung is no damping; each factorisation that fails climbs one rung.
DAMPING_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
# A column whose variance relative to the largest is below this holds nothing but rounding errors.
DEAD = 1e-14
EPSILON = 2.2e-16
# Refinement stops at the first relative residual, when a step no longer halves it, or after so many steps. A residual above the
# second is refused.
REFINED, REFINED_ENOUGH, REFINEMENTS = 1e-14, 1e-9, 30


@dataclass(frozen=True)
class Factor:
    """A Cholesky factor of the penalised covariance.

    Attributes:
        lower: (F, F) float64. Where `covariance` is kept for refinement, float32, and the factor of the covariance divided by
            the mean of its diagonal.
        ridge: (F,), what was added to the covariance's diagonal, damping included.
        live: (F,) bool, the inputs that vary; the others get weight 0.
        count: N.
        damping: what the ladder had to add, relative to the mean variance; 0 where it added nothing.
        condition: a lower bound of the condition number, from the factor's diagonal.
        covariance: the penalised covariance (F, F) float64 for refinement, or None.
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
    scale: PenaltyScale = "mean-variance",
    groups: Sequence[int] = (),
    precision: Precision = "float64",
    name: str = "",
) -> Factor:
    """Factor ``A / N + penalty * unit * I``.

    Args:
        scatter: A, (F, F) float64, symmetric.
        count: N, the number of rows that it sums.
        penalty: at least 0.
        scale: what the penalty multiplies: the mean variance of the inputs (``mean-variance``), 1 (``covariance``), or
            1 / N (``scatter``: the penalty is added to A itself).
        groups: the lengths of the runs of inputs that have a mean variance of their own; one run by default. Each run is
            penalised as if it had been scaled to unit mean variance and its weights scaled back.
        precision: ``mixed`` factors in float32 and refines solutions in float64, for devices where float64 is slow. Where the
            covariance is too ill-conditioned for that, the factor is float64.
        name: what is solved, for the error message.

    Raises:
        SolveError: no rung of the damping ladder gives a factor, or the scatter is not finite.
    """
    if count < 2:
        raise SolveError(f"{name}: found {count} tokens, needed at least 2: capture more text")
    variance = scatter.diagonal() / count
    if not bool(torch.isfinite(variance).all()):
        raise SolveError(f"{name}: found source statistics that are not finite, needed finite ones: capture again")
    live = variance > variance.max() * DEAD
    if not bool(live.any()):
        raise SolveError(f"{name}: found source inputs that never vary, needed at least one that does: check the source model")
    unit = torch.cat([run.mean().expand(len(run)) for run in torch.split(variance, list(groups) or len(variance))])
    # A group in which nothing varies still needs a positive diagonal.
    unit = torch.where(unit > 0, unit, variance.mean())
    per_unit = {"mean-variance": unit, "covariance": torch.ones_like(unit), "scatter": torch.full_like(unit, 1 / count)}[scale]
    for rung in DAMPING_LADDER:
        ridge = penalty * per_unit + rung * unit
        matrix = scatter / count
        if not bool(live.all()):
            matrix[~live] = 0.0
            matrix[:, ~live] = 0.0
        matrix.diagonal().copy_(torch.where(live, variance + ridge, unit))
        refined = _mixed(matrix) if precision == "mixed" else None
        lower, covariance = refined or (_cholesky(matrix, EPSILON * len(variance)), None)
        if lower is not None:
            pivots = lower.diagonal().double().square()
            return Factor(lower, ridge, live, count, rung, float(pivots.max() / pivots.min()), covariance)
        del matrix  # frees it before the next rung makes its own
    raise SolveError(
        f"{name}: found a source covariance that Cholesky cannot factor even with {DAMPING_LADDER[-1]:g} of the mean variance "
        f"added, needed a positive definite one: raise --penalty or capture more text"
    )


def _cholesky(matrix: Tensor, limit: float) -> Tensor | None:
    """The lower factor, in the memory of a symmetric matrix; None where an input is a combination of the others.

    It is one where less than the share `limit` of its variance is left once the earlier inputs are taken out.
    """
    diagonal = matrix.diagonal().clone()
    # The transpose is column-major, as the library needs it, so no copy is made.
    lower, failed = torch.linalg.cholesky_ex(matrix.T, out=(matrix.T, torch.empty((), dtype=torch.int32, device=matrix.device)))
    # The share of each input's variance that is left once the earlier inputs are taken out. Where nothing should be left,
    # rounding leaves F epsilon.
    left = lower.diagonal().square() / diagonal
    return lower if int(failed) == 0 and bool((left > limit).all()) else None


def _mixed(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """A float32 factor of ``matrix / unit``, and the matrix; None where refinement with it does not converge."""
    unit = float(matrix.diagonal().mean())
    lower = _cholesky(torch.div(matrix, unit, out=torch.empty_like(matrix, dtype=torch.float32)), 0.0)
    if lower is None:
        return None
    # A vector of alternating signs is unlikely to be near an eigenvector, so it tries every part of the spectrum.
    trial = torch.ones(len(matrix), 1, dtype=matrix.dtype, device=matrix.device)
    trial[::2] = -1.0
    _, residual = _refine(lower, matrix, trial, unit)
    return (lower, matrix) if residual <= REFINED_ENOUGH else None


def _refine(lower: Tensor, matrix: Tensor, right: Tensor, unit: float) -> tuple[Tensor, float]:
    """``matrix^-1 right`` from float32 solves and float64 residuals, and the largest relative residual of a column.

    Source: Wilkinson (1963), iterative refinement.
    """
    size = right.norm(dim=0)
    size = torch.where(size > 0, size, 1.0)
    solution, residual, worst_before = torch.zeros_like(right), right, float("inf")
    for _ in range(REFINEMENTS):
        level = residual.norm(dim=0)
        level = torch.where(level > 0, level, 1.0)
        solution = solution + _substitute(lower, (residual / level).float()).double() * (level / unit)
        residual = right - matrix @ solution
        worst = float((residual.norm(dim=0) / size).max())
        if worst <= REFINED or not worst < worst_before / 2:
            return solution, worst
        worst_before = worst
    return solution, worst_before


def _substitute(lower: Tensor, right: Tensor) -> Tensor:
    """``(L L')^-1 right``, in the memory of `right`; `torch.cholesky_solve` would copy the factor."""
    torch.linalg.solve_triangular(lower, right, upper=False, out=right)
    torch.linalg.solve_triangular(lower.T, right, upper=True, out=right)
    return right


def normal_right(factor: Factor, cross: Tensor) -> Tensor:
    """The right side of the normal equations, ``B / N`` (F, G), as a copy; 0 for inputs that never vary."""
    right = cross / factor.count
    if not bool(factor.live.all()):
        right[~factor.live] = 0.0
    return right


def solve(factor: Factor, cross: Tensor, *, name: str = "") -> Tensor:
    """The weight (F, G) = (A / N + ridge)^-1 (B / N); 0 for inputs that never vary.

    Raises:
        SolveError: refinement did not reach the precision that it reached in the trial of `factorise`.
    """
    right = normal_right(factor, cross)
    if factor.covariance is None:
        return _substitute(factor.lower, right)
    solution, residual = _refine(factor.lower, factor.covariance, right, float(factor.covariance.diagonal().mean()))
    if not residual <= REFINED_ENOUGH:
        raise SolveError(f"{name}: found a residual of {residual:.1e}, needed {REFINED_ENOUGH:g}: use --precision float64")
    return solution
