"""The ridge and score functions against least squares on an augmented matrix, in float64 from the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfit.errors import SolveError
from kvfit.fit.solve import ridge
from kvfit.fit.solve.score import r2, score, variance_gain
from kvfit.fit.solve.system import System

SCALES = ("mean-variance", "covariance", "scatter")


def rows(n: int, f: int, g: int, seed: int = 0, drift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Correlated inputs of different scales and noisy outputs of them."""
    generator = torch.Generator().manual_seed(seed)
    mixing = (
        torch.randn(f, f, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * torch.logspace(-1, 1, f).double()
    )
    x = torch.randn(n, f, generator=generator, dtype=torch.float64) @ mixing + 5 + drift
    weight = torch.randn(f, g, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, x @ weight + 30 * torch.randn(n, g, generator=generator, dtype=torch.float64) + drift


def moments(x: Tensor, y: Tensor) -> System:
    xc, yc = x - x.mean(0), y - y.mean(0)
    return System(len(x), xc.T @ xc, xc.T @ yc, yc.square().sum(0), x.mean(0), y.mean(0))


def augmented(x: Tensor, y: Tensor, added: Tensor | float) -> Tensor:
    """Least squares with sqrt(added) of the identity below the centred rows."""
    f = x.shape[1]
    extra = torch.diag(torch.as_tensor(added, dtype=torch.float64).expand(f).sqrt())
    right = torch.cat([y - y.mean(0), torch.zeros(f, y.shape[1], dtype=torch.float64)])
    return torch.linalg.lstsq(torch.cat([x - x.mean(0), extra]), right, driver="gelsd").solution


def added(x: Tensor, penalty: float, scale: str, groups: tuple[int, ...] = ()) -> Tensor:
    """What the penalty adds to the scatter's diagonal."""
    variance = x.var(0, correction=0)
    own = torch.cat([part.mean().expand(len(part)) for part in torch.split(variance, list(groups) or len(variance))])
    return (
        penalty
        * {"mean-variance": len(x) * own, "covariance": torch.full_like(own, len(x)), "scatter": torch.ones_like(own)}[scale]
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("groups", [(), (12, 12), (12, 9, 3)])
@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("penalty", [0.0, 1e-3, 10.0])
def test_weight_is_that_of_augmented_least_squares(scale: Any, groups: int, precision: Any, penalty: float) -> None:
    x, y = rows(300, 24, 7)
    x[:, :12] *= 30  # the first group of inputs is far larger
    system = moments(x, y)
    factor = ridge.factorise(system.scatter, 300, penalty, scale=scale, groups=groups, precision=precision)
    assert factor.damping == 0
    weight = ridge.solve(factor, system.cross)
    wanted = augmented(x, y, added(x, penalty, scale, groups))
    scaled = x.std(0)[:, None]
    torch.testing.assert_close(weight * scaled, wanted * scaled, rtol=1e-8, atol=1e-9 * float((wanted * scaled).abs().max()))
    if precision == "mixed":
        assert factor.lower.dtype == torch.float32


@pytest.mark.parametrize("penalty", [0.0, 1e-5, 1e-2, 1.0])
@pytest.mark.parametrize("gain", [1.0, 1.7])
def test_score_is_that_of_the_rows_on_both_splits(penalty: float, gain: float) -> None:
    x, y = rows(300, 24, 7)
    x2, y2 = rows(200, 24, 7, seed=9, drift=0.4)
    system, system2 = moments(x, y), moments(x2, y2)
    factor = ridge.factorise(system.scatter, 300, penalty)
    weight = ridge.solve(factor, system.cross)
    fit = score(system, weight, factor=factor)
    torch.testing.assert_close(fit.predicted, score(system, weight).predicted, rtol=1e-9, atol=0)
    holdout = score(system2, weight, fit_means=(system.source_mean, system.target_mean))
    for found, a, b in ((fit, x, y), (holdout, x2, y2)):
        error = (b - (y.mean(0) + gain * (a - x.mean(0)) @ weight)).square().sum(0)
        torch.testing.assert_close(found.error(gain), error, rtol=1e-9, atol=0)
        total = (b - b.mean(0)).square().sum(0)
        torch.testing.assert_close(r2(found.error(gain), found.total), 1 - error / total, rtol=0, atol=1e-9)


def test_r2_of_nothing_is_zero_and_of_worse_than_the_mean_negative() -> None:
    assert r2(torch.tensor([0.0, 1.0, 6.0]), torch.tensor([0.0, 0.0, 2.0])).tolist() == [0.0, 0.0, -2.0]


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_inputs_that_never_vary_get_no_weight(precision: Any) -> None:
    x, y = rows(300, 10, 3)
    x[:, 4] = 3.0
    system = moments(x, y)
    weight = ridge.solve(ridge.factorise(system.scatter, 300, 0.01, precision=precision), system.cross)
    assert bool((weight[4] == 0).all())
    alive = [i for i in range(10) if i != 4]
    wanted = augmented(x[:, alive], y, added(x, 0.01, "mean-variance")[0])
    torch.testing.assert_close(weight[alive], wanted, rtol=1e-8, atol=1e-9)


def test_more_inputs_than_rows_is_damped_and_recorded() -> None:
    x, y = rows(20, 40, 3)
    system = moments(x, y)
    factor = ridge.factorise(system.scatter, 20, 0.0)
    assert factor.damping in ridge.DAMPING_LADDER[1:]
    weight = ridge.solve(factor, system.cross)
    assert bool(torch.isfinite(weight).all())
    # As many inputs as that interpolate the rows.
    torch.testing.assert_close((x - x.mean(0)) @ weight, y - y.mean(0), rtol=0, atol=1e-2 * float(y.std()))
    assert float(factor.ridge.max()) == pytest.approx(factor.damping * float(system.scatter.diagonal().mean()) / 20)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("n_rows", [20, 300])  # with and without damping
def test_the_scatter_is_left_as_it_was(n_rows: int, precision: Any) -> None:
    system = moments(*rows(n_rows, 40, 3))
    kept = system.scatter.clone()
    ridge.factorise(system.scatter, n_rows, 0.0, precision=precision)
    assert torch.equal(system.scatter, kept)


def test_mixed_falls_back_to_float64_where_refinement_cannot_converge() -> None:
    x, y = rows(300, 24, 7)
    x[:, 3] = x[:, 5] + 1e-7 * x[:, 3]
    system = moments(x, y)
    factor = ridge.factorise(system.scatter, 300, 0.0, precision="mixed")
    assert factor.covariance is None
    assert factor.lower.dtype == torch.float64
    plain = ridge.factorise(system.scatter, 300, 0.0)
    assert torch.equal(ridge.solve(factor, system.cross), ridge.solve(plain, system.cross))


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(-9, 9), penalty=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]), precision=st.sampled_from(["float64", "mixed"]))
def test_predictions_do_not_depend_on_the_unit_of_the_inputs(scale: float, penalty: float, precision: Any) -> None:
    x, y = rows(100, 8, 3)
    found = []
    for unit in (1.0, 10.0**scale):
        system = moments(x * unit, y)
        weight = ridge.solve(ridge.factorise(system.scatter, 100, penalty, precision=precision), system.cross)
        found.append((x - x.mean(0)) * unit @ weight)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-8 * float(y.std()))


