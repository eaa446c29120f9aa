"""`solve` against independent oracles: least squares on an augmented matrix and scikit-learn, both from the rows."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from planted import Planted, plant
from sklearn.linear_model import Ridge

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError, SolveError
from kvfit.fit.plots import r2_layers, r2_map
from kvfit.fit.solve.solve import HOLDOUT_ENOUGH, RECIPES, Options, solve
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS, Kind


@pytest.fixture(scope="module")
def pair() -> Planted:
    return plant([(0, 1), (2,), (1, 3)])


@pytest.fixture(scope="module")
def store(pair: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.store(tmp_path_factory.mktemp("planted") / "pair.zarr")


# Keys from keys and values from values, a map of its own for every layer, whatever the store has.
PLAIN: dict[str, Any] = {"inputs": "same", "rank": "none", "cost": None}


def solved(store: Path, out: Path, **options: Any) -> tuple[Bundle, dict[str, Any]]:
    report = solve(store, out, options=Options(**PLAIN | options), progress=False).report
    return Bundle.open(out), report


def added(x: np.ndarray, penalty: float, scale: str, n_kinds: int = 1) -> np.ndarray:
    """What a penalty adds to the diagonal of the scatter, (F,); keys and values are each relative to their own variance."""
    own = np.concatenate([np.full(len(part), part.mean()) for part in np.split(x.var(0), n_kinds)])
    return (
        penalty * {"mean-variance": len(x) * own, "covariance": np.full_like(own, len(x)), "scatter": np.ones_like(own)}[scale]
    )


def augmented(x: np.ndarray, y: np.ndarray, ridge: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias by least squares on rows with sqrt(ridge) of the identity below them; no normal equations."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    rows = np.concatenate([xc, np.diag(np.sqrt(np.broadcast_to(ridge, x.shape[1])))])
    weight = np.linalg.lstsq(rows, np.concatenate([yc, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    return weight, y.mean(0) - x.mean(0) @ weight


def oracle_maps(pair: Planted, bundle: Bundle, kind: Kind, layer_index: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Inputs (fit, holdout) and target head or layer of each regression that makes up one layer."""
    spec = bundle.spec
    kinds = (kind,) if spec.inputs == "same" else KINDS
    layers = spec.layer(kind, layer_index).source_layers
    heads: list[int | None] = [None] if spec.support == "full" else list(range(spec.target.n_heads))
    found = []
    for head in heads:
        at = None if head is None else head * spec.source.n_heads // spec.target.n_heads
        found.append((*(pair.inputs(split, kinds, layers, at) for split in ("fit", "holdout")), head))
    return found


