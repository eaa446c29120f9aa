"""The mathematics of shifted moments, against sums over rows written out in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfit.fit.stats import moments


def rows(seed: int, n_rows: int, width: int, mean: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_rows, width, generator=generator, dtype=torch.float64) + mean


def sums_about(x: torch.Tensor, y: torch.Tensor, shift_x: torch.Tensor, shift_y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dx, dy = x - shift_x, y - shift_y
    return dx.T @ dy, dx.sum(0), dy.sum(0), dy.square().sum(0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), n_rows=st.integers(0, 40), mean=st.sampled_from([0.0, 1e6]), moved=st.floats(-50, 50))
def test_reshift_is_the_sum_about_the_other_shift(seed: int, n_rows: int, mean: float, moved: float) -> None:
    x, y = rows(seed, n_rows, 4, mean), rows(seed + 1, n_rows, 3, -mean)
    old = (torch.full((4,), mean + 1), torch.full((3,), -mean - 2))
    new = (old[0] + moved, old[1] - 3 * moved)
    old, new = tuple(s.double() for s in old), tuple(s.double() for s in new)
    products, left, right, square = sums_about(x, y, *old)
    a, b = old[0] - new[0], old[1] - new[1]
    expected = sums_about(x, y, *new)
    scale = {"rtol": 1e-9, "atol": 1e-9 * max(1.0, moved**2) * max(1, n_rows)}
    torch.testing.assert_close(moments.reshift(products, left, right, n_rows, a, b), expected[0], **scale)
    torch.testing.assert_close(moments.reshift_sums(left, n_rows, a), expected[1], **scale)
    torch.testing.assert_close(moments.reshift_squares(square, right, n_rows, b), expected[3], **scale)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    mean=st.sampled_from([0.0, 1e6]),
    order=st.randoms(use_true_random=False),
)
def test_parts_about_their_own_means_merge_to_the_whole(seed: int, cuts: list[int], mean: float, order: object) -> None:
    """Any split of the rows, empty parts too, in any order: reshift to one shift, add, centre."""
    x, y = rows(seed, 60, 4, mean), rows(seed + 1, 60, 3, -mean)
    edges = [0, *sorted(cuts), 60]
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    order.shuffle(parts)  # type: ignore[attr-defined]
    common = x.mean(0).float().double(), y.mean(0).float().double()
    total = [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    for px, py in parts:
        own = (px.mean(0), py.mean(0)) if len(px) else (torch.full((4,), 7.0), torch.full((3,), -9.0))
        own = tuple(s.float().double() for s in own)
        products, left, right, _ = sums_about(px, py, *own)
        a, b = own[0] - common[0], own[1] - common[1]
        total[0] += moments.reshift(products, left, right, len(px), a, b)
        total[1] += moments.reshift_sums(left, len(px), a)
        total[2] += moments.reshift_sums(right, len(px), b)
    expected = (x - x.mean(0)).T @ (y - y.mean(0))
    torch.testing.assert_close(moments.centre(*total, 60), expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(moments.mean(common[0], total[1], 60), x.mean(0), rtol=1e-12, atol=1e-9)


def test_merging_without_the_mean_term_is_wrong() -> None:
    """Negative control: scatters of parts with different means do not just add up."""
    x = torch.cat([rows(0, 30, 2, 0.0), rows(1, 30, 2, 5.0)])
    centred = lambda part: (part - part.mean(0)).T @ (part - part.mean(0))  # noqa: E731
    assert (centred(x[:30]) + centred(x[30:]) - centred(x)).abs().max() > 100


def test_products_of_many_rows_are_added_up_in_float64() -> None:
    """Ones and a spread: the float32 sum of the squares of 200,000 ones plus noise would lose the noise."""
    generator = torch.Generator().manual_seed(0)
    left = 1 + 0.01 * torch.randn(60_000, 8, generator=generator)
    right = 1 + 0.01 * torch.randn(60_000, 24, generator=generator)
    total = torch.zeros(3, 8, 8, dtype=torch.float64)
    moments.sum_products(total, left, right)
    expected = (left.double().T @ right.double()).view(8, 3, 8).transpose(0, 1)
    assert ((total - expected) / expected).abs().max() < 1e-7
    torch.testing.assert_close(moments.squares(left), left.double().square().sum(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(moments.sums(left), left.double().sum(0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("width", [1, 6, 15, 16, 40])
@pytest.mark.parametrize("n_rows", [1, 127, 128, 4096, 4097, 20_000])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_products_reach_the_bar_at_any_width_and_length(width: int, n_rows: int, mean: float) -> None:
    """At the mean of 1e4 the values lie on a grid of 1/1024, whose squares all round the same way."""
    left = (rows(width, n_rows, width, mean).float() - (mean + 0.25)).float()
    right = (rows(width + 1, n_rows, 2 * width, mean).float() - (mean + 0.25)).float()
    total = torch.zeros(2, width, width, dtype=torch.float64)
    moments.sum_products(total, left, right)
    exact = (left.double().T @ right.double()).view(width, 2, width).transpose(0, 1)
    norms = left.double().norm(dim=0)[:, None] * right.double().norm(dim=0).view(2, 1, width)
    assert ((total - exact).abs() <= 1e-6 * norms).all()


def test_uncentred_float32_sums_miss_the_bar_that_shifted_ones_reach() -> None:
    """Negative control for the shift, at a mean of 1e4 spreads."""
    x = (rows(0, 4096, 6, 0.0) + 1e4).float()
    exact = (x.double() - x.double().mean(0)).T @ (x.double() - x.double().mean(0))
    scale = exact.diagonal().sqrt()[:, None] * exact.diagonal().sqrt()

    def error(shift: torch.Tensor) -> float:
        d, total = x - shift, torch.zeros(1, 6, 6, dtype=torch.float64)
        moments.sum_products(total, d, d)
        found = moments.centre(total[0], moments.sums(d), moments.sums(d), len(x))
        return ((found - exact).abs() / scale).max().item()

    assert error(moments.shift_of(x[:16])) < 1e-6
    assert error(torch.zeros(6)) > 1e-3


def half_precision_error(mean: float, dtype: torch.dtype, shift: torch.Tensor | None = None) -> float:
    x = (rows(0, 4096, 64, 0.0) + mean).to(dtype)
    d = x.float() - (moments.shift_of(x[:50]) if shift is None else shift)
    total = torch.zeros(1, 64, 64, dtype=torch.float64)
    moments.sum_products(total, d, d)
    norms = d.double().norm(dim=0)
    return ((total[0] - d.double().T @ d.double()).abs() / (norms[:, None] * norms)).max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 30.0, 100.0, 1000.0])
def test_half_precision_reaches_the_bar_about_a_shift_of_few_bits(mean: float, dtype: torch.dtype) -> None:
    assert half_precision_error(mean, dtype) < 1e-6


def test_half_precision_misses_the_bar_about_the_mean_itself() -> None:
    """Negative control: few values whose squares all round the same way."""
    x = (rows(0, 4096, 64, 0.0) + 30).bfloat16()
    assert half_precision_error(30.0, torch.bfloat16, x[:50].double().mean(0).float() + 1e-4) > 1e-6


def test_the_shift_is_near_the_mean_and_exact_where_nothing_varies() -> None:
    x = rows(3, 50, 6, 1e4)
    x[:, 2] = 1.2345
    shift, spread = moments.shift_of(x.float()), x.std(0, correction=0)
    assert ((shift - x.mean(0)).abs() <= spread / 16 + 1e-3).all()
    assert shift[2] == x.float()[0, 2]
    assert torch.equal(moments.shift_of(x[:1].bfloat16()), x[0].bfloat16().float())


def test_nothing_is_divided_by_a_count_of_zero() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert not moments.centre(torch.zeros(3, 3, dtype=torch.float64), zero, zero, 0).any()
    assert not moments.centre_squares(zero, zero, 0).any()
    assert torch.equal(moments.mean(torch.tensor([1.5, 2.0, 3.0]), zero, 0), torch.tensor([1.5, 2.0, 3.0], dtype=torch.float64))


def switches() -> dict[str, object]:
    cuda = torch.backends.cuda.matmul
    names = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    found: dict[str, object] = {
        name: getattr(cuda, name) for name in (*names, "allow_fp16_accumulation") if hasattr(cuda, name)
    }
    if hasattr(torch.backends.mkldnn, "matmul"):
        found["mkldnn"] = torch.backends.mkldnn.matmul.fp32_precision
    return {**found, "tf32": cuda.allow_tf32, "precision": torch.get_float32_matmul_precision()}


@pytest.fixture
def restored_precision() -> object:
    yield None
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_precision_switches_are_off_inside_and_restored(precision: str, reduced: bool, fails: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    before = switches()
    try:
        with moments.precise_matmul():
            inside = switches()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert switches() == before
    assert inside["tf32"] is False
    assert inside["precision"] == "highest"
    assert inside["allow_bf16_reduced_precision_reduction"] is False
    assert inside.get("mkldnn", "ieee") == "ieee"
    assert (before["tf32"] is True) == (precision != "highest")  # there was something to switch off


@pytest.mark.usefixtures("restored_precision")
def test_autocast_is_off_inside_and_on_again_after() -> None:
    ones = torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with moments.precise_matmul():
            assert (ones @ ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16
