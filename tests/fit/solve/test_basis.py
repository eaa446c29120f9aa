"""The shared basis against a singular value decomposition of fitted rows, planted low rank, and full ridge."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from planted import Planted, plant

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError, OptionError, SolveError
from kvfit.fit.solve import basis, regression
from kvfit.fit.solve import solve as solving
from kvfit.fit.solve.basis import prefix_scores
from kvfit.fit.solve.fitter import Fitter
from kvfit.fit.solve.reader import Reader, least_bytes
from kvfit.fit.solve.reduced import RankCurve, candidate_ranks, rank_curve
from kvfit.fit.solve.regression import find_directions, projections, reduced_solutions
from kvfit.fit.solve.score import score
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.solve.system import input_set
from kvfit.fit.stats.layout import Block
from kvfit.fit.stats.store import Store
from kvfit.spec import KINDS

LAYERS = (0, 1, 2, 3)
TARGETS: list[Block] = [(kind, t) for kind in KINDS for t in range(3)]


@pytest.fixture(scope="module")
def pair() -> Planted:
    return plant([(0, 1), (2,), (1, 3)])


@pytest.fixture(scope="module")
def store(pair: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.store(tmp_path_factory.mktemp("planted") / "pair.zarr")


def rows(pair: Planted, split: Any) -> tuple[np.ndarray, np.ndarray]:
    return pair.inputs(split, KINDS, LAYERS), np.concatenate([pair.outputs(split, kind, t) for kind, t in TARGETS], 1)


def oracle(pair: Planted, rank: int, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight (F, G) and bias: least squares on augmented rows, whose fit is cut to a rank by a decomposition of the rows."""
    x, y = rows(pair, "fit")
    variance = x.var(0)
    unit = np.concatenate([np.full(24, part.mean()) for part in np.split(variance, 2)])
    above = np.concatenate([x - x.mean(0), np.diag(np.sqrt(penalty * len(x) * unit))])
    below = np.concatenate([(y - y.mean(0)) / y.std(0), np.zeros((x.shape[1], y.shape[1]))])
    weight = np.linalg.lstsq(above, below, rcond=None)[0]
    right = np.linalg.svd(above @ weight, full_matrices=False)[2][:rank]
    weight = weight @ right.T @ right * y.std(0)
    return weight, y.mean(0) - x.mean(0) @ weight


@pytest.mark.parametrize("rank", [1, 5, 20, 36])
@pytest.mark.parametrize("extra", [0, 10**9])
def test_maps_of_a_rank_are_those_of_a_decomposition_of_the_rows(pair: Planted, store: Path, rank: int, extra: int) -> None:
    reader = Reader(Store.open(store))
    inputs = input_set(reader.models, "keys", LAYERS, "full", "both")
    reader.memory_budget = least_bytes(inputs, "float64", basis=True) + extra
    shared = find_directions(reader, inputs, TARGETS, 0.01).basis(rank)
    found = list(reduced_solutions(reader, shared, TARGETS))
    assert len(found) == (1 if extra else 6)
    weight = shared.weight @ torch.cat([solution.weights[0] for solution in found], 1)
    wanted, bias = oracle(pair, rank, 0.01)
    x, y = rows(pair, "holdout")
    size = rows(pair, "fit")[1].std(0)
    np.testing.assert_allclose(((x - x.mean(0)) @ (weight.numpy() - wanted)) / size, 0, atol=1e-5)
    error = ((y - (x @ wanted + bias)) ** 2).sum(0).reshape(6, 6)
    np.testing.assert_allclose(torch.cat([s.scores["holdout"].error() for s in found]), error, rtol=1e-4)