def oracle(pair: Planted, bundle: Bundle, kind: Kind, layer_index: int, options: Options) -> dict[str, np.ndarray]:
    """Predictions before and after the gain on both splits, from the rows by two other algorithms, which must agree."""
    plain: dict[str, list[np.ndarray]] = {"fit": [], "holdout": []}
    for x, x_holdout, head in oracle_maps(pair, bundle, kind, layer_index):
        y = pair.outputs("fit", kind, layer_index, head)
        ridge = added(
            x, bundle.spec.layer(kind, layer_index).penalty, options.penalty_scale, 1 if options.inputs == "same" else 2
        )
        weight, bias = augmented(x, y, ridge)
        # One penalty for all inputs in units of their own is what a penalty per input is.
        by_sklearn = Ridge(alpha=1.0).fit(x / np.sqrt(ridge), y)
        np.testing.assert_allclose(by_sklearn.predict(x / np.sqrt(ridge)), x @ weight + bias, rtol=0, atol=1e-8 * y.std())
        plain["fit"].append(x @ weight + bias)
        plain["holdout"].append(x_holdout @ weight + bias)
    result = {f"plain_{split}": np.concatenate(parts, 1) for split, parts in plain.items()}
    on = "holdout" if pair.outputs("holdout", kind, 0).shape[0] >= HOLDOUT_ENOUGH else "fit"
    truth, centre = pair.outputs(on, kind, layer_index), pair.outputs("fit", kind, layer_index).mean(0)
    ratio = {"none": np.ones(truth.shape[1])}
    ratio["variance"] = np.sqrt(truth.var(0) / result[f"plain_{on}"].var(0))
    h = pair.target_spec.n_heads
    sums = [part.var(0).reshape(h, -1).sum(1) for part in (truth, result[f"plain_{on}"])]
    ratio["head"] = np.sqrt(sums[0] / sums[1]).repeat(truth.shape[1] // h)
    for split in plain:
        result[split] = centre + (result[f"plain_{split}"] - centre) * ratio[options.gain]
    return result


CASES = list(product(("full", "head"), ("same", "both"), ("none", "head", "variance"), ("mean-variance",)))
CASES += [
    ("full", "same", "none", "covariance"),
    ("head", "both", "none", "covariance"),
    ("full", "both", "none", "scatter"),
    ("head", "same", "variance", "scatter"),
]


@pytest.mark.parametrize(("support", "inputs", "gain", "scale"), CASES)
def test_every_map_is_the_one_of_least_squares_and_of_scikit_learn(
    pair: Planted, store: Path, tmp_path: Path, support: Any, inputs: Any, gain: Any, scale: Any
) -> None:
    options = Options(
        top_k=2, penalty=0.03 if scale != "scatter" else 3.0, support=support, inputs=inputs, gain=gain, penalty_scale=scale
    )
    bundle, report = solved(store, tmp_path / "bundle", **dataclasses.asdict(options))
    for detail in report["layers"]:
        kind, layer_index = detail["kind"], detail["layer_index"]
        wanted = oracle(pair, bundle, kind, layer_index, options)
        for split in ("fit", "holdout"):
            truth = pair.outputs(split, kind, layer_index)
            np.testing.assert_allclose(
                pair.predict(bundle, split, kind, layer_index), wanted[split], rtol=0, atol=2e-5 * abs(truth).max()
            )
            assert detail[f"r2_{split}"] == pytest.approx(planted.r2(truth, wanted[f"plain_{split}"]), abs=1e-6)
        truth = pair.outputs("holdout", kind, layer_index)
        assert detail["r2_holdout_with_gain"] == pytest.approx(planted.r2(truth, wanted["holdout"]), abs=1e-6)
        heads = pair.target_spec.n_heads
        by_head = [
            planted.r2(a, b)
            for a, b in zip(np.split(truth, heads, 1), np.split(wanted["plain_holdout"], heads, 1), strict=True)
        ]
        assert detail["r2_holdout_heads"] == pytest.approx(by_head, abs=1e-6)
        entry = bundle.spec.layer(kind, layer_index)
        assert (entry.r2_fit, entry.r2_holdout) == (detail["r2_fit"], detail["r2_holdout"])


def test_the_oracle_can_fail(pair: Planted, store: Path, tmp_path: Path) -> None:
    """Another penalty than the one solved gives predictions outside the tolerance."""
    bundle, _ = solved(store, tmp_path / "bundle", top_k=2, penalty=0.03, gain="none")
    x, y = pair.inputs("fit", ["keys"], bundle.spec.layer("keys", 0).source_layers), pair.outputs("fit", "keys", 0)
    weight, bias = augmented(x, y, added(x, 0.0303, "mean-variance"))
    assert abs(pair.predict(bundle, "fit", "keys", 0) - (x @ weight + bias)).max() > 2e-5 * abs(y).max()


@pytest.mark.parametrize(
    ("source_heads", "target_heads"),
    [((2, 3), (4, 3)), ((4, 3), (2, 3)), ((2, 3), (4, 5)), ((3, 2), (4, 3)), ((1, 4), (3, 2)), ((3, 2), (2, 5))],
)
def test_head_support_follows_from_the_geometry(tmp_path: Path, source_heads: Any, target_heads: Any) -> None:
    pair = plant([(0,), (1,)], n_source_layers=2, source_heads=source_heads, target_heads=target_heads)
    bundle, _ = solved(pair.store(tmp_path / "s.zarr"), tmp_path / "bundle", top_k="all", penalty=0.01, support="head")
    options = Options(**PLAIN, penalty=0.01, support="head")
    for kind in KINDS:
        truth = pair.outputs("holdout", kind, 1)
        np.testing.assert_allclose(
            pair.predict(bundle, "holdout", kind, 1),
            oracle(pair, bundle, kind, 1, options)["holdout"],
            rtol=0,
            atol=2e-5 * abs(truth).max(),
        )


def test_probe_reports_single_source_r2_per_layer_and_head(pair: Planted, store: Path, tmp_path: Path) -> None:
    _, report = solved(store, tmp_path / "bundle", top_k=1)
    penalty = report["probe"]["penalty"]
    for kind, target_layer, source_layer in product(KINDS, range(3), range(4)):
        x = pair.inputs("fit", [kind], [source_layer])
        weight, bias = augmented(x, pair.outputs("fit", kind, target_layer), added(x, penalty, "mean-variance"))
        for split in ("fit", "holdout"):
            truth, predicted = (
                pair.outputs(split, kind, target_layer),
                pair.inputs(split, [kind], [source_layer]) @ weight + bias,
            )
            assert report["probe"][kind][split][target_layer][source_layer] == pytest.approx(
                planted.r2(truth, predicted), abs=1e-6
            )
            by_head = [planted.r2(truth[:, at], predicted[:, at]) for at in (slice(0, 3), slice(3, 6))]
            assert report["probe"][kind][f"{split}_heads"][target_layer][source_layer] == pytest.approx(by_head, abs=1e-6)


@pytest.mark.parametrize("select", ["independent", "greedy"])
def test_planted_sources_are_found(store: Path, tmp_path: Path, select: Any) -> None:
    bundle, report = solved(store, tmp_path / "bundle", top_k=2, select=select)
    for kind in KINDS:
        found = [set(bundle.spec.layer(kind, t).source_layers) for t in range(3)]
        assert found[0] == {0, 1}
        assert 2 in found[1]
        assert found[2] == {1, 3}
        assert report["r2"][kind]["chosen"]["holdout"] > 0.7
        assert report["r2"][kind]["chosen"]["holdout"] > report["r2"][kind]["single"]["holdout"]


def test_auto_takes_no_more_layers_than_help(store: Path, tmp_path: Path) -> None:
    bundle, _ = solved(store, tmp_path / "bundle", top_k="auto", gain="none")
    assert [bundle.spec.layer("values", t).source_layers for t in range(3)] == [(0, 1), (2,), (1, 3)]


def test_shuffled_targets_get_no_r2(pair: Planted, tmp_path: Path) -> None:
    _, report = solved(pair.shuffled().store(tmp_path / "s.zarr"), tmp_path / "bundle")
    for kind in KINDS:
        r2 = report["r2"][kind]
        assert max(max(row) for row in report["probe"][kind]["holdout"]) < 0.05
        # In sample it looks like something: the very reason for the holdout split.
        assert r2["chosen"]["holdout"] < 0.0 < r2["chosen"]["fit"]
        assert r2["chosen_with_gain"]["holdout"] < r2["chosen"]["holdout"]


def test_scaling_the_source_leaves_predictions_unchanged(pair: Planted, store: Path, tmp_path: Path) -> None:
    large = pair.scaled(1000.0)
    first, report = solved(store, tmp_path / "one", inputs="both")
    second, scaled = solved(large.store(tmp_path / "s.zarr"), tmp_path / "two", inputs="both")
    for kind, layer_index in product(KINDS, range(3)):
        a, b = pair.predict(first, "holdout", kind, layer_index), large.predict(second, "holdout", kind, layer_index)
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * abs(a).max())
    for kind in KINDS:
        assert report["r2"][kind]["chosen"] == pytest.approx(scaled["r2"][kind]["chosen"], abs=1e-6)


