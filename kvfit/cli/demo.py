"""The verb `demo`: the complete job on the built-in pair, with the same functions that a user would call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfit.bundle.files import require_writable
from kvfit.errors import MismatchError
from kvfit.fit.capture import capture, models
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate import arms, evaluate
from kvfit.fit.solve import solve
from kvfit.hub.load import load_mapper
from kvfit.runtime.handoff import handoff
from kvfit.spec import KINDS

SOURCE, TARGET, TEXT, HELDOUT = "demo:source", "demo:target", "demo:text", "demo:heldout"
SHOWN_TOKENS = 24
# The target recomputes a tenth of the prefix, where the source's retrieval heads look, because a map loses exact content.
RECOMPUTE = 0.1
# Every token is kept, because twice the sequences at every second token would give the same map for twice the forward passes.
CAPTURE = capture.Options(num_sequences=300, seq_len=512, token_stride=1)
# The pair was trained on one kind of question only. Its target is so small that a prefill takes almost no time. So the demo
# turns off the verdict's speed threshold, and says from which length on moving pays.
EVALUATION = evaluate.Options(
    documents=64,
    batch_size=16,
    probe_kinds=("names",),
    recompute=RECOMPUTE,
    greedy=16,
    diagnose=4,
    seconds=8.0,
    time_tokens=1536,
    thresholds=evaluate.Thresholds(speed=0.0),
)
SAID = {"native": "native", "handoff": "moved", "source": "source"}


@dataclass(frozen=True)
class Demo:
    """The demo's results, and where its files are."""

    report: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.report

    def __str__(self) -> str:
        return _table(self.report)


