"""What is chosen under a cost, what is warned of, what is stored, and what a failed or killed run leaves behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import Planted, plant

from kvfit.bundle import write
from kvfit.bundle.bundle import Bundle
from kvfit.cost import Prefill, map_cost
from kvfit.errors import OptionError
from kvfit.fit.solve import choice
from kvfit.fit.solve.fitter import Fitter
from kvfit.fit.solve.options import Options
from kvfit.fit.solve.solve import open_reader, probe_kinds, solve
from kvfit.spec import KINDS


@pytest.fixture(scope="module")
def pair() -> Planted:
    return plant([(0, 1), (2,), (1, 3)])


@pytest.fixture(scope="module")
def store(pair: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.store(tmp_path_factory.mktemp("planted") / "pair.zarr")


def chosen(store: Path, parameters: float, **options: Any) -> choice.Choice:
    """What is chosen for a target whose prefill has some weights."""
    asked = Options(**{"penalty": 0.01} | options)
    reader = open_reader(store, asked)
    fitter = Fitter(reader, asked.for_store(reader.store), progress=False)
    return choice.choose(fitter, probe_kinds(reader, asked.for_store(reader.store), False), Prefill(parameters, 4))


def fading() -> Planted:
    """Eight directions that all outputs are mixtures of, each with half the spread of the one before, without noise."""
    pair = plant([(0, 1), (2,), (1, 3)], noise=0.0)
    generator = torch.Generator().manual_seed(1)
    down = (
        torch.randn(48, 8, generator=generator, dtype=torch.float64)
        * torch.cat([torch.ones(24), torch.full((24,), 50)])[:, None]
    )
    down = down / down.norm(dim=0)
    up = [torch.randn(8, 6, generator=generator, dtype=torch.float64) * 0.5 ** torch.arange(8)[:, None] for _ in range(6)]
    for split in ("fit", "holdout"):
        latent = torch.from_numpy(pair.inputs(split, KINDS, range(4))) @ down
        for number, mixing in enumerate(up):
            pair.target[split][KINDS[number % 2]][number // 2] = (latent @ mixing).float()
    return pair


def test_the_cost_bounds_the_rank(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faded = fading().store(tmp_path / "s.zarr")
    # 48 inputs and 36 outputs: 84 weights a direction, and a full map of 1,728.
    assert chosen(faded, 1, cost=None, penalty=1e-8).rank == 8
    for rank in (5, 6):
        bounded = chosen(faded, 84 * (rank + 0.5) / 0.05, cost=0.05, penalty=1e-8)
        assert bounded.rank == max(bounded.report["ranks"]) == rank
    assert caplog.text == ""
    # Where a rank this high is needed, a map of its own for every layer costs no more.
    assert chosen(store, 1, cost=None).rank is None


def test_a_pair_without_a_useful_map_within_the_cost_gets_the_best_with_a_warning(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvfit"):
        assert chosen(store, 1e9, cost=0.05).rank is None
        assert caplog.text == ""
        assert max(chosen(store, 84 / 0.05, cost=0.05).report["ranks"]) == 36
    assert "no useful map of this pair costs less" in caplog.text
    assert "above the 5 % of --cost" in caplog.text


def test_a_rank_that_is_asked_for_is_not_bounded(store: Path) -> None:
    assert chosen(store, 1, cost=0.05, rank=7).rank == 7


def test_separate_maps_read_as_many_layers_as_the_cost_affords(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    for most in (1, 2, 3, 4):
        sets = chosen(store, 12 * most * 36 / 0.05, cost=0.05, rank="none").sets
        assert sets is not None
        assert {len(inputs.source_layers) for inputs in sets.values()} == {most}
    with caplog.at_level(logging.WARNING, logger="kvfit"):
        sets = chosen(store, 1, cost=0.05, rank="none").sets
    assert sets is not None
    assert {len(inputs.source_layers) for inputs in sets.values()} == {4}
    assert "no map of this pair costs less" in caplog.text


def spent(found: choice.Choice) -> int:
    assert found.sets is not None
    return sum(6 * inputs.n_inputs for inputs in found.sets.values())


def test_the_cost_bounds_the_layers_that_auto_chooses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="kvfit")
    store = plant([(0, 1), (2,), (0, 1, 3)]).store(tmp_path / "s.zarr")
    free = spent(chosen(store, 1, cost=None, top_k="auto"))
    whole = 12 * 4 * 36
    assert 12 * 36 < free < whole
    # Where the choice is within the cost, the cost changes nothing, although maps of all layers would exceed it.
    assert spent(chosen(store, (free + 1) / 0.05, cost=0.05, top_k="auto")) == free
    for most in (1, 2, 3):
        weights = 12 * most * 36 + 1
        found = chosen(store, weights / 0.05, cost=0.05, top_k="auto")
        assert 0 < spent(found) <= min(weights, free)
        if weights < free:
            assert found.report["source_layers_within_cost"] == most
    assert caplog.text == ""
    assert spent(chosen(store, 1, cost=0.05, top_k="auto")) == free
    assert "no map of this pair costs less" in caplog.text


def test_a_rank_above_the_full_rank_is_the_full_rank_with_a_warning(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvfit"):
        assert chosen(store, 1, rank=36).rank == 36
        assert caplog.text == ""
        assert chosen(store, 1, rank=37).rank == 36
    assert "--rank 37 is above the full rank of this pair's maps, so the rank is 36" in caplog.text


def test_the_cost_in_the_report_is_that_of_the_bundle(store: Path, tmp_path: Path) -> None:
    report = solve(store, tmp_path / "b", options=Options(rank=6, penalty=0.01), progress=False).report
    found = Bundle.open(tmp_path / "b")
    assert report["cost"] == map_cost(found.spec).to_json()
    assert report["cost"]["estimated"]  # a planted store counts no model


def test_bad_costs_are_refused() -> None:
    for cost in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="--cost"):
            Options(cost=cost)


@pytest.mark.parametrize("rank", ["none", 20])
def test_what_bfloat16_loses_is_what_the_report_says(tmp_path: Path, rank: Any) -> None:
    """Means of a thousand times the spread: only a bias that is taken from the rounded weights keeps the mean in place."""
    far = plant([(0, 1), (2,)], n_source_layers=3, mean=1000.0)
    store = far.store(tmp_path / "s.zarr")
    options = Options(rank=rank, dtype="bfloat16", penalty=0.01, gain="none")
    report = solve(store, tmp_path / "b", options=options, progress=False).report
    bundle = Bundle.open(tmp_path / "b")
    for detail in report["layers"]:
        kind, t = detail["kind"], detail["layer_index"]
        truth, predicted = (make("holdout", kind, t) for make in (far.outputs, lambda *at: far.predict(bundle, *at)))
        r2 = 1 - ((truth - predicted) ** 2).sum() / ((truth - truth.mean(0)) ** 2).sum()
        assert detail["r2_holdout_stored"] == pytest.approx(r2, abs=1e-3)
        assert 0 < abs(detail["r2_holdout_stored"] - detail["r2_holdout_with_gain"]) < 0.02
        spread, mean = far.outputs("fit", kind, t).std(0), far.outputs("fit", kind, t).mean(0)
        assert (abs(far.predict(bundle, "fit", kind, t).mean(0) - mean) / spread).max() < 0.02
    assert report["r2"]["keys"]["stored"]["holdout"] == np.mean(
        [detail["r2_holdout_stored"] for detail in report["layers"] if detail["kind"] == "keys"]
    )


def test_weights_are_16_bit_for_a_16_bit_target(pair: Planted, tmp_path: Path) -> None:
    for dtype, wanted in (("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")):
        made = replace(pair, target_spec=replace(pair.target_spec, dtype=dtype)).store(tmp_path / f"{dtype}.zarr")
        reader = open_reader(made, Options())
        options = Options().for_store(reader.store)
        assert options.dtype == wanted
        assert options.inputs == "both"


def test_the_gain_comes_from_the_split_that_was_asked_for(pair: Planted, store: Path, tmp_path: Path) -> None:
    for split in ("fit", "holdout"):
        options = Options(rank="none", cost=None, gain_split=split, penalty=0.01)
        assert solve(store, tmp_path / split, options=options, progress=False).report["gain_split"] == split
        bundle = Bundle.open(tmp_path / split)
        for kind in KINDS:
            predicted = pair.predict(bundle, split, kind, 1)
            np.testing.assert_allclose(predicted.var(0), pair.outputs(split, kind, 1).var(0), rtol=1e-4)


FULL = """
import resource, sys
from kvfit.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
sys.argv = ["kvfit", "solve", sys.argv[1], "--out", sys.argv[2]]
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files there")
@pytest.mark.parametrize("limit", [100, 3000])  # the first map does not fit, or the bundle's file does not
def test_a_full_disk_is_one_line_and_leaves_nothing(store: Path, tmp_path: Path, limit: int) -> None:
    run = [sys.executable, "-c", FULL, str(store), str(tmp_path / "b"), str(limit)]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvfit: ")
    assert "File too large" in last
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked there")
def test_what_a_killed_solve_left_goes_with_the_next(store: Path, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        write.write_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        solve(store, tmp_path / "b", options=Options(penalty=0.01), progress=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] != []
    assert not (tmp_path / "b").exists()
    solve(store, tmp_path / "b", options=Options(penalty=0.01), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert Bundle.open(tmp_path / "b").spec.layers