@pytest.mark.parametrize("gain", ["none", "head", "variance"])
def test_an_infinite_penalty_gives_the_mean(pair: Planted, store: Path, tmp_path: Path, gain: Any) -> None:
    bundle, report = solved(store, tmp_path / "bundle", penalty=1e14, gain=gain)
    mean = pair.outputs("fit", "keys", 1).mean(0)
    np.testing.assert_allclose(pair.predict(bundle, "holdout", "keys", 1), np.tile(mean, (300, 1)), rtol=1e-5)
    assert report["r2"]["keys"]["chosen"]["fit"] == pytest.approx(0.0, abs=1e-6)


def test_gain_gives_predictions_the_variance_of_the_target(tmp_path: Path) -> None:
    for n_holdout, on in ((HOLDOUT_ENOUGH - 1, "fit"), (HOLDOUT_ENOUGH, "holdout")):
        pair = plant([(0,), (1,)], n_source_layers=2, n_tokens=(500, n_holdout), noise=1.5)
        store = pair.store(tmp_path / f"{on}.zarr")
        bundle, _ = solved(store, tmp_path / on, gain="variance")
        by_head, _ = solved(store, tmp_path / f"{on}-head", gain="head")
        for kind, layer_index in product(KINDS, range(2)):
            truth, predicted = pair.outputs(on, kind, layer_index), pair.predict(bundle, on, kind, layer_index)
            np.testing.assert_allclose(predicted.var(0), truth.var(0), rtol=1e-4)
            sums = [part.var(0).reshape(2, 3).sum(1) for part in (truth, pair.predict(by_head, on, kind, layer_index))]
            np.testing.assert_allclose(sums[1], sums[0], rtol=1e-4)
            fit_mean = pair.predict(bundle, "fit", kind, layer_index).mean(0)
            np.testing.assert_allclose(fit_mean, pair.outputs("fit", kind, layer_index).mean(0), rtol=1e-4, atol=1e-4)


