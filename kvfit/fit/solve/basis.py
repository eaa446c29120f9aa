"""Reduced-rank ridge: one basis that all target layers read, found from second moments alone. Pure functions.

All maps read the same F inputs, so the inputs can be projected once per token onto r directions and every map start from there:
F r + r G multiplications a token instead of F G, where G counts the outputs of all maps. With the penalised covariance
``A / N + ridge = L L'`` and the cross scatter of all outputs in units of their own spread,

    Z = L^-1 (B / N) diag(1 / spread),    U = the r leading left singular vectors of Z,

the basis is ``L^-T U`` (F, r) and the coefficients are ``U' L^-1 (B / N)`` (r, G): of all maps of rank r, these have the least
penalised squared error, each output counted in units of its variance. U comes from the eigenvectors of ``Z Z'`` (F, F), which
is summed over batches of outputs, so Z is never whole in memory. Everything is float64.

Source: Izenman (1975), reduced-rank regression; the ridge form follows Mukherjee and Zhu (2011).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvfit.fit.solve.ridge import DEAD, Factor, normal_right
from kvfit.fit.solve.score import Score
from kvfit.fit.solve.system import System

# Of the power iteration: directions beyond those wanted, and passes over the cross scatter.
OVERSAMPLED, POWER_STEPS = 64, 5


def whitened(factor: Factor, system: System) -> Tensor:
    """Z of some outputs, (F, G); outputs that never vary count nothing."""
    variance = system.target_square / system.count
    spread = torch.where(variance > DEAD * variance.max(), variance, float("inf")).sqrt()
    right = normal_right(factor, system.cross / spread)
    torch.linalg.solve_triangular(factor.lower, right, upper=False, out=right)
    return right


def directions(gram: Tensor) -> tuple[Tensor, Tensor]:
    """U of full rank (F, F), leading direction first, and the variance of the outputs that each carries, (F,).

    Args:
        gram: ``Z Z'`` (F, F), summed over all outputs.
    """
    values, vectors = torch.linalg.eigh(gram)
    return _signed(vectors.flip(1)), values.flip(0).clamp(min=0.0)


def leading_directions(
    read: Callable[[], Iterator[Tensor]], n_inputs: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor, float]:
    """The first columns of U (F, r), the variance that each carries (r,), and that of all F, without an F x F matrix.

    Block power iteration on ``Z Z'`` from fixed random numbers: each step reads all of Z once.

    Args:
        read: gives Z in batches of columns, (F, any).
        n_inputs: F.
        rank: r.
        device: where.

    Source: Halko, Martinsson and Tropp, arXiv:0909.4061, algorithm 4.4.
    """
    size = min(n_inputs, rank + OVERSAMPLED)
    start = torch.randn(n_inputs, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    found, total = torch.linalg.qr(start).Q, 0.0
    for step in range(POWER_STEPS):
        product, total = torch.zeros_like(found), 0.0
        for z in read():
            product.addmm_(z, z.T @ found)
            total += float(z.square().sum())
        if step < POWER_STEPS - 1:
            found = torch.linalg.qr(product).Q
    small = found.T @ product
    values, turn = torch.linalg.eigh((small + small.T) / 2)
    return _signed(found @ turn.flip(1)[:, :rank]), values.flip(0)[:rank].clamp(min=0.0), total


def _signed(vectors: Tensor) -> Tensor:
    """Columns with their largest entry positive: the routine's choice of sign would make equal statistics give other bytes."""
    return vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()


def basis_of(factor: Factor, leading: Tensor) -> Tensor:
    """The basis ``L^-T U`` (F, r) of some directions U (F, r); inputs that never vary get 0."""
    basis: Tensor = torch.linalg.solve_triangular(factor.lower.T, leading, upper=True)
    basis[~factor.live] = 0.0
    return basis


def projected(system: System, basis: Tensor, scatter: Tensor | None = None) -> System:
    """The system of the same outputs on the r projected inputs.

    Args:
        system: of one split.
        basis: (F, r).
        scatter: the projected scatter (r, r), where it is known from other outputs of the same split.
    """
    return System(
        count=system.count,
        scatter=basis.T @ system.scatter @ basis if scatter is None else scatter,
        cross=basis.T @ system.cross,
        target_square=system.target_square,
        source_mean=system.source_mean @ basis,
        target_mean=system.target_mean,
    )


def coefficients(factor: Factor, basis: Tensor, fit: System) -> Tensor:
    """Weights (r, G) of the projected fit system, under the penalty that the inputs themselves have.

    For a basis of `basis_of` they are ``U' L^-1 (B / N)``. For one that has been rounded to fewer bits since, they make up
    for the rounding as far as weights can.
    """
    penalty = basis.T @ (factor.ridge[:, None] * basis)
    lower = torch.linalg.cholesky(fit.scatter / fit.count + penalty)
    return torch.cholesky_solve(fit.cross / fit.count, lower)


def prefix_scores(system: System, weight: Tensor, fit_means: tuple[Tensor, Tensor] | None = None) -> Score:
    """The score of the first 1, 2, ..., r rows of a weight (r, G), each field (r, G) or (G,).

    Args:
        system: projected, of one split.
        weight: coefficients, which do not change when later directions are left out.
        fit_means: as for `score.score`.
    """
    below = torch.tril(system.scatter, -1) @ weight
    own = system.scatter.diagonal()[:, None] * weight
    source_mean, target_mean = fit_means or (system.source_mean, system.target_mean)
    return Score(
        system.count,
        system.target_square,
        (weight * system.cross).cumsum(0),
        (weight * (2 * below + own)).cumsum(0).clamp(min=0.0),
        ((system.source_mean - source_mean)[:, None] * weight).cumsum(0),
        system.target_mean - target_mean,
    )
