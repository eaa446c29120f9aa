"""Maps between models whose heads differ by layer: planted truth, and an oracle that solves each layer from the rows alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import Planted, plant, r2

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError
from kvfit.fit.solve.solve import RECIPES, Options, solve
from kvfit.fit.solve.sweep import sweep
from kvfit.spec import KINDS, Kind

SOURCE = ((2, 3, 3), (1, 4, 2), (3, 2, 3), (2, 3, 3))
TARGET = ((1, 5, 3), (2, 3, 3), (1, 6, 4), (2, 3, 3))
CHOSEN = ([0], [1, 2], [3], [2])
PENALTY = 1e-3


@pytest.fixture(scope="module")
def planted() -> Planted:
    return plant(CHOSEN, source_heads=SOURCE, target_heads=TARGET, noise=0.1, mean=2.0)


def solved(planted: Planted, folder: Path, *, inputs: Any = "both", **options: Any) -> Bundle:
    store = folder / f"{inputs}.zarr"
    if not store.exists():
        planted.store(store, inputs=inputs)
    asked = Options(**{"penalty": PENALTY, "rank": "none", "cost": None, **options})
    return Bundle.open(solve(store, folder / f"bundle-{len(list(folder.iterdir()))}", options=asked, progress=False).bundle)


def oracle(planted: Planted, kind: Kind, layer_index: int, kinds: tuple[Kind, ...]) -> np.ndarray:
    """Ridge by least squares on the fit rows, each kind's inputs penalised relative to their own variance."""
    x, y = planted.inputs("fit", kinds, range(len(SOURCE))), planted.outputs("fit", kind, layer_index)
    groups = [planted.inputs("fit", (one,), range(len(SOURCE))) for one in kinds]
    ridge = np.concatenate([np.full(group.shape[1], group.var(0).mean()) for group in groups]) * PENALTY * len(x)
    xc, yc = x - x.mean(0), y - y.mean(0)
    a, b = np.concatenate([xc, np.diag(np.sqrt(ridge))]), np.concatenate([yc, np.zeros((x.shape[1], y.shape[1]))])
    return np.linalg.lstsq(a, b, rcond=None)[0]


@pytest.mark.parametrize("inputs", ["same", "both"])
def test_each_layer_is_the_least_squares_solution_of_its_rows(planted: Planted, inputs: Any, tmp_path: Path) -> None:
    bundle = solved(planted, tmp_path, inputs=inputs, gain="none")
    for layer in bundle.spec.layers:
        weight, _ = bundle.layer(layer.kind, layer.layer_index)
        kinds = KINDS if inputs == "both" else (layer.kind,)
        wanted = oracle(planted, layer.kind, layer.layer_index, kinds)
        assert weight.shape == wanted.shape
        x, y = planted.inputs("fit", kinds, range(len(SOURCE))), planted.outputs("fit", layer.kind, layer.layer_index)
        apart = (x - x.mean(0)) @ (weight.double().numpy() - wanted)
        assert (np.abs(apart).max(0) / y.std(0)).max() < 1e-3  # the rows were rounded to float32 before they were summed
        truth = planted.outputs("holdout", layer.kind, layer.layer_index)
        found = r2(truth, planted.predict(bundle, "holdout", layer.kind, layer.layer_index))
        assert found > 0.97
        assert layer.r2_holdout == pytest.approx(found, abs=1e-5)


def test_the_planted_layers_are_chosen(planted: Planted, tmp_path: Path) -> None:
    for select in ("independent", "greedy"):
        bundle = solved(planted, tmp_path, inputs="same", top_k=1, select=select)
        for layer in bundle.spec.layers:
            assert layer.source_layers[0] in CHOSEN[layer.layer_index]
    heads = bundle.solve["probe"]["keys"]["holdout_heads"]
    assert [[len(scores) for scores in row] for row in heads] == [[1] * 4, [2] * 4, [1] * 4, [2] * 4]


@pytest.mark.parametrize("gain", ["variance", "head"])
def test_the_gain_gives_back_each_output_or_heads_variance(planted: Planted, gain: Any, tmp_path: Path) -> None:
    bundle = solved(planted, tmp_path, inputs="same", gain=gain, gain_split="fit", penalty=0.3)
    for layer in bundle.spec.layers:
        kind, index = layer.kind, layer.layer_index
        size = planted.target_spec.shape(kind, index)[1] if gain == "head" else 1
        truth, made = planted.outputs("fit", kind, index), planted.predict(bundle, "fit", kind, index)
        variances = [rows.var(0).reshape(-1, size).sum(1) for rows in (truth, made)]
        np.testing.assert_allclose(variances[1], variances[0], rtol=1e-4)