def test_negative_r2_is_reported_as_it_is(tmp_path: Path) -> None:
    pair = plant([(0,)], n_source_layers=6, n_tokens=(45, 500), noise=3.0)
    _, report = solved(pair.store(tmp_path / "s.zarr"), tmp_path / "bundle", penalty=1e-6, gain="none")
    layer = report["layers"][0]
    assert layer["r2_holdout"] < -0.5 < 0.5 < layer["r2_fit"]


def test_dead_and_copied_columns(tmp_path: Path) -> None:
    pair = plant([(0,), (1,)], n_source_layers=2)
    for split, kind in product(("fit", "holdout"), KINDS):
        pair.source[split][kind][0][:, 1] = 7.0  # never varies
        pair.source[split][kind][1][:, 2] = pair.source[split][kind][1][:, 0]  # copied: rank-deficient
        pair.target[split][kind][1][:, 3] = -2.0  # an output that never varies
    bundle, report = solved(pair.store(tmp_path / "s.zarr"), tmp_path / "bundle", penalty=0.0)
    json.dumps(report, allow_nan=False)
    for kind in KINDS:
        detail = next(d for d in report["layers"] if (d["kind"], d["layer_index"]) == (kind, 0))
        assert 0 < detail["damping"] <= 1e-4
        assert bool((bundle.layer(kind, 0)[0][1] == 0).all())
        np.testing.assert_allclose(pair.predict(bundle, "holdout", kind, 1)[:, 3], -2.0, rtol=1e-5)
        # The copied column adds nothing, so any solution predicts what the fit without it predicts.
        x, y = (np.delete(pair.inputs(split, [kind], [0, 1]), [1, 8], 1) for split in ("fit", "holdout"))
        weight, bias = augmented(x, pair.outputs("fit", kind, 0), 0.0)
        wanted = y @ weight + bias
        centre = pair.outputs("fit", kind, 0).mean(0)
        gain = np.sqrt(pair.outputs("fit", kind, 0).var(0) / (x @ weight + bias).var(0))
        found = pair.predict(bundle, "holdout", kind, 0)
        np.testing.assert_allclose(found, centre + (wanted - centre) * gain, rtol=0, atol=1e-3 * abs(wanted).max())


def test_the_same_store_gives_the_same_bytes(store: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        solve(store, tmp_path / name, options=Options(top_k="auto"), plots=True, progress=False)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"solve.json", "mapper.json", "r2-map.png", "r2-layers.png", "SHA256SUMS"} <= set(names)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_refusals(store: Path, tmp_path: Path) -> None:
    same = plant([(0,)], n_source_layers=1)
    narrow = same.store(tmp_path / "same.zarr", inputs="same")
    with pytest.raises(MismatchError, match="capture with --inputs both"):
        solve(narrow, tmp_path / "bundle", options=Options(inputs="both"), progress=False)
    with pytest.raises(MismatchError, match="needed a new folder"):
        solve(store, tmp_path, progress=False)
    with pytest.raises(MismatchError, match="at least 1"):
        solve(store, tmp_path / "bundle", options=Options(top_k=0), progress=False)
    only_fit = dataclasses.replace(same, source={"fit": same.source["fit"]}, target={"fit": same.target["fit"]})
    with pytest.raises(SolveError, match="needed at least 2: capture with --holdout above 0"):
        solve(only_fit.store(tmp_path / "fit.zarr"), tmp_path / "bundle", progress=False)
    still = dataclasses.replace(
        same, source={s: {k: [torch.ones_like(x) for x in v] for k, v in side.items()} for s, side in same.source.items()}
    )
    with pytest.raises(SolveError, match="keys of source layer 0: found source inputs that never vary"):
        solve(still.store(tmp_path / "still.zarr"), tmp_path / "bundle", options=Options(**PLAIN), progress=False)
    assert not (tmp_path / "bundle").exists()


