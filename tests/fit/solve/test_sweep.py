"""A sweep's rows are what `solve` says of the same options."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from planted import plant

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError, OptionError
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.solve.sweep import parse_grid, sweep
from kvfit.spec import KINDS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant([(0, 1), (2,), (1, 3)]).store(tmp_path_factory.mktemp("planted") / "pair.zarr")


def test_rows_are_what_solve_reports(store: Path, tmp_path: Path) -> None:
    grid = parse_grid(["top_k=1,2,all,auto", "penalty=1e-3,auto", "gain=variance,none"])
    found = sweep(store, tmp_path / "sweep", grid, options=Options(inputs="both", dtype="bfloat16"), progress=False)
    assert len(found.rows) == 16
    with open(tmp_path / "sweep" / "sweep.csv", newline="") as stream:
        written = list(csv.DictReader(stream))
    for number, (row, text) in enumerate(zip(found.rows, written, strict=True)):
        options = Options(top_k=row["top_k"], penalty=row["penalty"], gain=row["gain"], inputs="both", dtype="bfloat16")
        report = solve(store, tmp_path / str(number), options=options, progress=False).report
        bundle = Bundle.open(tmp_path / str(number))
        for kind in KINDS:
            r2 = report["r2"][kind]
            wanted = (r2["chosen"]["fit"], r2["chosen"]["holdout"], r2["chosen_with_gain"]["holdout"])
            assert tuple(row[f"{kind}_r2_{name}"] for name in ("fit", "holdout", "used")) == pytest.approx(wanted, abs=1e-12)
            assert float(text[f"{kind}_r2_holdout"]) == pytest.approx(wanted[1], abs=1e-5)
        # All that the weight files hold beyond the numbers is their header.
        assert 0 < bundle.nbytes - row["weight_bytes"] < 4096
        assert row["milliseconds"] > 0
    assert (tmp_path / "sweep" / "sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["sweep.csv", "sweep.png"]
    assert "16 maps" in str(found)


def test_supports_and_selection_can_be_swept(store: Path, tmp_path: Path) -> None:
    found = sweep(
        store, tmp_path / "sweep", parse_grid(["support=full,head", "select=independent,greedy", "top_k=2"]), progress=False
    )
    sizes = {row["support"]: row["weight_bytes"] for row in found.rows}
    assert sizes["head"] < sizes["full"]
    assert len(found.rows) == 4


@pytest.mark.parametrize(
    "item",
    [
        "penalty=x",
        "penalty=-1",
        "penalty=nan",
        "top_k=0",
        "top_k=1.5",
        "gain=huge",
        "nothing=1",
        "top_k",
        "penalty=",
        "support=1",
    ],
)
def test_bad_grids_are_refused(item: str) -> None:
    with pytest.raises(MismatchError, match=r"--sweep.*needed"):
        parse_grid([item])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(MismatchError, match="each once"):
        parse_grid(["top_k=1", "top_k=2"])


@pytest.mark.parametrize("item", ["top_k=1,1", "penalty=1e-3,auto,0.001", "gain=none,none"])
def test_a_value_given_twice_is_refused(item: str) -> None:
    with pytest.raises(OptionError, match=rf"--sweep: found '{item}' with one value twice, needed each once"):
        parse_grid([item])


def test_a_rank_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--rank: found 64 with --sweep, .*needed none: leave --rank out"):
        sweep(store, tmp_path / "sweep", parse_grid(["top_k=1"]), options=Options(rank=64), progress=False)
    assert not (tmp_path / "sweep").exists()


def test_nothing_is_written_over(store: Path, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="needed a new folder"):
        sweep(store, tmp_path, parse_grid(["top_k=1"]), progress=False)
