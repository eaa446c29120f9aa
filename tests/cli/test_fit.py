"""The verb `fit`: options find their part, a job can be interrupted and repeated, and no local path travels in a bundle."""

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from bundle_factory import evaluated_bundle, evaluation
from click.testing import CliRunner, Result

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.cli import fit as fit_verb
from kvfit.cli import job as jobs
from kvfit.cli.main import cli
from kvfit.demo import TEXTS
from kvfit.errors import GateError, OptionError
from kvfit.fit.capture.local_text import content_digest

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
    """The verdict of so small a fit is `fail`, which stops the push; what was done is not done again but on other text."""
    text = tmp_path / "text.jsonl"
    shutil.copy(TEXTS["demo:text"], text)
    words = ["demo:source", "demo:target", "--dataset", str(text), *SMALL.split(), "--out", str(tmp_path / "bundle")]
    result = run(*words, "--to", str(tmp_path / "published"))
    assert isinstance(result.exception, GateError)
    assert not (tmp_path / "published").exists()
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.verdict == "fail"
    job = jobs.read_job(tmp_path / "bundle" / "fit.yaml")
    assert job.parts["capture"] == {"dataset": ["text.jsonl"], "num-sequences": "24", "seq-len": "128"}
    monkeypatch.setattr("kvfit.fit.capture.capture.capture", None)
    monkeypatch.setattr("kvfit.fit.solve.solve.solve", None)
    again = run(*words)
    assert isinstance(again.exception, GateError), again.exception
    other = run(*words, "--penalty", "0.5")
    assert isinstance(other.exception, click.UsageError)
    assert "another --out" in str(other.exception)
    with text.open("a") as file:
        file.write(json.dumps({"text": "More of it."}) + "\n")
    changed = run(*words)
    assert isinstance(changed.exception, click.UsageError)
    assert "of text that has changed since" in str(changed.exception)


def test_a_verdict_is_of_the_text_and_the_options_that_are_asked_for(tmp_path: Path) -> None:
    """A bundle that passed is judged again on a file that has changed, or where its verdict is of another evaluation."""
    bundle, text = evaluated_bundle(tmp_path / "bundle"), tmp_path / "heldout.txt"
    text.write_text("In the beginning")
    judged: list[int] = []

    @click.command("evaluate", context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def command(words: tuple[str, ...]) -> None:  # noqa: ARG001
        judged.append(len(judged))
        another_evaluation(bundle, len(judged))
        click.echo(f"judged {len(judged)}")

    def line() -> str:
        jobs.work_folder(bundle).mkdir(exist_ok=True)
        job = jobs.Job("a", "b", {"evaluate": {"dataset": str(text)}})
        return fit_verb.judge(job, bundle, jobs.work_folder(bundle), ["--dataset", str(text)], command)

    assert [line(), line()] == ["judged 1", "judged 1"]
    text.write_text("In the end")
    assert [line(), line()] == ["judged 2", "judged 2"]
    another_evaluation(bundle, 99)  # of other options, by hand
    assert [line(), line()] == ["judged 3", "judged 3"]


def another_evaluation(bundle: Path, seed: int) -> None:
    found = evaluation(Bundle.open(bundle)) | {"options": {"seed": seed}}
    add_files(bundle, {"evaluation.json": json.dumps(found).encode()})


def test_a_digest_of_text_is_of_names_and_content(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "inner" / "b.txt").write_text("two")
    found = {content_digest(folder)}
    (folder / ".hidden").write_text("no document")
    assert content_digest(folder) in found
    (folder / "a.txt").write_text("onf")  # as long as before
    found.add(content_digest(folder))
    (folder / "a.txt").rename(folder / "c.txt")
    found.add(content_digest(folder))
    (folder / "c.txt").write_text("onft")
    (folder / "inner" / "b.txt").write_text("wo")  # the same bytes, cut elsewhere
    found.add(content_digest(folder))
    assert len(found) == 4
    assert content_digest(folder / "c.txt") == content_digest(folder / "c.txt")


def test_a_dataset_given_twice_is_not_the_last_one() -> None:
    """Capture mixes several, so a caller of evaluate may expect the same: the verdict would be about the last one alone."""
    twice = CliRunner().invoke(cli, ["evaluate", "bundle", "--dataset", "a.txt", "--dataset", "b.txt"], standalone_mode=False)
    assert isinstance(twice.exception, click.UsageError)
    assert "--dataset: found it twice, needed one: give further texts with --text NAME=DATASET" in str(twice.exception)
    with pytest.raises(click.UsageError, match="--dataset: found it twice"):
        jobs.parse_options("--evaluate-dataset a.txt --evaluate-dataset b.txt".split(), COMMANDS)


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