def test_recipe_is_the_papers(tmp_path: Path) -> None:
    """Ranked by hand: in-sample least squares, head by head, mean over heads, mean over both kinds."""
    pair = plant([(0, 5, 9), (3,), (2, 7)], n_source_layers=12, n_tokens=(300, 200), noise=1.0)
    bundle, report = solved(
        pair.store(tmp_path / "s.zarr", inputs="same"), tmp_path / "bundle", **dataclasses.asdict(RECIPES["heo2026"])
    )
    for t in range(3):
        scores = np.zeros(12)
        for kind, i, head in product(KINDS, range(12), range(2)):
            x, y = pair.inputs("fit", [kind], [i], head), pair.outputs("fit", kind, t, head)
            weight, bias = augmented(x, y, 0.0)
            scores[i] += planted.r2(y, x @ weight + bias) / 4
            assert report["probe"][kind]["fit_heads"][t][i][head] == pytest.approx(planted.r2(y, x @ weight + bias), abs=1e-6)
        chosen = tuple(sorted(np.argsort(-scores)[:8]))
        for kind in KINDS:
            entry = bundle.spec.layer(kind, t)
            assert (entry.source_layers, entry.penalty) == (chosen, 0.01)
            x, y = pair.inputs("fit", [kind], chosen), pair.outputs("fit", kind, t)
            weight, bias = augmented(x, y, 0.01)
            np.testing.assert_allclose(
                pair.predict(bundle, "fit", kind, t), x @ weight + bias, rtol=0, atol=2e-5 * abs(y).max()
            )
    assert (bundle.spec.support, bundle.spec.gain, bundle.spec.inputs) == ("full", "none", "same")


def exact() -> Planted:
    """Whole numbers about whole means, the same mean in every batch: no sum rounds, whatever the order of the batches."""
    generator = torch.Generator().manual_seed(0)

    def rows(count: int, width: int, mean: int) -> torch.Tensor:
        half = torch.randint(-6, 7, (count // 2, width), generator=generator).float()
        return torch.stack([mean + half, mean - half], 1).flatten(0, 1)

    base = plant([(0,), (1,)], n_source_layers=2, n_tokens=(240, 120))
    sides = [
        {
            split: {kind: [rows(n, 6, 7 * (i + 1)) for i in range(2)] for kind in KINDS}
            for split, n in (("fit", 240), ("holdout", 120))
        }
        for _ in range(2)
    ]
    return dataclasses.replace(base, source=sides[0], target=sides[1])


ORDERS = [[0, 1, 2, 3, 4, 5], [3, 0, 4, 1, 5, 2], [5, 4, 3, 2, 1, 0]]


def test_a_store_captured_in_another_order_gives_the_same_bytes_where_no_sum_rounds(tmp_path: Path) -> None:
    found = []
    for number, order in enumerate(ORDERS):
        store = exact().store(tmp_path / f"{number}.zarr", order=order)
        solve(store, tmp_path / str(number), options=Options(top_k="auto"), progress=False)
        found.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()})
    assert found[0] == found[1] == found[2]


def test_a_store_captured_in_another_order_gives_the_same_map_up_to_the_rounding_of_its_sums(
    pair: Planted, tmp_path: Path
) -> None:
    bundles = [
        solved(pair.store(tmp_path / f"{n}.zarr", order=order), tmp_path / str(n), top_k=2)[0] for n, order in enumerate(ORDERS)
    ]
    first = bundles[0].spec
    for bundle in bundles[1:]:
        for a, b in zip(first.layers, bundle.spec.layers, strict=True):
            assert (a.source_layers, a.penalty) == (b.source_layers, b.penalty)
            assert (a.r2_fit, a.r2_holdout) == pytest.approx((b.r2_fit, b.r2_holdout), abs=1e-6)
            predicted = [pair.predict(one, "holdout", a.kind, a.layer_index) for one in (bundles[0], bundle)]
            np.testing.assert_allclose(predicted[1], predicted[0], rtol=0, atol=1e-5 * abs(predicted[0]).max())


