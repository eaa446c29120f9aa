"""The command line: exit codes, one line per error, and nothing left half-written."""

import json
import sys
from pathlib import Path

import pytest

from kvfit import cli


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvfit", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


DEMO = ("demo:source", "demo:target", "--out", "s.zarr")
SMALL = ("--num-sequences", "40", "--seq-len", "64", "--token-stride", "1", "--holdout", "0.25", "--dataset", "demo:text")


def test_capture_solve_evaluate(run, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    store, bundle = tmp_path / "pair.zarr", tmp_path / "bundle"
    code, out, err = run("capture", *tiny_pair, "--out", store, *SMALL)
    assert (code, out) == (0, f"{store}: 2560 tokens of 40 sequences (0 short documents skipped)\n"), err
    code, out, err = run("solve", store, "--out", bundle, "--top-k", "2", "--penalty", "1e-2", "--plots", "--json")
    assert code == 0, err
    assert json.loads(out)["options"]["top_k"] == 2
    assert {path.name for path in bundle.iterdir()} >= {"mapper.json", "SHA256SUMS", "r2-map.png", "solve.json"}
    code, out, err = run(
        "evaluate", bundle, "--source", tiny_pair[0], "--target", tiny_pair[1], "--prefix", "40", "--continuation", "8",
        "--documents", "4", "--probes", "2", "--json",
    )  # fmt: skip
    report = json.loads(out)
    # Random models have nothing to gain from each other, so the gate refuses, and the report is there all the same.
    assert report["verdict"] == "fail"
    assert code == 3
    assert "verdict fail" in err
    assert json.loads((bundle / "evaluation.json").read_text()) == report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("solve", "missing.zarr", "--out", "b"), "missing.zarr"),
        (("evaluate", "missing"), "missing"),
        (("capture", "missing/folder/x", "demo:target", "--out", "s.zarr"), "found no such folder"),
        (("capture", "demo:text", "demo:target", "--out", "s.zarr"), "found a text, needed a model"),
        (("capture", "demo:nothing", "demo:target", "--out", "s.zarr"), "needed one of demo:source"),
        (("capture", *DEMO, "--dataset", "nowhere.jsonl"), "no such file or folder"),
        (("capture", *DEMO, "--dataset", "demo:text", "--seq-len", "100000"), "lower --seq-len"),
        (("capture", *DEMO, "--holdout", "1.5"), "--holdout: found 1.5"),
        (("capture", *DEMO, "--resume"), "needed a store to resume"),
    ],
)
def test_bad_input_is_one_line_exit_1_and_leaves_nothing(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("kvfit: ")
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("solve", "s.zarr"),
        ("solve", "s.zarr", "--out", "b", "--top-k", "0"),
        ("solve", "s.zarr", "--out", "b", "--penalty", "-1"),
        ("capture", "a", "b", "--out", "s", "--memory-budget", "lots"),
        ("nothing",),
    ],
)
def test_usage_errors_exit_2(run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("2GiB", 2 << 30), ("1.5kib", 1536), ("1000", 1000), ("3 MB", 3_000_000), ("1g", 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert cli._size(None, None, text) == size  # type: ignore[arg-type]


def test_an_unexpected_error_is_not_hidden(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only kvfit's own errors become one line; a fault of ours keeps its traceback."""
    monkeypatch.setattr("kvfit.fit.solve.solve", lambda *_a, **_k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("solve", tmp_path, "--out", tmp_path / "b")