@pytest.mark.parametrize("rank", [6, 12])
def test_a_shared_basis_serves_layers_of_all_widths(planted: Planted, rank: int, tmp_path: Path) -> None:
    """As good as the best of that rank, by the whitened problem written out."""
    bundle = solved(planted, tmp_path, rank=rank, gain="none")
    assert bundle.spec.rank == rank
    x = planted.inputs("fit", KINDS, range(len(SOURCE)))
    groups = [planted.inputs("fit", (one,), range(len(SOURCE))) for one in KINDS]
    ridge = np.concatenate([np.full(group.shape[1], group.var(0).mean()) for group in groups]) * PENALTY
    targets = [(layer.kind, layer.layer_index) for layer in bundle.spec.layers]
    y = np.concatenate([planted.outputs("fit", *target) for target in targets], 1)
    xc, yc = x - x.mean(0), (y - y.mean(0)) / y.std(0)
    lower = np.linalg.cholesky(xc.T @ xc / len(x) + np.diag(ridge))
    z = np.linalg.solve(lower, xc.T @ yc / len(x))
    u, values, v = np.linalg.svd(z, full_matrices=False)
    best = xc @ np.linalg.solve(lower.T, (u[:, :rank] * values[:rank]) @ v[:rank])
    made = np.concatenate([planted.predict(bundle, "fit", *target) for target in targets], 1)
    made = (made - y.mean(0)) / y.std(0)
    assert ((yc - made) ** 2).sum() == pytest.approx(((yc - best) ** 2).sum(), rel=1e-3)


def test_ranks_are_chosen_with_lexical_inputs(tmp_path: Path) -> None:
    planted = replace(plant(CHOSEN, source_heads=SOURCE, target_heads=TARGET, noise=0.1), lags=(0, 1))
    planted.store(tmp_path / "s.zarr")
    for rank in ("auto", "none"):
        found = solve(tmp_path / "s.zarr", tmp_path / str(rank), options=Options(rank=rank, cost=None), progress=False)  # type: ignore[arg-type]
        bundle = Bundle.open(found.bundle)
        assert bundle.spec.lexical_lags == (0, 1)
        for layer in bundle.spec.layers:
            truth = planted.outputs("holdout", layer.kind, layer.layer_index)
            assert r2(truth, planted.predict(bundle, "holdout", layer.kind, layer.layer_index)) > 0.9


def test_a_small_budget_gives_the_same_maps(planted: Planted, tmp_path: Path) -> None:
    planted.store(tmp_path / "s.zarr", inputs="same")
    options = Options(penalty=PENALTY, rank="none", cost=None)
    bundles = []
    for budget in (4 << 30, 66_000_000):
        made = solve(tmp_path / "s.zarr", tmp_path / str(budget), options=options, memory_budget=budget, progress=False)
        bundles.append(Bundle.open(made.bundle))
    for layer in bundles[0].spec.layers:
        one, other = (bundle.layer(layer.kind, layer.layer_index)[0] for bundle in bundles)
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-7)


def test_a_sweep(planted: Planted, tmp_path: Path) -> None:
    planted.store(tmp_path / "s.zarr", inputs="same")
    found = sweep(tmp_path / "s.zarr", tmp_path / "sweep", {"top_k": [1, "all"], "gain": ["none", "head"]}, progress=False)
    assert len(found.rows) == 4
    widths = {kind: sum(planted.source_spec.width_of(kind, i) for i in range(4)) for kind in KINDS}
    outputs = {kind: sum(planted.target_spec.width_of(kind, i) for i in range(4)) for kind in KINDS}
    assert found.rows[-1]["weight_bytes"] == sum(4 * (widths[kind] + 1) * outputs[kind] for kind in KINDS)


@pytest.mark.parametrize(
    "options", [Options(support="head"), replace(RECIPES["heo2026"], top_k=2)], ids=["support head", "heo2026"]
)
def test_matching_heads_are_refused_by_name(planted: Planted, options: Options, tmp_path: Path) -> None:
    planted.store(tmp_path / "s.zarr")
    with pytest.raises(MismatchError, match="found planted-source, whose heads differ by layer, needed the same heads"):
        solve(tmp_path / "s.zarr", tmp_path / "bundle", options=options, progress=False)