def test_gain_restores_variance_per_output_and_per_head() -> None:
    total, predicted = torch.tensor([[4.0, 9.0, 1.0, 8.0]]), torch.tensor([[1.0, 1.0, 4.0, 5.0]])
    torch.testing.assert_close(variance_gain(total, predicted), torch.tensor([[2.0, 3.0, 0.5, 1.6**0.5]]))
    torch.testing.assert_close(variance_gain(total, predicted, 2), torch.tensor([[6.5**0.5, 6.5**0.5, 1.0, 1.0]]))


def test_gain_is_one_where_there_is_nothing_to_scale() -> None:
    total, predicted = torch.tensor([4.0, 0.0, 5.0, 1e-20]), torch.tensor([0.0, 0.0, 1e-7, 1e-22])
    assert variance_gain(total, predicted).tolist() == [1.0, 1.0, 1.0, 1.0]


def test_errors_name_what_is_solved() -> None:
    scatter = moments(*rows(30, 4, 2)).scatter
    with pytest.raises(SolveError, match="keys: found 1 tokens, needed at least 2"):
        ridge.factorise(scatter.clone(), 1, 0.1, name="keys")
    with pytest.raises(SolveError, match="keys: found source inputs that never vary"):
        ridge.factorise(torch.zeros(4, 4, dtype=torch.float64), 30, 0.1, name="keys")
    bad = scatter.clone()
    bad[1, 1] = float("nan")
    with pytest.raises(SolveError, match="keys: found source statistics that are not finite"):
        ridge.factorise(bad, 30, 0.1, name="keys")
    for value in (float("nan"), 1e9):  # off the diagonal, where only the factorisation meets it
        bad = scatter.clone()
        bad[1, 2] = bad[2, 1] = value
        for precision in ("float64", "mixed"):
            with pytest.raises(
                SolveError, match=r"keys: found a source covariance that Cholesky cannot factor.*raise --penalty"
            ):
                ridge.factorise(bad.clone(), 30, 0.1, name="keys", precision=precision)
