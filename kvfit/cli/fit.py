"""The verb `fit`: plan, capture, solve, evaluate and push as one job that can be interrupted and repeated.

Each part runs through its own command, so that it checks its options in the same way.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.bundle.records import dump_json, parse_json
from kvfit.cli.job import CONFIG, PARTS, Job, Values, as_words, option_names, words_of, work_folder
from kvfit.errors import KvfitError, OptionError
from kvfit.fit.capture.local_text import content_digest


@dataclass(frozen=True)
class Fitted:
    """The result of a job.

    Attributes:
        bundle: the bundle's folder.
        store: the store's folder.
        verdict: verdict of the evaluation.
        line: the last line that the evaluation printed.
        pushed: the line that push printed; None if the bundle was not published.
    """

    bundle: Path
    store: Path
    verdict: str
    line: str
    pushed: str | None

    def to_json(self) -> Values:
        """The result as JSON values."""
        return {
            "bundle": str(self.bundle), "store": str(self.store), "verdict": self.verdict, "evaluation": self.line,
            "pushed": self.pushed,
        }  # fmt: skip

    def __str__(self) -> str:
        where = f"; published to {self.pushed}" if self.pushed else ""
        return f"{self.line or self.bundle}{where}"


def run_fit(job: Job, out: str | Path, commands: Mapping[str, click.Command]) -> Fitted:
    """Run every part that has not been done yet.

    Args:
        job: the models, and the options of the parts.
        out: the bundle's folder.
        commands: the command of each part, and of ``plan``.

    Raises:
        OptionError: a part refuses an option, or `out` holds a bundle of another job.
        GateError: the verdict is ``fail``. Nothing is pushed then.
    """
    bundle, work = Path(out), work_folder(out)
    words = {part: words_of(job.parts.get(part, {}), commands[part], part) for part in PARTS}
    store = work / "pair.zarr"
    done = _done(work)
    texts = _local_texts(job.parts.get("capture", {}))
    made = {"source": job.source, "target": job.target, "capture": words["capture"], "texts": texts}
    wanted = {**made, "solve": words["solve"]}
    if bundle.exists() and done.get("solve") != wanted:
        raise OptionError(
            f"{bundle}: found a bundle that this job did not make, or of text that has changed since, needed a new folder: "
            "choose another --out, or remove it"
        )
    if store.exists() and done.get("capture", made) != made:
        raise OptionError(
            f"{store}: found statistics of another job, or of text that has changed since, needed those of this one: choose "
            f"another --out, or remove {work}"
        )
    work.mkdir(parents=True, exist_ok=True)
    (work / CONFIG).write_text(job.to_yaml(), encoding="utf-8")
    if done.get("capture") != made:
        if not store.exists():
            _plan(job, commands["plan"])
        _run(commands["capture"], [job.source, job.target, "--out", str(store), "--resume", *words["capture"]])
        _remember(work, capture=made)
    if not bundle.exists():
        # Written before the solve, so that every bundle of this job has its entry.
        _remember(work, solve=wanted)
        _run(commands["solve"], [str(store), "--out", str(bundle), *words["solve"]])
    add_files(bundle, {CONFIG: job.to_yaml(published=True).encode()})
    line = judge(job, bundle, work, words["evaluate"], commands["evaluate"])
    pushed = _run(commands["push"], [str(bundle), *words["push"]]) if words["push"] else None
    return Fitted(bundle, store, Bundle.open(bundle, verify=False).verdict, line, pushed)


def judge(job: Job, bundle: Path, work: Path, words: list[str], command: click.Command) -> str:
    """Evaluate a bundle, unless it has passed the same evaluation on the same text before.

    Args:
        job: which models, and which text.
        bundle: its folder.
        work: where the job keeps what it has done.
        words: options of `evaluate`.
        command: ``evaluate``.

    Returns:
        The last line that `evaluate` printed.
    """
    opened, done = Bundle.open(bundle, verify=False), _done(work)
    wanted = {"words": words, "texts": _local_texts(job.parts.get("evaluate", {})), "weights": opened.weights_digest}
    if done.get("evaluate") == {**wanted, "result": opened.digests.get("evaluation.json")} and opened.verdict == "pass":
        return str(done.get("line", ""))
    line = _run(command, [str(bundle), "--source", job.source, "--target", job.target, *words])
    result = Bundle.open(bundle, verify=False).digests.get("evaluation.json")
    _remember(work, evaluate={**wanted, "result": result}, line=line)
    return line


def _local_texts(values: Values) -> dict[str, str]:
    """A digest of every local text that a part's options name, so that a changed file is noticed."""
    found = {}
    for name in ("dataset", "text"):
        words = values.get(name, [])
        for word in words if isinstance(words, list) else [words]:
            # A file, REF=SHARE or NAME=DATASET; a file may have the sign in its name.
            paths = (Path(ref).expanduser() for ref in (word, word.rpartition("=")[0], word.partition("=")[2]) if ref)
            path = next((path for path in paths if path.exists()), None)
            if path is not None:
                found[word] = content_digest(path)
    return found


def _plan(job: Job, command: click.Command) -> None:
    """Print what the job will take. An error of `plan` does not stop the job, because the parts check everything again."""
    names = option_names(command)
    shared = {name: value for name, value in job.parts.get("capture", {}).items() if name in names}
    try:
        _run(command, [job.source, job.target, *as_words(shared)])
    except (KvfitError, click.ClickException) as error:
        click.echo(f"kvfit fit: no plan ({error})", err=True)


def _run(command: click.Command, words: list[str]) -> str:
    """Run a part through its own command. Its output goes to stderr and is returned."""
    click.echo(f"kvfit {command.name} {' '.join(words)}", err=True)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), command.make_context(command.name or "", list(words)) as context:
            command.invoke(context)
    finally:
        click.echo(output.getvalue().rstrip("\n"), err=True)
    return output.getvalue().strip()


def _done(work: Path) -> Values:
    try:
        found = parse_json((work / "done.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(work: Path, **parts: Any) -> None:
    temporary = work / "done.json.new"
    temporary.write_bytes(dump_json(_done(work) | parts))
    temporary.replace(work / "done.json")