@pytest.mark.parametrize("extra", [0, 10**9])
def test_leading_directions_of_very_many_inputs_are_those_of_the_decomposition(
    store: Path, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(Store.open(store))
    inputs = input_set(reader.models, "keys", LAYERS, "full", "both")
    reader.memory_budget = least_bytes(inputs, "float64", basis=True) + extra
    exact = find_directions(reader, inputs, TARGETS, 0.01)
    monkeypatch.setattr(regression, "EXACT_INPUTS", 8)
    monkeypatch.setattr(basis, "OVERSAMPLED", 12)
    found = find_directions(reader, inputs, TARGETS, 0.01, rank=6)
    assert found.vectors.shape == (48, 6)
    assert found.total == pytest.approx(exact.total)
    torch.testing.assert_close(found.variance, exact.variance[:6], rtol=1e-4, atol=0)
    errors = [
        sum(float(s.scores["holdout"].error().sum()) for s in reduced_solutions(reader, one.basis(6), TARGETS))
        for one in (exact, found)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(6, dtype=torch.float64))


def test_the_oracle_can_fail(pair: Planted) -> None:
    first, second = oracle(pair, 5, 0.01)[0], oracle(pair, 6, 0.01)[0]
    x, y = rows(pair, "holdout")
    assert (abs((x - x.mean(0)) @ (first - second)) / y.std(0)).max() > 1e-2


def low_rank(rank: int) -> Planted:
    """All outputs are mixtures of the same few mixtures of inputs, without noise."""
    pair = plant([(0, 1), (2,), (1, 3)], noise=0.0)
    generator = torch.Generator().manual_seed(1)
    down = {kind: torch.randn(24, rank, generator=generator, dtype=torch.float64) for kind in KINDS}
    up = [torch.randn(rank, 6, generator=generator, dtype=torch.float64) for _ in TARGETS]
    for split in ("fit", "holdout"):
        latent = sum(torch.from_numpy(pair.inputs(split, [kind], LAYERS)) @ down[kind] for kind in KINDS)
        for (kind, t), mixing in zip(TARGETS, up, strict=True):
            pair.target[split][kind][t] = (latent @ mixing).float()
    return pair


def test_a_planted_rank_is_found_and_is_enough(tmp_path: Path) -> None:
    reader = Reader(Store.open(low_rank(3).store(tmp_path / "s.zarr")))
    inputs = input_set(reader.models, "keys", LAYERS, "full", "both")
    options = Options(penalty=0.0).for_store(reader.store)
    found = find_directions(reader, inputs, TARGETS, 0.0)
    assert found.kept(3) == pytest.approx(1.0, abs=1e-8)
    assert found.kept(2) < 0.99
    curve = rank_curve(Fitter(reader, options, progress=False), found.basis(12))
    by_rank = dict(zip(curve.ranks, curve.errors, strict=True))
    assert curve.ranks == candidate_ranks(12)
    assert by_rank[2] > 0.01
    assert by_rank[3] < 1e-6


def test_a_rank_of_all_inputs_is_the_full_ridge(pair: Planted, store: Path, tmp_path: Path) -> None:
    for name, rank in (("shared", 48), ("separate", "none")):
        solve(store, tmp_path / name, options=Options(penalty=0.02, rank=rank), progress=False)
    shared, separate = (Bundle.open(tmp_path / name) for name in ("shared", "separate"))
    assert (shared.spec.rank, shared.spec.weight_shape("keys", 0)) == (36, (36, 6))  # no more than there are outputs
    for kind, t in TARGETS:
        wanted = pair.predict(separate, "holdout", kind, t)
        np.testing.assert_allclose(pair.predict(shared, "holdout", kind, t), wanted, rtol=0, atol=1e-4 * abs(wanted).max())
        a, b = (bundle.spec.layer(kind, t) for bundle in (shared, separate))
        assert (a.r2_fit, a.r2_holdout) == pytest.approx((b.r2_fit, b.r2_holdout), abs=1e-9)


def test_the_report_is_of_the_rank_that_was_asked_for(pair: Planted, store: Path, tmp_path: Path) -> None:
    report = solve(store, tmp_path / "b", options=Options(penalty=0.01, rank=4), progress=False).report
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.spec.rank == 4
    for detail in report["layers"]:
        kind, t = detail["kind"], detail["layer_index"]
        weight, bias = oracle(pair, 4, 0.01)
        columns = slice(6 * TARGETS.index((kind, t)), 6 * TARGETS.index((kind, t)) + 6)
        plain = {s: rows(pair, s)[0] @ weight[:, columns] + bias[columns] for s in ("fit", "holdout")}
        for split, predicted in plain.items():
            truth = pair.outputs(split, kind, t)
            assert detail[f"r2_{split}"] == pytest.approx(planted.r2(truth, predicted), abs=1e-6)
        # The gain comes after the truncation, per output.
        gain = pair.outputs("fit", kind, t).std(0) / plain["fit"].std(0)
        used = plain["fit"].mean(0) + (plain["holdout"] - plain["fit"].mean(0)) * gain
        np.testing.assert_allclose(pair.predict(bundle, "holdout", kind, t), used, rtol=0, atol=1e-4 * abs(used).max())
        assert detail["r2_holdout_with_gain"] == pytest.approx(planted.r2(pair.outputs("holdout", kind, t), used), abs=1e-6)
    assert report["choice"]["ranks"] == [1, 2, 3, 4]
    mean = 1 - np.mean(
        [
            planted.r2(pair.outputs("holdout", kind, t)[:, [g]], pair.predict(bundle, "holdout", kind, t)[:, [g]])
            for (kind, t), g in product(TARGETS, range(6))
        ]
    )
    assert report["choice"]["holdout_errors"][-1] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scores_of_every_rank_at_once_are_those_one_by_one(store: Path, dtype: torch.dtype) -> None:
    reader = Reader(Store.open(store))
    inputs = input_set(reader.models, "values", LAYERS, "full", "both")
    shared = find_directions(reader, inputs, TARGETS, 0.1).basis(9, dtype)
    for _, fit, holdout, weight in projections(reader, shared, TARGETS):
        means = (fit.source_mean, fit.target_mean)
        every = prefix_scores(holdout, weight, means)
        for rank in range(1, 10):
            one = torch.cat([weight[:rank], torch.zeros_like(weight[rank:])])
            torch.testing.assert_close(every.error(1.3)[rank - 1], score(holdout, one, fit_means=means).error(1.3))


def test_shuffled_targets_have_no_direction_worth_keeping(pair: Planted, tmp_path: Path) -> None:
    report = solve(
        pair.shuffled().store(tmp_path / "s.zarr"), tmp_path / "b", options=Options(rank="auto"), progress=False
    ).report
    assert min(report["choice"]["holdout_errors"]) > 0.95
    assert report["r2"]["keys"]["chosen"]["holdout"] < 0.05


def test_the_best_rank_is_the_smallest_of_those_that_are_as_good() -> None:
    curve = RankCurve([1, 2, 4, 8, 16], [0.9, 0.5, 0.301, 0.3, 0.31])
    assert [curve.best(), curve.best(4), curve.best(2), curve.best(1)] == [4, 4, 2, 1]


def test_candidate_ranks_reach_the_most_and_no_further() -> None:
    for most in (1, 2, 3, 7, 64, 1000):
        ranks = candidate_ranks(most)
        assert ranks[0] == 1
        assert ranks[-1] == most
        assert all(a < b <= max(a + 1, 1.26 * a) for a, b in pairwise(ranks))


def test_inputs_that_never_vary_get_no_part_of_the_basis(tmp_path: Path) -> None:
    pair = plant([(0, 1), (2,), (1, 3)])
    for split in ("fit", "holdout"):
        pair.source[split]["keys"][1][:, 2] = 7.0
        pair.target[split]["values"][1][:, 3] = -2.0
    store = pair.store(tmp_path / "s.zarr")
    solve(store, tmp_path / "b", options=Options(penalty=0.01, rank=36), progress=False)
    bundle = Bundle.open(tmp_path / "b")
    weight = bundle.basis()
    assert weight is not None
    assert bool((weight[8] == 0).all())
    np.testing.assert_allclose(pair.predict(bundle, "holdout", "values", 1)[:, 3], -2.0, rtol=1e-4)


def test_options_that_a_basis_cannot_have_are_refused(pair: Planted, store: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--rank 4: found --support head, needed full, or --rank none"):
        Options(rank=4, support="head")
    with pytest.raises(OptionError, match="--rank: found 0, needed at least 1"):
        Options(rank=0)
    narrow = pair.store(tmp_path / "same.zarr", inputs="same")
    with pytest.raises(MismatchError, match="capture with --inputs both"):
        solve(narrow, tmp_path / "b", options=Options(rank=4), progress=False)
    with pytest.raises(SolveError, match="to find a shared basis of 48 inputs"):
        solve(store, tmp_path / "b", options=Options(rank=4), memory_budget=1 << 20, progress=False)
    solve(narrow, tmp_path / "b", options=Options(rank="auto"), progress=False)  # auto takes what the store allows
    assert Bundle.open(tmp_path / "b").spec.rank is None


def test_the_default_budget_grows_with_the_system_up_to_what_is_free(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solving, "MEMORY_BUDGET", 1 << 10)
    solve(store, tmp_path / "b", options=Options(rank=4), progress=False)
    monkeypatch.setattr(solving, "free_memory", lambda _device: 1 << 20)
    with pytest.raises(SolveError, match=r"--memory-budget: found 0.00 GiB, needed .* to find a shared basis"):
        solve(store, tmp_path / "none", options=Options(rank=4), progress=False)