def run_demo(out: str | Path, *, progress: bool = True) -> Demo:
    """Capture, solve, evaluate, and hand over a held-out conversation.

    Args:
        out: folder for the store, the bundle and the picture; must not exist.
        progress: whether to show progress bars.

    Raises:
        MismatchError: `out` exists.
        BundleError: `out` cannot be created.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):  # an interrupted run leaves an empty folder
        raise MismatchError(f"{out}: found something there already, needed a new folder: choose another --out or remove it")
    require_writable(out)
    print("1/4 capture: both models over the same text", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    captured = capture.capture(SOURCE, TARGET, out / "pair.zarr", text=TextOptions(TEXT), options=CAPTURE, progress=progress)
    print("2/4 solve: from statistics to a map", file=sys.stderr)
    solved = solve.solve(captured.store, out / "bundle", plots=True, progress=progress)
    print("3/4 evaluate: on text that neither saw", file=sys.stderr)
    found = evaluate.evaluate(solved.bundle, text=TextOptions(HELDOUT), options=EVALUATION, progress=progress)
    print("4/4 hand a held-out conversation over", file=sys.stderr)
    picture = out / "r2-map.png"
    picture.write_bytes((solved.bundle / "r2-map.png").read_bytes())
    return Demo(_report(captured, solved, found, picture, _said(solved.bundle)))


@torch.no_grad()
def _said(bundle: Path) -> dict[str, str]:
    """The next tokens of one held-out conversation by the source, by the target, and by the target after a handoff."""
    source, target = models.load(SOURCE), models.load(TARGET)
    # The demo also shows what the mapper does if the evaluation above has failed.
    mapper = load_mapper(bundle, require="any").bind(source.model, target.model)
    text = next(documents(TextOptions(HELDOUT)))
    ids = target.tokenizer(text, return_tensors="pt")["input_ids"][:, :256].to(target.model.device)
    pair = arms.Pair(source.model, target.model, mapper)
    prefixes = arms.Prefixes(pair, ids[:, :-1])
    moved = handoff(mapper, target.model, ids, prefixes.sources, recompute=RECOMPUTE, guide=source.model)
    caches = {
        "source": (source.model, prefixes.cache("source")),
        "native": (target.model, prefixes.cache("native")),
        "handoff": (target.model, moved.cache),
    }
    said = {name: arms.answer(model, cache, moved.remaining_ids, SHOWN_TOKENS) for name, (model, cache) in caches.items()}
    return {"prefix": target.tokenizer.decode(ids[0, -24:])} | {
        name: target.tokenizer.decode(tokens) for name, tokens in said.items()
    }


def _report(
    captured: capture.Captured, solved: solve.Solved, found: evaluate.Evaluated, picture: Path, said: dict[str, str]
) -> dict[str, Any]:
    table = found.report["arms"]
    shown = [row["way"] for row in found.report["ways"]]
    return {
        "ways": found.report["ways"],
        "nll": {arm: table[arm]["nll"] for arm in shown},
        "kl": table["transfer"]["kl"],
        "share_of_gap": table["transfer"]["share_of_gap"],
        "shares_of_gap": {arm: table[arm]["share_of_gap"] for arm in shown},
        "interval": table["transfer"]["interval"],
        "recall": {arm: table[arm]["recall"] for arm in ("native", "transfer", "handoff", "source", "shuffled")},
        "r2": {kind: {name: solved.report["r2"][kind][name] for name in ("single", "chosen")} for kind in KINDS},
        "milliseconds": found.report["milliseconds"],
        "bytes": {"store": _size(captured.store), "bundle": _size(solved.bundle)},
        "tokens": {"calibration": solved.report["tokens"], **found.report["tokens"]},
        "verdict": found.verdict,
        "reasons": found.report["reasons"],
        "said": said,
        "store": str(captured.store),
        "bundle": str(solved.bundle),
        "picture": str(picture),
        "page": None if found.page is None else str(found.page),
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _table(report: dict[str, Any]) -> str:
    """The report as text."""
    r2, tokens, rows = report["r2"], report["tokens"], report["ways"]
    width = 46

    def row(name: str, *cells: str) -> str:
        return f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells)

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    # A bundle that failed is loaded only with this argument.
    gate = "" if report["verdict"] != "fail" else ', require="any"'
    labels = {
        "native": "target, its own cache (native prefill)",
        "transfer": "target, mapped cache (transfer)",
        "handoff": f"target, mapped, {RECOMPUTE:.0%} recomputed (handoff)",
        "auto": "target, mapped, recomputed as needed (auto)",
        "source": "source alone",
        "no_context": "target without the context",
        "mean": "control: mean keys and values",
        "shuffled": "control: another document's mapped cache",
    }
    lines = [
        "",
        f"{SOURCE} -> {TARGET}, {tokens['calibration']['fit']} tokens fitted, {tokens['calibration']['holdout']} held out; "
        f"{tokens['documents']} unseen documents, {tokens['prefix']} tokens of context, {tokens['continuation']} scored",
        "",
        row("R2 (before the gain)", "keys fit", "holdout", "values fit", "holdout"),
    ]
    for name, label in (("single", "best single source layer"), ("chosen", "chosen source layers")):
        lines.append(row(label, *(f"{r2[kind][name][split]:.3f}" for kind in KINDS for split in ("fit", "holdout"))))
    lines += ["", row("cache given to the target", "nats/token", "gap", "recall", "ms", "of the work")]
    for one in rows:
        recall = one["recall"] if one["recall_by_kind"] else None  # only if the target can answer such questions
        cells = (cell(one["nll"], ".3f"), cell(one["share_of_gap"], ".0%"), cell(recall, ".0%"))
        lines.append(row(labels[one["way"]], *cells, cell(one["milliseconds"], ".1f"), cell(one["share_of_work"], ".0%")))
    if not any(one["recall_by_kind"] for one in rows):
        lines.append("  recall: not shown by this pair (the models cannot answer such questions themselves)")
    lines += [f"  {line}" for line in _pays(report)]
    megabytes = [f"{report['bytes'][name] / 1e6:.1f} {name}" for name in ("store", "bundle")]
    lines += [
        "",
        row("megabytes", megabytes[0], megabytes[1].rjust(16)),
        row("verdict", report["verdict"]),
        *(f"    {reason}" for reason in report["reasons"]),
        "",
        f"  ...{_one_line(report['said']['prefix'])}",
        *(f"  {label:<8} | {_one_line(report['said'][arm])}" for arm, label in SAID.items()),
        "",
        f"  store    {report['store']}",
        f"  bundle   {report['bundle']}",
        f"  R2 map   {report['picture']}",
        f"  page     {report['page']}",
        "",
        "  from kvfit import handoff, load_mapper",
        f"  mapper = load_mapper({report['bundle']!r}{gate})",
        f"  moved = handoff(mapper, target_model, input_ids, source_cache, recompute={RECOMPUTE}, guide=source_model)",
        "  moved.generate(max_new_tokens=24)",
    ]
    return "\n".join(lines)


def _pays(report: dict[str, Any]) -> list[str]:
    """Lines that say whether each way of moving pays on this machine."""
    moved = report["tokens"]["prefix"] - 1
    longest = report["milliseconds"]["lengths"][-1]
    lines = [f"ms: one sequence of {moved} tokens; the target is tiny, and a prefill of it takes next to no time"]
    for name in ("transfer", "handoff", "auto"):
        begins = report["milliseconds"]["breaks_even"][name]
        speed = longest["prefill"]["median"] / longest[name]["median"]
        where = "does not pay at any length that was timed" if begins is None else f"pays from {begins} tokens on"
        lines.append(f"{name}: {where}; {speed:.1f} x as fast as a prefill at {longest['tokens']}")
    return lines


def _one_line(text: str) -> str:
    return " / ".join(part for part in text.split("\n") if part.strip())
