"""The mathematics of the store: second moments about a shift, as pure functions.

For rows x (F,) and y (G,) of N tokens and fixed shifts s (F,) and u (G,), with d = x - s and e = y - u,

    m = sum d    k = sum e    P = sum d' e    q = sum e * e

are enough: the mean of x is ``s + m / N`` and the scatter about the means is ``P - m' k / N``. With a shift near the mean
nothing large cancels, even where the mean is 1e4 times the spread and float32 sums of ``x' y`` would keep no correct digit.

Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983), equations 1.5 to 2.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ROWS_PER_PRODUCT = 128  # rows of one float32 product
ROWS_PER_SUM = 4096  # rows whose products are summed in float32 before they go into the float64 total
ROWS_PER_WIDENING = 512  # rows that are copied to float64 at a time: more would not fit into a processor's cache
PRODUCT_COLUMNS = 8192  # columns of one float32 product on a CPU


@contextlib.contextmanager
def precise_matmul() -> Iterator[None]:
    """Compute float32 matrix products in full precision inside, and restore the caller's settings afterwards.

    This turns off TF32 and bfloat16 passes for float32 products on graphics cards and in oneDNN, reduced-precision sums of
    half-precision products, float16 accumulation, and autocast.
    """
    cuda, mkldnn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    switches: list[tuple[Any, str, Any]] = [
        (cuda, name, False)
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
        if hasattr(cuda, name)
    ]
    # Torch has an older and a newer interface to one setting. Once a caller has used both, the older one can no longer be
    # read, so the newer one is set too, and last. A torch without the newer interface needs only the older one.
    switches += [(owner, "fp32_precision", "ieee") for owner in (cuda, mkldnn) if hasattr(owner, "fp32_precision")]
    before = [getattr(owner, name) for owner, name, _ in switches]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = None
    try:
        if precision is not None:
            torch.set_float32_matmul_precision("highest")
        for owner, name, value in switches:
            setattr(owner, name, value)
        with torch.autocast("cpu", enabled=False), _no_cuda_autocast():
            yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def _no_cuda_autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext()


def shift_of(rows: Tensor) -> Tensor:
    """The shift that a first batch determines: its mean, rounded to an eighth of the spread or finer.

    It is rounded because half-precision activations take few values, and each time a value recurs, its square of ``x - s``
    rounds the same way: with all digits of the mean in s, that is a bias of 3e-6, whatever the number of rows. Less a shift
    of few bits, such activations remain numbers of few bits, whose squares are summed without rounding.

    Args:
        rows: (N, F) of any float dtype.

    Returns:
        (F,) float32, in the rows' units.
    """
    exact = rows.to(torch.float64)
    centre_of, spread = exact.mean(0), exact.std(0, correction=0)
    step = torch.exp2(torch.floor(torch.log2(spread / 8)))
    return torch.where(spread > 0, (centre_of / step).round() * step, centre_of).to(torch.float32)


def sum_products(total: Tensor, left: Tensor, right: Tensor, *, scratch: Tensor | None = None) -> None:
    """Compute ``total[p] = left' @ right_p`` for P matrices side by side in `right`.

    The error of every element is below 1e-6 times the norms of its two features. Three levels ensure this on any processor:
    float32 products of `ROWS_PER_PRODUCT` rows, summed in float32 up to `ROWS_PER_SUM` rows, and in float64 beyond.

    Args:
        total: (P, R, C) float64; it is overwritten.
        left: (N, R) float32, shifted activations, at least one row.
        right: (N, P * C) float32, shifted activations.
        scratch: memory for one product, at least P * R * C float32.
    """
    n_pairs, n_rows, n_columns = total.shape
    if scratch is None:
        scratch = torch.empty(total.numel(), dtype=torch.float32, device=total.device)
    # A few matrices at a time, so that their float32 sums stay in a processor's cache from one product to the next.
    at_once = max(1, PRODUCT_COLUMNS // n_columns) if left.device.type == "cpu" else n_pairs
    for first in range(0, n_pairs, at_once):
        last = min(first + at_once, n_pairs)
        product = scratch[: n_rows * (last - first) * n_columns].view(n_rows, (last - first) * n_columns)
        columns = right[:, first * n_columns : last * n_columns]
        for start in range(0, left.shape[0], ROWS_PER_SUM):
            _float32_products(product, left[start : start + ROWS_PER_SUM], columns[start : start + ROWS_PER_SUM])
            for pair in range(first, last):  # one by one: the memory order makes all at once five times slower
                part = product[:, (pair - first) * n_columns : (pair - first + 1) * n_columns]
                if start == 0:
                    total[pair].copy_(part)
                else:
                    total[pair].add_(part)


def _float32_products(product: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``product = left' @ right`` in float32, a few rows at a time.

    A library may sum along all rows with one rounding per row. Where values lie on a coarse grid, as half-precision activations
    and float32 activations far from zero do, all of these roundings go the same way. How many rows a library sums so depends
    on the processor, so the rows are cut here.
    """
    narrow = min(left.shape[1], right.shape[1]) < 16  # `addmm` would then add to the product row by row
    torch.mm(left[:ROWS_PER_PRODUCT].T, right[:ROWS_PER_PRODUCT], out=product)
    for start in range(ROWS_PER_PRODUCT, left.shape[0], ROWS_PER_PRODUCT):
        rows, columns = left[start : start + ROWS_PER_PRODUCT], right[start : start + ROWS_PER_PRODUCT]
        if narrow:
            product += rows.T @ columns
        else:
            torch.addmm(product, rows.T, columns, out=product)


