"""Reduced-rank ridge regression: find one basis that all target layers read, from second moments alone. Pure functions.

All maps read the same F inputs, so the inputs can be projected once per token onto r directions, from which every map starts.
That takes F r + r G multiplications per token instead of F G, where G counts the outputs of all maps. With the penalised
covariance ``A / N + ridge = L L'`` and the cross scatter of all outputs in units of their own spread,

    Z = L^-1 (B / N) diag(1 / spread),    U = the r leading left singular vectors of Z,

the basis is ``L^-T U`` (F, r) and the coefficients are ``U' L^-1 (B / N)`` (r, G). Among all maps of rank r, these have the
least penalised squared error, with each output in units of its variance. U comes from the eigenvectors of ``Z Z'`` (F, F),
which is summed over batches of outputs, so that Z is never whole in memory. Everything is float64.

Source: Izenman (1975), reduced-rank regression; the ridge form follows Mukherjee and Zhu (2011).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvfit.fit.solve.ridge import DEAD, Factor, normal_right
from kvfit.fit.solve.score import Score
from kvfit.fit.solve.system import System

# The power iteration computes so many directions beyond those wanted, in so many passes over the cross scatter.
OVERSAMPLED, POWER_STEPS = 64, 5


def whitened(factor: Factor, system: System) -> Tensor:
    """Z for some outputs, (F, G); 0 for outputs that never vary."""
    variance = system.target_square / system.count
    spread = torch.where(variance > DEAD * variance.max(), variance, float("inf")).sqrt()
    right = normal_right(factor, system.cross / spread)
    torch.linalg.solve_triangular(factor.lower, right, upper=False, out=right)
    return right


def directions(gram: Tensor) -> tuple[Tensor, Tensor]:
    """U of full rank (F, F), leading direction first, and the outputs' variance that each direction carries, (F,).

    Args:
        gram: ``Z Z'`` (F, F), summed over all outputs.
    """
    values, vectors = torch.linalg.eigh(gram)
    return _signed(vectors.flip(1)), values.flip(0).clamp(min=0.0)


def leading_directions(
    read: Callable[[], Iterator[Tensor]], n_inputs: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor, float]:
    """The first columns of U (F, r), the variance that each carries (r,), and the variance of all F, without an F x F matrix.

    This is a block power iteration on ``Z Z'`` from fixed random numbers. Each step reads all of Z once.

    Args:
        read: returns Z in batches of columns, (F, any).
        n_inputs: F.
        rank: r.
        device: where to compute.

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
    """The columns, each with its largest entry made positive, so that the library's choice of sign changes nothing."""
    return vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()


def basis_of(factor: Factor, leading: Tensor) -> Tensor:
    """The basis ``L^-T U`` (F, r) from some directions U (F, r); 0 for inputs that never vary."""
    basis: Tensor = torch.linalg.solve_triangular(factor.lower.T, leading, upper=True)
    basis[~factor.live] = 0.0
    return basis


def projected(system: System, basis: Tensor, scatter: Tensor | None = None) -> System:
    """The system of the same outputs with the r projected inputs.

    Args:
        system: the system of one split.
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
    """Weights (r, G) for the projected fit system, under the same penalty as the inputs themselves.

    For a basis from `basis_of` they are ``U' L^-1 (B / N)``. For a basis that was rounded to fewer bits afterwards, they make
    up for the rounding as far as weights can.
    """
    penalty = basis.T @ (factor.ridge[:, None] * basis)
    lower = torch.linalg.cholesky(fit.scatter / fit.count + penalty)
    return torch.cholesky_solve(fit.cross / fit.count, lower)


def prefix_scores(system: System, weight: Tensor, fit_means: tuple[Tensor, Tensor] | None = None) -> Score:
    """The score of the first 1, 2, ..., r rows of a weight (r, G); its fields are (r, G) or (G,).

    Args:
        system: the projected system of one split.
        weight: the coefficients, which do not change when later directions are left out.
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
