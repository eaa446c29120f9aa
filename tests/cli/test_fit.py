"""The verb `fit`: options find their part, a job can be interrupted and repeated, and no local path travels in a bundle."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from kvfit.bundle.bundle import Bundle
from kvfit.cli import job as jobs
from kvfit.cli.main import cli
from kvfit.errors import GateError, OptionError

COMMANDS = {name: cli.commands[name] for name in (*jobs.PARTS, "plan")}
SMALL = (
    "--num-sequences 24 --seq-len 128 --documents 4 --prefix 48 --continuation 16 "
    "--probes 0 --greedy 0 --diagnose 0 --seconds 0"
)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["fit", *words], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--num-sequences 5 --pack", {"capture": {"num-sequences": "5", "pack": True}}),
        ("--penalty=0.01 --to org/x", {"solve": {"penalty": "0.01"}, "push": {"to": "org/x"}}),
        ("--evaluate-dataset a.txt --documents 9", {"evaluate": {"dataset": "a.txt", "documents": "9"}}),
        ("--inputs same --solve-inputs both", {"capture": {"inputs": "same"}, "solve": {"inputs": "both"}}),
        ("--dtype bfloat16", {"capture": {"dtype": "bfloat16"}, "evaluate": {"dtype": "bfloat16"}}),
        ("--solve-dtype bfloat16", {"solve": {"dtype": "bfloat16"}}),
        ("--threshold a=1 --threshold b=2", {"evaluate": {"threshold": ["a=1", "b=2"]}}),
    ],
)  # fmt: skip
def test_an_option_goes_to_its_part(words: str, found: dict[str, Any]) -> None:
    assert jobs.parse_options(words.split(), COMMANDS) == found


@pytest.mark.parametrize("words", ["--nonsense 1", "--store x", "--penalty", "word", "--capture-out x", "--sweep top_k=1"])
def test_what_no_part_takes_is_refused(words: str) -> None:
    with pytest.raises(OptionError, match="needed"):
        jobs.parse_options(words.split(), COMMANDS)


def test_every_option_of_the_parts_is_accepted() -> None:
    for part in jobs.PARTS:
        for name, option in jobs.option_names(COMMANDS[part]).items():
            if name not in jobs.OWN[part]:
                words = [f"--{part}-{name}"] if option.is_flag else [f"--{part}-{name}", "1"]
                assert name in jobs.parse_options(words, COMMANDS)[part]


def test_a_job_reads_back_and_its_published_form_has_no_path(tmp_path: Path) -> None:
    text = tmp_path / "mine.jsonl"
    text.write_text("{}")
    job = jobs.Job(str(tmp_path / "small"), "org/large", {"capture": {"dataset": [str(text), "demo:text"], "pack": True}})
    (tmp_path / "fit.yaml").write_text(job.to_yaml())
    parts = {part: dict(job.parts.get(part, {})) for part in jobs.PARTS}
    assert jobs.read_job(tmp_path / "fit.yaml") == jobs.Job(job.source, job.target, parts)
    published = job.to_yaml(published=True)
    assert str(tmp_path) not in published
    assert yaml.safe_load(published)["capture"]["dataset"] == ["mine.jsonl", "demo:text"]
    assert yaml.safe_load(published)["source"] == "small"


@pytest.mark.parametrize("text", ["- a", "sourc: x", "source: [1]", "capture: 3", "capture: {1: 2}", "a: {", "\x00"])
def test_a_file_that_describes_no_job_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "fit.yaml").write_text(text)
    with pytest.raises(OptionError, match=r"fit\.yaml"):
        jobs.read_job(tmp_path / "fit.yaml")


def test_the_whole_job_once_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of so small a fit is `fail`, which stops the push; what was done is not done again."""
    words = ["demo:source", "demo:target", "--dataset", "demo:text", *SMALL.split(), "--out", str(tmp_path / "bundle")]
    result = run(*words, "--to", str(tmp_path / "published"))
    assert isinstance(result.exception, GateError)
    assert not (tmp_path / "published").exists()
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.verdict == "fail"
    job = jobs.read_job(tmp_path / "bundle" / "fit.yaml")
    assert job.parts["capture"] == {"dataset": ["demo:text"], "num-sequences": "24", "seq-len": "128"}
    monkeypatch.setattr("kvfit.fit.capture.capture.capture", None)
    monkeypatch.setattr("kvfit.fit.solve.solve.solve", None)
    again = run(*words)
    assert isinstance(again.exception, GateError), again.exception
    other = run(*words, "--penalty", "0.5")
    assert isinstance(other.exception, click.UsageError)
    assert "another --out" in str(other.exception)


def test_a_job_killed_after_its_capture_goes_on_with_the_solve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["demo:source", "demo:target", "--dataset", "demo:text", *SMALL.split(), "--out", str(tmp_path / "bundle")]
    with monkeypatch.context() as patch:
        patch.setattr("kvfit.fit.solve.solve.solve", _killed)
        assert isinstance(run(*words).exception, KeyboardInterrupt | SystemExit)
    monkeypatch.setattr("kvfit.fit.capture.capture.capture", None)
    assert isinstance(run(*words).exception, GateError)
    assert Bundle.open(tmp_path / "bundle").verdict == "fail"


def _killed(*_: Any, **__: Any) -> None:
    raise SystemExit(137)


def test_a_bundle_of_unknown_origin_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    result = run("demo:source", "demo:target", "--out", str(tmp_path / "bundle"))
    assert isinstance(result.exception, click.UsageError)
    assert not (tmp_path / "bundle.fit").exists()


def test_evaluate_remembers_local_models(tmp_path: Path) -> None:
    assert jobs.local_refs(tmp_path / "bundle") == (None, None)
    jobs.work_folder(tmp_path / "bundle").mkdir()
    (tmp_path / "bundle.fit" / "fit.yaml").write_text(json.dumps({"source": "/models/a", "target": "/models/b"}))
    assert jobs.local_refs(tmp_path / "bundle") == ("/models/a", "/models/b")


@pytest.mark.parametrize("words", [[], ["one"], ["a", "b", "c"]])
def test_two_models_are_needed(words: list[str]) -> None:
    assert isinstance(run(*words).exception, click.UsageError)
