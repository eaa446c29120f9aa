"""Make the table of docs/quality.md: what each step of the fit brings on one pair of models, quality and cost side by side.

    python scripts/quality_table.py SOURCE TARGET --text TEXT --heldout TEXT --work FOLDER --out docs/quality.md

Everything goes through kvfit's own functions: capture, merge, solve, refine, evaluate. What is in the work folder is not made
again, so a run that was stopped goes on where it was, and a run with other rows makes only those. TEXT is a dataset as `kvfit
capture` takes it; the facts text is generated.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfit.bundle.bundle import Bundle
from kvfit.fit.capture import capture as capturing
from kvfit.fit.capture import models
from kvfit.fit.capture.facts import facts
from kvfit.fit.capture.options import LEXICAL_LAGS
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate import options as evaluating
from kvfit.fit.evaluate.compare import Comparison
from kvfit.fit.refine import refine as refining
from kvfit.fit.solve.options import Options as SolveOptions
from kvfit.fit.solve.solve import solve
from kvfit.fit.stats.merge import merge
from kvfit.fit.stats.record import read_record
from kvfit.fit.stats.store import Store
from kvfit.runtime import EXACT_HEAD
from kvfit.spec import KINDS

PLAIN: dict[str, Any] = {"lexical": "none"}
UNLIMITED: dict[str, Any] = {"rank": "none", "cost": None}


@dataclass(frozen=True)
class Step:
    """A bundle of the table.

    Attributes:
        name: of its row.
        calibration: ``text``, or ``mix`` for text and facts.
        solve: options of `solve`.
        recompute: shares of the prefix that the target recomputes, one row each.
        start: name of the step that it refines; None for a solved one.
    """

    name: str
    calibration: str = "mix"
    solve: dict[str, Any] = field(default_factory=dict)
    recompute: tuple[float | str, ...] = (0.0,)
    start: str | None = None


DEFAULT = Step("+ target layer 0 and facts text (default)", recompute=(0.0, 0.1, "auto"))
STEPS = (
    Step("8 best layers, like kinds, no gain", "text", {**PLAIN, **UNLIMITED, "inputs": "same", "top_k": 8, "gain": "none"}),
    Step("all layers, keys and values, no gain", "text", {**PLAIN, "gain": "none"}),
    Step("all layers, keys and values, gain", "text", PLAIN),
    Step("+ target layer 0", "text"),
    Step("+ facts text, without target layer 0", "mix", PLAIN),
    DEFAULT,
    Step("the same without a shared basis, at any cost", "mix", UNLIMITED),
    Step("the same, refined", start=DEFAULT.name),
    Step("the same, bfloat16 weights", solve={"dtype": "bfloat16"}),
    Step("the same, rank 1024", solve={"rank": 1024}),
    Step("the same, rank 512", solve={"rank": 512}),
    Step("the same, lags 0 to 2", solve={"lexical": (0, 1, 2)}),
    Step("the same, lags 0 to 4", solve={"lexical": (0, 1, 2, 3, 4)}),
)


def slug(name: str) -> str:
    """A name as a folder's."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