@pytest.mark.parametrize(("support", "inputs"), [("full", "same"), ("full", "both"), ("head", "same"), ("head", "both")])
def test_mapper_reads_features_in_the_order_that_was_solved(
    pair: Planted, store: Path, tmp_path: Path, support: Any, inputs: Any
) -> None:
    bundle, _ = solved(store, tmp_path / "bundle", top_k=2, support=support, inputs=inputs)
    side = pair.source["holdout"]
    # (T, H * D) -> (1, H, T, D)
    cache = [tuple(side[kind][i].view(1, 300, 2, 3).transpose(1, 2) for kind in KINDS) for i in range(4)]
    for t, mapped in enumerate(Mapper.from_bundle(bundle).transfer_layers(cache)):
        for kind, tensor in zip(KINDS, mapped, strict=True):
            wanted = pair.predict(bundle, "holdout", kind, t)
            np.testing.assert_allclose(tensor[0].transpose(0, 1).flatten(1), wanted, rtol=0, atol=1e-4 * abs(wanted).max())


def test_mixed_precision_gives_the_same_map(store: Path, tmp_path: Path) -> None:
    for precision in ("float64", "mixed"):
        report = solve(store, tmp_path / precision, options=Options(penalty=0.01), precision=precision, progress=False).report
        assert report["precision"] == precision
    plain, mixed = (Bundle.open(tmp_path / precision) for precision in ("float64", "mixed"))
    for kind, t in product(KINDS, range(3)):
        for a, b in zip(plain.layer(kind, t), mixed.layer(kind, t), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(a.abs().max()))


def test_too_small_a_budget_is_refused_before_anything_is_solved(store: Path, tmp_path: Path) -> None:
    with pytest.raises(SolveError, match=r"--memory-budget: found 0\.00 GiB, needed 0\.06 GiB to factor 24 inputs"):
        solve(store, tmp_path / "bundle", options=Options(**PLAIN), memory_budget=1 << 20, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused(store: Path, tmp_path: Path) -> None:
    for device in ("mps", "nowhere"):
        with pytest.raises(MismatchError, match=f"device: found '{device}' .*, needed one that this machine has: cpu"):
            solve(store, tmp_path / "bundle", device=device, progress=False)


def test_weights_that_the_dtype_cannot_hold_are_refused(pair: Planted, tmp_path: Path) -> None:
    small = pair.scaled(1e-7)
    with pytest.raises(SolveError, match="found weights beyond float16, needed finite ones: use --dtype float32"):
        solve(small.store(tmp_path / "s.zarr"), tmp_path / "bundle", options=Options(dtype="float16"), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.zarr"]  # and nothing is left behind


def test_recipe_can_be_changed_on_the_command_line(store: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvfit.cli.main import cli

    runner = CliRunner()
    arguments = ["solve", str(store), "--out", str(tmp_path / "b"), "--recipe", "heo2026", "--top-k", "2", "--json"]
    result = runner.invoke(cli, arguments, catch_exceptions=False)
    asked = json.loads(result.stdout)["options"]
    assert asked == dataclasses.asdict(dataclasses.replace(RECIPES["heo2026"], top_k=2))


def test_sweep_on_the_command_line(store: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvfit.cli.main import cli

    runner = CliRunner()
    start = ["solve", str(store), "--out", str(tmp_path / "s")]
    result = runner.invoke(
        cli, [*start, "--sweep", "top_k=1,all", "penalty=1e-3,1e-2", "--gain", "none", "--json"], catch_exceptions=False
    )
    rows = json.loads(result.stdout)["rows"]
    assert [(row["top_k"], row["penalty"], row["gain"]) for row in rows] == [
        (k, p, "none") for k in (1, "all") for p in (1e-3, 1e-2)
    ]
    for wrong in (["penalty=1"], ["--sweep", "penalty=x"], ["--sweep", "top_k=1", "top_k=2"]):
        assert runner.invoke(cli, [*start, *wrong]).exit_code == 2


def test_the_r2_map_shows_scores_and_choices(store: Path, tmp_path: Path) -> None:
    _, report = solved(store, tmp_path / "bundle", top_k=2, penalty=0.01)
    first = r2_map(report)
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert r2_map(json.loads(json.dumps(report))) == first
    for change in ("choice", "score", "everything"):
        other = json.loads(json.dumps(report))
        if change == "choice":
            other["layers"][0]["source_layers"] = [2, 3]
        elif change == "score":
            other["probe"]["values"]["holdout"][1][0] = 0.99
        else:
            for detail in other["layers"]:
                detail["source_layers"] = [0, 1, 2, 3]
        assert r2_map(other) != first, change
    report["layers"][0]["r2_holdout"] = -3.0  # drawn as it is, below the axis that is usual
    assert r2_layers(report)[:4] == b"\x89PNG"
