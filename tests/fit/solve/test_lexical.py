"""Maps that also read the target's first layer, against rows; planted truth that only those inputs hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from planted import Planted, plant

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError, OptionError
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.solve.sweep import parse_grid, sweep
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS

LAGS = (0, 2)


@pytest.fixture(scope="module")
def pair() -> Planted:
    """Target layer 1 is half of it what layer 0 was two tokens earlier, which no source layer holds; layer 2 is not."""
    pair = replace(plant([(0, 1), (2,), (1, 3)]), lags=LAGS)
    for split, kind in product(("fit", "holdout"), KINDS):
        lagged = pair.lexical(split)[1]
        own = pair.target[split][kind][1]
        mixing = torch.randn(lagged.shape[1], own.shape[1], generator=torch.Generator().manual_seed(4))
        spread = (lagged - lagged.mean(0)) / lagged.std(0)
        pair.target[split][kind][1] = own + own.std(0) * (spread @ mixing) / lagged.shape[1] ** 0.5
    return pair


@pytest.fixture(scope="module")
def store(pair: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.store(tmp_path_factory.mktemp("planted") / "pair.zarr")


def solved(store: Path, out: Path, **options: Any) -> tuple[Bundle, dict[str, Any]]:
    report = solve(store, out, options=Options(**{"rank": "none", "cost": None} | options), progress=False).report
    return Bundle.open(out), report


@pytest.mark.parametrize("inputs", ["same", "both"])
def test_maps_are_those_of_least_squares_with_a_penalty_per_group(
    pair: Planted, store: Path, tmp_path: Path, inputs: Any
) -> None:
    bundle, report = solved(store, tmp_path / "b", inputs=inputs, penalty=0.02, gain="none")
    assert bundle.spec.lexical_lags == LAGS
    assert bundle.spec.mapped_layers == range(1, 3)
    assert {detail["layer_index"] for detail in report["layers"]} == {1, 2}
    for kind, t in product(KINDS, (1, 2)):
        kinds = (kind,) if inputs == "same" else KINDS
        groups = [pair.inputs("fit", [one], range(4)) for one in kinds]
        for lag in pair.lexical("fit"):
            groups += [half.double().numpy() for half in lag.split(6, 1)]
        # Each group scaled to a mean variance of one: then one penalty for all.
        scale = np.concatenate([np.full(group.shape[1], group.var(0).mean() ** 0.5) for group in groups])
        x, y = np.concatenate(groups, 1), pair.outputs("fit", kind, t)
        centred = (x - x.mean(0)) / scale
        rows = np.concatenate([centred, np.sqrt(0.02 * len(x)) * np.eye(len(scale))])
        right = np.concatenate([y - y.mean(0), np.zeros((len(scale), 6))])
        wanted = y.mean(0) + centred @ np.linalg.lstsq(rows, right, rcond=None)[0]
        np.testing.assert_allclose(pair.predict(bundle, "fit", kind, t), wanted, rtol=0, atol=2e-5 * abs(y).max())
        entry = bundle.spec.layer(kind, t)
        assert entry.r2_fit == pytest.approx(planted.r2(y, wanted), abs=1e-6)


@pytest.mark.parametrize("rank", ["none", 36])
def test_what_only_the_lexical_inputs_hold_is_found_through_them(store: Path, tmp_path: Path, rank: Any) -> None:
    found = {}
    for lexical in ("auto", "none"):
        bundle, _ = solved(store, tmp_path / lexical, rank=rank, lexical=lexical, penalty=0.01, inputs="both")
        found[lexical] = {(m.kind, m.layer_index): m.r2_holdout for m in bundle.spec.layers}
        assert bundle.spec.lexical_lags == (LAGS if lexical == "auto" else ())
    for kind in KINDS:
        assert found["auto"][kind, 1] > found["none"][kind, 1] + 0.2
        assert found["auto"][kind, 2] < found["none"][kind, 2] + 0.05  # control: nothing to find
    assert ("keys", 0) in found["none"]
    assert ("keys", 0) not in found["auto"]


@pytest.mark.parametrize("rank", ["none", 20])
def test_some_of_the_lags_are_read_as_if_only_they_were_captured(pair: Planted, store: Path, tmp_path: Path, rank: Any) -> None:
    alone = replace(pair, lags=(2,)).store(tmp_path / "alone.zarr")
    bundle, _ = solved(store, tmp_path / "some", rank=rank, penalty=0.01, inputs="both", lexical=(2,))
    wanted, _ = solved(alone, tmp_path / "wanted", rank=rank, penalty=0.01, inputs="both")
    assert bundle.spec.lexical_lags == (2,)
    assert bundle.spec.layers == wanted.spec.layers
    lagged = replace(pair, lags=(2,))
    for kind, t in product(KINDS, (1, 2)):
        np.testing.assert_array_equal(lagged.predict(bundle, "holdout", kind, t), lagged.predict(wanted, "holdout", kind, t))
    with pytest.raises(MismatchError, match=r"--lexical 0,1: found .* with the lags 0,2, needed all that are named"):
        solved(store, tmp_path / "none", lexical=(0, 1))
    with pytest.raises(OptionError, match="found 2,0, needed numbers from 0 on, ascending"):
        Options(lexical=(2, 0))


def test_a_sweep_times_maps_with_lexical_inputs(store: Path, tmp_path: Path) -> None:
    rows = sweep(store, tmp_path / "sweep", parse_grid(["top_k=1,2", "penalty=0.01"]), progress=False).rows
    assert len(rows) == 2
    assert all(row["milliseconds"] > 0 for row in rows)


def test_a_matching_head_reads_no_lexical_inputs(store: Path, tmp_path: Path) -> None:
    bundle, _ = solved(store, tmp_path / "b", support="head", penalty=0.01)
    assert bundle.spec.lexical_lags == ()
    assert bundle.spec.mapped_layers == range(3)


@pytest.mark.parametrize("rank", ["none", 20])
def test_the_mapper_reads_features_in_the_order_that_was_solved(pair: Planted, store: Path, tmp_path: Path, rank: Any) -> None:
    bundle, _ = solved(store, tmp_path / "b", rank=rank, penalty=0.01, inputs="both")
    side = pair.source["holdout"]
    # (T, H * D) -> (1, H, T, D)
    cache = [tuple(side[kind][i].view(1, 300, 2, 3).transpose(1, 2) for kind in KINDS) for i in range(4)]
    first = tuple(pair.target["holdout"][kind][0].view(1, 300, 2, 3).transpose(1, 2) for kind in KINDS)
    layers = Mapper.from_bundle(bundle).transfer_layers(cache, first_layer=first)
    for t, mapped in enumerate(layers):
        for kind, tensor in zip(KINDS, mapped, strict=True):
            wanted = pair.predict(bundle, "holdout", kind, t) if t else pair.outputs("holdout", kind, 0)
            np.testing.assert_allclose(tensor[0].transpose(0, 1).flatten(1), wanted, rtol=0, atol=1e-4 * abs(wanted).max())