class Study:
    """One pair, one work folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.work = Path(given.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.loading = (models.Options(dtype=given.dtype),) * 2
        self.models_given: dict[str, Any] = {"source": given.source, "target": given.target, "loading": self.loading}
        self.text = TextOptions(given.text)
        self.facts = TextOptions(str(self._facts_file()))

    def _facts_file(self) -> Path:
        path = self.work / "facts.jsonl"
        if not path.exists():
            lines = [json.dumps({"text": text}) + "\n" for text in facts(0, self.n_facts + self.given.refine_sequences)]
            path.write_text("".join(lines), encoding="utf-8")
        return path

    @property
    def n_facts(self) -> int:
        """Sequences of facts text, so that they are the share of the mix that was asked for."""
        share = self.given.facts_share
        return max(2, round(self.given.sequences * share / (1 - share)))

    def made(self, path: Path, make: Callable[[Path], Any]) -> Path:
        """A path that is made unless it is there; what makes it does so whole or not at all."""
        if not path.exists():
            print(f"making {path.name}", flush=True)
            make(path)
        return path

    def captured(self, name: str, text: TextOptions, count: int) -> Path:
        """A store of one text."""
        options = capturing.Options(
            num_sequences=count,
            seq_len=self.given.seq_len,
            token_stride=self.given.token_stride,
            holdout=self.given.holdout,
            lexical=tuple(self.given.lags),
        )

        path = self.work / f"{name}.zarr"
        if not path.exists() or not read_record(path).finished:
            print(f"capturing {name}", flush=True)
            refs, size = (self.given.source, self.given.target), self.given.batch
            capturing.capture(*refs, path, text=text, options=options, loading=self.loading, resume=True, batch_size=size)
        return path

    def store(self, calibration: str) -> Path:
        """The statistics of a calibration."""
        text = self.captured("text", self.text, self.given.sequences)
        if calibration == "text":
            return text
        parts = [text, self.captured("facts", self.facts, self.n_facts)]
        return self.made(self.work / "mix.zarr", lambda path: merge(parts, path))

    def bundle(self, step: Step) -> Path:
        """The step's bundle."""
        path = self.work / "bundles" / slug(step.name)
        if step.start is None:
            return self.made(path, lambda out: self.solved(step, out))
        start = self.bundle(next(other for other in STEPS if other.name == step.start))
        given = self.given
        schedule = refining.Schedule(steps=given.refine_steps, batch_size=given.batch)
        options = refining.Options(num_sequences=given.refine_sequences, seq_len=given.seq_len, schedule=schedule)
        texts = (self.text, self.facts)
        return self.made(
            path, lambda out: print(refining.refine(start, out, texts=texts, options=options, **self.models_given), flush=True)
        )

    def solved(self, step: Step, out: Path) -> None:
        """Solve a step's maps; a source with fewer layers than are asked for gives them all."""
        store = Store.open(self.store(step.calibration))
        wanted = dict(step.solve)
        if wanted.get("top_k", 0) > store.source.n_layers:
            wanted["top_k"] = "all"
        solve(store.path, out, options=SolveOptions(**wanted))

    @cached_property
    def comparison(self) -> Comparison:
        """Both models, loaded once for all rows."""
        given = self.given
        options = evaluating.Options(
            prefix=given.prefix,
            continuation=given.continuation,
            documents=given.documents,
            probes=given.questions,
            batch_size=given.batch,
        )
        first = Bundle.open(next((self.work / "bundles").iterdir()))
        return Comparison(first, TextOptions(given.heldout), options, **self.models_given)

    def kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A row that an earlier run has saved, or a new one."""
        path = self.work / "rows" / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def row(self, step: Step, recompute: float | str) -> dict[str, Any] | None:
        """What the table says of a step; None where there is no bundle because refining did not help."""
        bundle = self.bundle(step)
        if not bundle.exists():
            return None

        def judge() -> dict[str, Any]:
            print(f"judging {step.name}, recompute {recompute}", flush=True)
            opened = Bundle.open(bundle)
            mapper = self.comparison.mapper(opened)
            found = asdict(self.comparison.row(mapper, recompute))  # type: ignore[arg-type]
            layers = opened.spec.layers
            r2 = [[layer.r2_holdout for layer in layers if layer.kind == kind] for kind in KINDS]
            if self.given.seconds:
                share = recompute if isinstance(recompute, float) else 0.0
                arm = "auto" if recompute == "auto" else "handoff"
                found["milliseconds"] = self.comparison.milliseconds(arm, self.given.seconds, mapper, share)
            return found | {"r2": [sum(part) / len(part) for part in r2], "nbytes": opened.nbytes}

        return self.kept(f"{slug(step.name)}-{recompute}-head-{EXACT_HEAD}", judge)

    def models(self) -> dict[str, dict[str, Any]]:
        """Rows that no map changes, and the controls of the last step's map."""

        def judge() -> dict[str, Any]:
            found = {name: asdict(row) for name, row in self.comparison.without_map.items()}
            if self.given.seconds:
                found["native"]["milliseconds"] = self.comparison.milliseconds("native", self.given.seconds)
            return found

        def controls() -> dict[str, Any]:
            mapper = self.comparison.mapper(Bundle.open(self.bundle(DEFAULT)))
            return {arm: asdict(self.comparison.row(mapper, arm=arm)) for arm in ("mean", "shuffled")}  # type: ignore[arg-type]

        return self.kept("models", judge) | self.kept("controls", controls)


LABELS = {
    "native": "target, its own cache (full prefill)",
    "source": "source alone, nothing moved",
    "no_context": "target without the context",
    "mean": "control: mean keys and values, no content",
    "shuffled": "control: another document's mapped cache",
}


def quality_line(name: str, found: dict[str, Any], timed: bool) -> str:
    """One row of the first table."""
    low, high = found["interval"]
    cells = [
        name,
        "{:.3f} / {:.3f}".format(*found["r2"]) if "r2" in found else "",
        f"{found['nll']:.3f}",
        f"{found['share']:.0%} ({low:.0%} to {high:.0%})",
        f"{found['kl']:.3f}",
        f"{found['nbytes'] / 1e6:.0f}" if "nbytes" in found else "",
        "" if found["work"] is None else f"{found['work']:.1%}",
    ]
    if timed:
        cells.append("" if found["milliseconds"] is None else f"{found['milliseconds']:.0f}")
    return f"| {' | '.join(cells)} |"


def recall_line(name: str, found: dict[str, Any], kinds: list[str]) -> str:
    """One row of the second table."""
    cells = ["{:.0%} ({:.2f})".format(*found["recall"][kind]) if kind in found["recall"] else "" for kind in kinds]
    return f"| {' | '.join([name, *cells])} |"


