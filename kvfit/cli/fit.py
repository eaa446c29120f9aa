"""The verb `fit`: plan, capture, solve, evaluate and push as one job that can be interrupted and repeated.

Each part is run through its own command, so that it checks its options as always.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.cli.job import CONFIG, PARTS, Job, Values, as_words, option_names, words_of, work_folder
from kvfit.errors import KvfitError, OptionError


@dataclass(frozen=True)
class Fitted:
    """What a job left behind.

    Attributes:
        bundle, store: where they are.
        verdict: of the evaluation.
        line: the last line of the evaluation.
        pushed: where the bundle was published to, None where it was not.
    """

    bundle: Path
    store: Path
    verdict: str
    line: str
    pushed: str | None

    def to_json(self) -> Values:
        """As JSON values."""
        return {
            "bundle": str(self.bundle), "store": str(self.store), "verdict": self.verdict, "evaluation": self.line,
            "pushed": self.pushed,
        }  # fmt: skip

    def __str__(self) -> str:
        where = f"; published to {self.pushed}" if self.pushed else ""
        return f"{self.line or self.bundle}{where}"


def run_fit(job: Job, out: str | Path, commands: Mapping[str, click.Command]) -> Fitted:
    """Do every part that has not been done yet.

    Args:
        job: what to fit.
        out: the bundle's folder.
        commands: the command of each part, and of ``plan``.

    Raises:
        OptionError: an option that a part refuses, or a bundle in `out` that another job made.
        GateError: the verdict is ``fail``; nothing is pushed then.
    """
    bundle, work = Path(out), work_folder(out)
    words = {part: words_of(job.parts.get(part, {}), commands[part], part) for part in PARTS}
    store = work / "pair.zarr"
    done = _done(work)
    made = {"source": job.source, "target": job.target, "capture": words["capture"]}
    wanted = {**made, "solve": words["solve"]}
    if bundle.exists() and done.get("solve") != wanted:
        raise OptionError(
            f"{bundle}: found a bundle that this job did not make, needed a free place: choose another --out, or remove it"
        )
    if store.exists() and done.get("capture", made) != made:
        raise OptionError(
            f"{store}: found statistics of another job, needed those of this one: choose another --out, or remove {work}"
        )
    work.mkdir(parents=True, exist_ok=True)
    (work / CONFIG).write_text(job.to_yaml(), encoding="utf-8")
    if done.get("capture") != made:
        if not store.exists():
            _plan(job, commands["plan"])
        _run(commands["capture"], [job.source, job.target, "--out", str(store), "--resume", *words["capture"]])
        _remember(work, capture=made)
    if not bundle.exists():
        # Before the solve, so that a bundle without this entry is never taken for one of this job.
        _remember(work, solve=wanted)
        _run(commands["solve"], [str(store), "--out", str(bundle), *words["solve"]])
    add_files(bundle, {CONFIG: job.to_yaml(published=True).encode()})
    line = _evaluate(job, bundle, work, words["evaluate"], commands["evaluate"])
    pushed = _run(commands["push"], [str(bundle), *words["push"]]) if words["push"] else None
    return Fitted(bundle, store, Bundle.open(bundle, verify=False).verdict, line, pushed)


def _evaluate(job: Job, bundle: Path, work: Path, words: list[str], command: click.Command) -> str:
    """Judge the bundle, unless it was judged in this way before; the line that `evaluate` ends with."""
    judged = {"evaluate": words, "weights": Bundle.open(bundle, verify=False).weights_digest}
    done = _done(work)
    if done.get("evaluate") == judged and Bundle.open(bundle, verify=False).verdict == "pass":
        return str(done.get("line", ""))
    line = _run(command, [str(bundle), "--source", job.source, "--target", job.target, *words])
    _remember(work, evaluate=judged, line=line)
    return line


def _plan(job: Job, command: click.Command) -> None:
    """Print what the job will take; what `plan` cannot say stops nothing, because the parts check again."""
    names = option_names(command)
    shared = {name: value for name, value in job.parts.get("capture", {}).items() if name in names}
    try:
        _run(command, [job.source, job.target, *as_words(shared)])
    except (KvfitError, click.ClickException) as error:
        click.echo(f"kvfit fit: no plan ({error})", err=True)


def _run(command: click.Command, words: list[str]) -> str:
    """Run a part through its own command; what it would print on stdout, which is passed on to stderr."""
    click.echo(f"kvfit {command.name} {' '.join(words)}", err=True)
    kept = io.StringIO()
    try:
        with contextlib.redirect_stdout(kept), command.make_context(command.name or "", list(words)) as context:
            command.invoke(context)
    finally:
        click.echo(kept.getvalue().rstrip("\n"), err=True)
    return kept.getvalue().strip()


def _done(work: Path) -> Values:
    try:
        found = json.loads((work / "done.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(work: Path, **parts: Any) -> None:
    temporary = work / "done.json.new"
    temporary.write_text(json.dumps(_done(work) | parts), encoding="utf-8")
    temporary.replace(work / "done.json")