def sums(rows: Tensor) -> Tensor:
    """The sum of shifted rows (N, F) float32, as (F,) float64."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[0], ROWS_PER_WIDENING):
        total += rows[start : start + ROWS_PER_WIDENING].sum(0, dtype=torch.float64)
    return total


def squares(rows: Tensor) -> Tensor:
    """The sum of the squares of shifted rows (N, F) float32, squared in float64, as (F,) float64."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[0], ROWS_PER_WIDENING):
        total += rows[start : start + ROWS_PER_WIDENING].to(torch.float64).square_().sum(0)
    return total


def centre(products: Tensor, left_sum: Tensor, right_sum: Tensor, count: int) -> Tensor:
    """The scatter about the means, ``P - m' k / N``.

    Args:
        products: P, (F, G) float64, about the shifts.
        left_sum: m, (F,).
        right_sum: k, (G,).
        count: N; without tokens the scatter is zero.
    """
    return products if count == 0 else products.addr(left_sum, right_sum, alpha=-1.0 / count)


def centre_squares(square: Tensor, total: Tensor, count: int) -> Tensor:
    """The sum of squares about the mean of each feature, ``q - k * k / N``, never below 0. All (G,) float64."""
    return square if count == 0 else (square - total * total / count).clamp_(min=0.0)


def mean(shift: Tensor, total: Tensor, count: int) -> Tensor:
    """``s + m / N`` in float64; the shift itself where there is no token."""
    return shift.to(torch.float64) + total / max(count, 1)


def reshift(
    products: Tensor, left_sum: Tensor, right_sum: Tensor, count: int, left_delta: Tensor, right_delta: Tensor
) -> Tensor:
    """Products about other shifts: ``P + m' b + a' k + N a' b``, with a = old s - new s and b = old u - new u.

    This is the between-shard mean term of merging: products of two parts can be added only where both are about one shift.

    Args:
        products: P, (F, G) float64, about the old shifts.
        left_sum: m about the old shift, (F,).
        right_sum: k about the old shift, (G,).
        count: N.
        left_delta: a, (F,) float64.
        right_delta: b, (G,) float64.
    """
    return products + torch.outer(left_sum + count * left_delta, right_delta) + torch.outer(left_delta, right_sum)


def reshift_sums(total: Tensor, count: int, delta: Tensor) -> Tensor:
    """Sums about another shift, ``m + N a``."""
    return total + count * delta


def reshift_squares(square: Tensor, total: Tensor, count: int, delta: Tensor) -> Tensor:
    """Sums of squares about another shift, ``q + 2 a m + N a * a``."""
    return square + 2.0 * delta * total + count * delta * delta
