"""The command line: exit codes, one line per error, and nothing left half-written."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from bundle_factory import evaluated_bundle
from click.shell_completion import ShellComplete
from planted import plant

from kvfit.cli import arguments
from kvfit.cli import main as cli
from kvfit.errors import StoreError
from kvfit.fit.progress import Progress
from kvfit.hub.load import load_mapper


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
    assert (code, out) == (0, f"{store}: 2520 tokens of 40 sequences (0 short and 0 repeated documents skipped)\n"), err
    code, out, err = run("solve", store, "--out", bundle, "--top-k", "2", "--penalty", "1e-2", "--plots", "--json")
    assert code == 0, err
    assert json.loads(out)["options"]["top_k"] == 2
    assert {path.name for path in bundle.iterdir()} >= {"mapper.json", "SHA256SUMS", "r2-map.png", "solve.json"}
    code, out, err = run(
        "evaluate", bundle, "--source", tiny_pair[0], "--target", tiny_pair[1], "--prefix", "40", "--continuation", "8",
        "--documents", "4", "--probes", "4", "--json",
    )  # fmt: skip
    report = json.loads(out)
    # Random models have nothing to gain from each other, so the gate refuses, and the report is there all the same.
    assert report["verdict"] == "fail"
    assert code == 3
    assert "verdict fail" in err
    assert json.loads((bundle / "evaluation.json").read_text()) == report


def completions(words: str) -> set[tuple[str, str]]:
    """(kind, text) of what the shell offers for the last word."""
    *before, incomplete = words.split(" ")
    found = ShellComplete(cli.cli, {}, "kvfit", "_KVFIT_COMPLETE").get_completions(before, incomplete)
    return {(item.type, item.value) for item in found}


@pytest.mark.parametrize("words", ["solve dem", "solve s.zarr --out dem", "capture dem", "fit dem", "fit a b --config dem"])
def test_the_shell_completes_file_names(words: str) -> None:
    assert completions(words) == {("file", "dem")}


def test_the_shell_completes_verbs_options_and_words() -> None:
    assert completions("cap") == {("plain", "capture")}
    assert completions("evaluate b --prob") == {("plain", "--probes"), ("plain", "--probe-kinds")}
    assert completions("solve s.zarr --gain v") == {("plain", "variance")}


def test_merge_as_json_is_one_object(run, tmp_path: Path) -> None:
    stores = [plant([(0,)], seed=seed, n_tokens=(40 + seed, 30)).store(tmp_path / f"{seed}.zarr") for seed in (0, 1)]
    merged = tmp_path / "merged.zarr"
    code, out, err = run("merge", *stores, "--out", merged, "--json")
    assert code == 0, err
    tokens = {"fit": 40 + 41, "holdout": 30 + 30}
    assert json.loads(out) == {"store": str(merged), "stores": list(map(str, stores)), "tokens": tokens}


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
        (
            ("capture", "models/nothere", "demo:target", "--out", "s.zarr"),
            "models/nothere: found no such folder; and on the Hub:",
        ),
        (("plan", "models/nothere", "demo:target"), "HF_HUB_OFFLINE"),
        (("plan", "qwen3-8b", "qwen3-32b", "--top-k", "99"), "--top-k: found 99, needed at most 36, the layers of the source"),
        (("capture", *DEMO, "--dataset", "demo:text", "--seq-len", "64", "--memory-budget", "1"), "needed at least"),
        (("capture", *DEMO, "--dataset", "demo:text", "--split", "test"), "--split: found test beside demo:text"),
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
    ("words", "message"),
    [
        (("capture", *DEMO, "--holdout", "1.5"), "--holdout: found 1.5"),
        (("capture", *DEMO, "--num-sequences", "1"), "--num-sequences: found 1"),
        (("capture", *DEMO, "--batch-size", "0"), "--batch-size: found 0"),
        (("plan", "qwen3-8b", "qwen3-32b", "--num-sequences", "0"), "--num-sequences: found 0"),
        (("plan", "qwen3-8b", "qwen3-32b", "--seq-len", "4", "--skip-tokens", "4"), "--skip-tokens: found 4"),
        (("plan", "qwen3-8b", "qwen3-32b", "--batch-size", "0"), "--batch-size: found 0"),
        (("plan", "qwen3-8b", "qwen3-32b", "--device", "foo"), "device: found 'foo'"),
        (("evaluate", "b", "--documents", "1"), "--documents: found 1"),
        (("evaluate", "b", "--recompute", "2"), "--recompute"),
        (("evaluate", "b", "--threshold", "kl"), "needed NAME=NUMBER"),
        (("evaluate", "b", "--threshold", "kl=abc"), "--threshold: found kl=abc"),
        (("evaluate", "b", "--prefix", "128,128"), "needed each length once"),
        (("solve", "s.zarr", "--out", "b", "--sweep", "penalty=-1"), "--sweep penalty: found '-1'"),
        (("solve", "s.zarr", "--out", "b", "--sweep", "top_k=1,1"), "found 'top_k=1,1' with one value twice"),
        (("solve", "s.zarr", "--out", "b", "--sweep", "top_k=1", "--rank", "64"), "--rank: found 64 with --sweep"),
        (("solve", "s.zarr", "--out", "b", "--sweep", "top_k=1", "--cost", "0.05"), "found --cost with --sweep"),
        (("solve", "s.zarr", "--out", "b", "--sweep", "top_k=1", "--plots"), "found --plots with --sweep"),
        (("capture", *DEMO, "--dtype", "int8"), "'int8' is not one of"),
        (("capture", *DEMO, "--source-device", "foo"), "device: found 'foo' (not a kind of device), needed one"),
        (("capture", *DEMO, "--target-device", "cuda:99"), "device: found 'cuda:99'"),
        (("capture", *DEMO, "--device-map", "foo"), "--device-map: found 'foo', needed auto"),
        (("capture", *DEMO, "--attn-implementation", "foo"), "--attn-implementation: found 'foo', needed eager"),
        (("inspect", "demo:source", "--device", "foo"), "device: found 'foo'"),
        (("inspect", "demo:source", "--device", "meta"), "device: found 'meta' (it stores no values)"),
        (("export", "b", "--format", "semantic-router", "--out", "o", "--bundle-version", "0"), "--bundle-version: found 0"),
        (("push", "b", "--to", "org/x", "--tag", "a/b"), "--tag: found 'a/b'"),
        (("push", "b", "--to", "org/x", "--license", "My Licence"), "--license: found 'My Licence', needed an id"),
    ],
)
def test_a_value_that_no_option_may_have_is_usage(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("demo",),
        ("capture", "no-model", "no-model"),
        ("solve", "no-store"),
        ("solve", "no-store", "--sweep", "top_k=1"),
        ("export", "no-bundle", "--format", "semantic-router"),
        ("import", "no-folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_out_first(run, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("no folder")
    # What these act on is missing as well, and would be complained of next.
    code, out, err = run(*words, "--out", tmp_path / "file" / "below" / "out")
    assert (code, out) == (1, "")
    assert err == (
        f"kvfit: {tmp_path}/file/below/out: cannot be written in {tmp_path}/file (Not a directory), needed another place\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_of_the_system_is_one_line(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "weights"))

    monkeypatch.setattr("kvfit.fit.solve.solve.solve", full)
    assert run("solve", tmp_path, "--out", tmp_path / "b") == (1, "", f"kvfit: {tmp_path}/weights: No space left on device\n")


def test_a_tilde_is_ones_home(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    """The shell leaves it alone in --out=~/x, and in words that a program puts together."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder, name in zip(tiny_pair, ("small", "large"), strict=True):
        (tmp_path / name).symlink_to(folder)
    (tmp_path / "text.txt").symlink_to(Path(__file__))
    words = ("--num-sequences", "4", "--seq-len", "16", "--holdout", "0.5", "--pack")
    code, _, err = run("capture", "~/small", "~/large", "--out=~/s.zarr", "--dataset=~/text.txt", *words)
    assert code == 0, err
    code, _, err = run("solve", "~/s.zarr", "--out=~/bundle", "--penalty", "1")
    assert code == 0, err
    code, out, _ = run("verify", "~/bundle")
    assert code == 0
    assert "sound" in out
    assert not (tmp_path / "~").exists()
    # Of a local model the bundle keeps the name only.
    code, _, err = run("evaluate", "~/bundle", "--target=~/large")
    assert code == 1
    source = tiny_pair[0].resolve().name
    assert err == (
        f"kvfit: source: found only the name {source!r} of a local folder in the bundle, needed the folder itself: "
        "pass --source FOLDER\n"
    )


