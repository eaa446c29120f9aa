"""The ridge functions against least squares on an augmented matrix, in float64 from the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfit.errors import SolveError
from kvfit.fit.solve import ridge

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


def moments(x: Tensor, y: Tensor) -> tuple[Tensor, ridge.Outputs]:
    xc, yc = x - x.mean(0), y - y.mean(0)
    return xc.T @ xc, ridge.Outputs(xc.T @ yc, yc.square().sum(0), y.mean(0))


def augmented(x: Tensor, y: Tensor, added: Tensor | float) -> Tensor:
    """Least squares with sqrt(added) of the identity below the centred rows."""
    f = x.shape[1]
    extra = torch.diag(torch.as_tensor(added, dtype=torch.float64).expand(f).sqrt())
    right = torch.cat([y - y.mean(0), torch.zeros(f, y.shape[1], dtype=torch.float64)])
    return torch.linalg.lstsq(torch.cat([x - x.mean(0), extra]), right, driver="gelsd").solution


def added(x: Tensor, penalty: float, scale: str, groups: int = 1) -> Tensor:
    """What the penalty adds to the scatter's diagonal."""
    variance = x.var(0, correction=0)
    own = torch.cat([part.mean().expand(len(part)) for part in variance.chunk(groups)])
    return (
        penalty
        * {"mean-variance": len(x) * own, "covariance": torch.full_like(own, len(x)), "scatter": torch.ones_like(own)}[scale]
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("penalty", [0.0, 1e-3, 10.0])
def test_weight_is_that_of_augmented_least_squares(scale: Any, groups: int, precision: Any, penalty: float) -> None:
    x, y = rows(300, 24, 7)
    x[:, :12] *= 30  # the first group of inputs is far larger
    scatter, outputs = moments(x, y)
    factor = ridge.factorise(scatter.clone(), 300, penalty, scale=scale, groups=groups, precision=precision)
    assert factor.damping == 0
    weight = ridge.solve(factor, outputs.cross_scatter)
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
    (scatter, outputs), (scatter2, outputs2) = moments(x, y), moments(x2, y2)
    factor = ridge.factorise(scatter.clone(), 300, penalty)
    weight = ridge.solve(factor, outputs.cross_scatter)
    predicted = ridge.fitted_scatter(factor, outputs.cross_scatter, weight)
    torch.testing.assert_close(predicted, ridge.prediction_scatter(scatter, weight), rtol=1e-9, atol=0)
    fit = ridge.score(outputs, weight, predicted, 300)
    move = x2.mean(0) - x.mean(0)
    holdout = ridge.score(outputs2, weight, ridge.prediction_scatter(scatter2, weight), 200, move, outputs.target_mean)
    for score, a, b in ((fit, x, y), (holdout, x2, y2)):
        error = (b - (y.mean(0) + gain * (a - x.mean(0)) @ weight)).square().sum(0)
        torch.testing.assert_close(score.error(gain), error, rtol=1e-9, atol=0)
        total = (b - b.mean(0)).square().sum(0)
        torch.testing.assert_close(ridge.r2(score.error(gain), score.total), 1 - error / total, rtol=0, atol=1e-9)


def test_r2_of_nothing_is_zero_and_of_worse_than_the_mean_negative() -> None:
    assert ridge.r2(torch.tensor([0.0, 1.0, 6.0]), torch.tensor([0.0, 0.0, 2.0])).tolist() == [0.0, 0.0, -2.0]


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_inputs_that_never_vary_get_no_weight(precision: Any) -> None:
    x, y = rows(300, 10, 3)
    x[:, 4] = 3.0
    scatter, outputs = moments(x, y)
    factor = ridge.factorise(scatter.clone(), 300, 0.01, precision=precision)
    weight = ridge.solve(factor, outputs.cross_scatter)
    assert bool((weight[4] == 0).all())
    alive = [i for i in range(10) if i != 4]
    wanted = augmented(x[:, alive], y, added(x, 0.01, "mean-variance")[0])
    torch.testing.assert_close(weight[alive], wanted, rtol=1e-8, atol=1e-9)


def test_more_inputs_than_rows_is_damped_and_recorded() -> None:
    x, y = rows(20, 40, 3)
    scatter, outputs = moments(x, y)
    factor = ridge.factorise(scatter.clone(), 20, 0.0)
    assert factor.damping in ridge.DAMPING_LADDER[1:]
    weight = ridge.solve(factor, outputs.cross_scatter)
    assert bool(torch.isfinite(weight).all())
    # As many inputs as that interpolate the rows.
    torch.testing.assert_close((x - x.mean(0)) @ weight, y - y.mean(0), rtol=0, atol=1e-2 * float(y.std()))
    assert float(factor.ridge.max()) == pytest.approx(factor.damping * float(scatter.diagonal().mean()) / 20)


def test_the_ladder_reads_the_scatter_again_for_every_rung() -> None:
    scatter, _ = moments(*rows(20, 40, 3))
    kept, calls = scatter.clone(), []

    def again() -> Tensor:
        calls.append(None)
        return kept.clone()

    factor = ridge.factorise(scatter, 20, 0.0, again=again)
    assert len(calls) == ridge.DAMPING_LADDER.index(factor.damping) > 0


def test_the_factor_takes_the_memory_of_the_scatter() -> None:
    scatter, _ = moments(*rows(300, 24, 7))
    assert ridge.factorise(scatter, 300, 0.1, again=scatter.clone).lower.data_ptr() == scatter.data_ptr()


def test_mixed_falls_back_to_float64_where_refinement_cannot_converge() -> None:
    x, y = rows(300, 24, 7)
    x[:, 3] = x[:, 5] + 1e-7 * x[:, 3]
    scatter, outputs = moments(x, y)
    factor = ridge.factorise(scatter.clone(), 300, 0.0, precision="mixed")
    assert factor.covariance is None
    assert factor.lower.dtype == torch.float64
    plain = ridge.factorise(scatter.clone(), 300, 0.0)
    assert torch.equal(ridge.solve(factor, outputs.cross_scatter), ridge.solve(plain, outputs.cross_scatter))


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(-9, 9), penalty=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]), precision=st.sampled_from(["float64", "mixed"]))
def test_predictions_do_not_depend_on_the_unit_of_the_inputs(scale: float, penalty: float, precision: Any) -> None:
    x, y = rows(100, 8, 3)
    found = []
    for unit in (1.0, 10.0**scale):
        scatter, outputs = moments(x * unit, y)
        weight = ridge.solve(ridge.factorise(scatter, 100, penalty, precision=precision), outputs.cross_scatter)
        found.append((x - x.mean(0)) * unit @ weight)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-8 * float(y.std()))


def test_gain_restores_variance_per_output_and_per_head() -> None:
    total, predicted = torch.tensor([[4.0, 9.0, 1.0, 8.0]]), torch.tensor([[1.0, 1.0, 4.0, 5.0]])
    torch.testing.assert_close(ridge.variance_gain(total, predicted), torch.tensor([[2.0, 3.0, 0.5, 1.6**0.5]]))
    torch.testing.assert_close(ridge.variance_gain(total, predicted, 2), torch.tensor([[6.5**0.5, 6.5**0.5, 1.0, 1.0]]))


def test_gain_is_one_where_there_is_nothing_to_scale() -> None:
    total, predicted = torch.tensor([4.0, 0.0, 5.0, 1e-20]), torch.tensor([0.0, 0.0, 1e-7, 1e-22])
    assert ridge.variance_gain(total, predicted).tolist() == [1.0, 1.0, 1.0, 1.0]


def test_errors_name_what_is_solved() -> None:
    scatter, _ = moments(*rows(30, 4, 2))
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