def row_name(step: Step, share: float | str) -> str:
    """A step as it was used."""
    if share == "auto":
        return f"{step.name}; recompute auto"
    return f"{step.name}; {share:.0%} recomputed" if share else step.name


def page(study: Study, found: list[tuple[str, dict[str, Any]]], models: dict[str, dict[str, Any]]) -> str:
    """The text of docs/quality.md.

    Args:
        study: what was asked for.
        found: rows of the steps by name.
        models: rows of `LABELS`.
    """
    given, timed = study.given, bool(study.given.seconds)
    kinds = list(models["native"]["recall"])
    rows = [*found, *((LABELS[name], models[name]) for name in LABELS if name in models)]
    head = ["map", "R2 keys / values", "NLL", "share of gap", "KL", "MB", "work", *(["ms"] if timed else [])]
    n_mix = given.sequences + study.n_facts
    refined = f" The refined map was trained for up to {given.refine_steps} steps, on {given.refine_sequences} sequences."
    pair = given.pair or f"{Path(given.source).name} -> {Path(given.target).name}"
    return "\n".join([
        "# What each step brings",
        "",
        "This page shows what each way of fitting a map brings on one pair of models, with its cost in the same row. It was "
        f"made by `scripts/quality_table.py` for {pair}. Run it on your own "
        "pair, and do not edit the page.",
        "",
        f"The maps were fitted on {given.sequences} sequences of {given.seq_len} tokens of ordinary text (token stride "
        f"{given.token_stride}), or on {n_mix} sequences with facts text; they read "
        f"target layer 0 at lags {', '.join(map(str, given.lags))}. They were judged on "
        f"{given.documents} documents that no map has seen, with {given.prefix} tokens of context, {given.continuation} scored "
        f"tokens and {given.questions} questions of each kind. The first {EXACT_HEAD} tokens are exact in every row."
        f"{refined if any('refined' in name for name, _ in found) else ''}",
        "",
        "R2 is the mean over target layers on the holdout split, before the gain. The share of gap is that of the likelihood "
        "between the source alone and the target with its own cache, with a 95 % interval over documents. KL is in nats per "
        "token, from the target with its own cache. Work is the share of the operations of the target's prefill."
        f"{' Ms is for one context, on the machine that made the table.' if timed else ''}",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(quality_line(name, row, timed) for name, row in rows),
        "",
        "## Recall",
        "",
        "The table has the share of exact answers, and in brackets the mean log-probability of the answers' tokens, which "
        "distinguishes maps before exact answers do. The facts text contains no question of these forms.",
        "",
        f"| {' | '.join(['map', *kinds])} |",
        "|" + "---|" * (1 + len(kinds)),
        *(recall_line(name, row, kinds) for name, row in rows if row["recall"]),
        "",
    ])  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="ref of the source model")
    parser.add_argument("target", help="ref of the target model")
    parser.add_argument("--text", default="demo:text", help="calibration text")
    parser.add_argument("--heldout", default="demo:heldout", help="text to judge on")
    parser.add_argument("--work", required=True, help="folder for stores, bundles and reports")
    parser.add_argument("--out", default="docs/quality.md", help="the page")
    for name, default in (
        ("sequences", 120), ("seq-len", 512), ("token-stride", 1), ("prefix", 384), ("continuation", 128), ("documents", 32),
        ("questions", 48), ("batch", 4), ("refine-sequences", 64), ("refine-steps", 200),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--lags", type=int, nargs="*", default=list(LEXICAL_LAGS), help="lags of lexical inputs to capture")
    parser.add_argument("--pair", help="what the page calls the pair; default the names of the folders")
    parser.add_argument("--dtype", default="auto", help="of both models; float32 is faster on most CPUs; default as stored")
    parser.add_argument("--facts-share", type=float, default=0.25, help="of the mixed calibration; default 0.25")
    parser.add_argument("--holdout", type=float, default=0.1, help="share of the sequences that choose penalties; default 0.1")
    parser.add_argument("--seconds", type=float, default=0.0, help="to time each row for; default 0: the machine is not idle")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the steps to make, from 0, in this order; default all")
    return parser.parse_args()


def main() -> None:
    """Make what is missing and write the page."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    given = arguments()
    study = Study(given)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for number in given.only or range(len(STEPS)):
        step = STEPS[number]
        for share in step.recompute:
            row = study.row(step, share)
            if row is None:
                print(f"{step.name}: no better than what it started from, left out", flush=True)
                continue
            found[number, row_name(step, share)] = row
            # After every row, so that a run that is stopped leaves a page of what it has.
            rows = [(name, found[place, name]) for place, name in sorted(found, key=lambda key: key[0])]
            Path(given.out).write_text(page(study, rows, study.models()), encoding="utf-8")


if __name__ == "__main__":
    main()