def test_more_layers_than_the_source_has_are_refused(run, tmp_path: Path) -> None:
    store = plant([(0, 1), (2,), (1, 3)]).store(tmp_path / "s.zarr")

    for words in (("--top-k", "99"), ("--sweep", "top_k=1,99"), ("--sweep", "top_k=1,99,all")):
        code, out, err = run("solve", store, "--out", tmp_path / "b", *words)
        assert (code, out) == (1, "")
        assert err == "kvfit: --top-k: found 99, needed at most 4, the layers of the source, or all\n"


def test_a_registry_of_ones_own(run, tmp_path: Path) -> None:
    bundle, registry = evaluated_bundle(tmp_path / "bundle"), tmp_path / "mine" / "registry"
    code, _, err = run("push", bundle, "--to", registry / "pair", "--registry", registry)
    assert code == 0, err
    code, out, _ = run("list", "--registry", registry)
    assert code == 0
    assert out.startswith("pair@v1  org/small -> org/large  pass")
    assert load_mapper(source="org/small", target="org/large", registry=registry).verdict == "pass"
    assert run("list", "--registry", tmp_path / "nowhere")[0] == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("2GiB", 2 << 30), ("1.5kib", 1536), ("1000", 1000), ("3 MB", 3_000_000), ("1g", 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert arguments.size(None, None, text) == size  # type: ignore[arg-type]


def test_an_unexpected_error_is_not_hidden(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only kvfit's own errors become one line; a fault of ours keeps its traceback."""
    monkeypatch.setattr("kvfit.fit.solve.solve.solve", lambda *_a, **_k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("solve", tmp_path, "--out", tmp_path / "b")


def test_the_list_of_verbs_cuts_no_sentence(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "..." not in out.partition("Commands:")[2]
    assert "the complete job" in " ".join(out.split())


@pytest.mark.parametrize("quiet", [False, True])
def test_log_lines_go_to_stderr_unless_quiet(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    def working(*_: object, **__: object) -> object:
        with Progress("merge", total=2, unit="stores") as shown:
            shown.advance(2)
            shown.finish("out", then="kvfit solve out")
        raise StoreError("found nothing more to do")

    monkeypatch.setattr("kvfit.fit.stats.merge.merge", working)
    code, out, err = run("merge", tmp_path, "--out", tmp_path / "x", *(["--quiet"] if quiet else []))
    assert (code, out) == (1, "")
    assert ("next: kvfit solve out" in err) is not quiet
    assert err.splitlines()[-1] == "kvfit: found nothing more to do"
