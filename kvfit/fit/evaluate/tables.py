"""The paragraphs and tables of an evaluation's report, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfit.fit.evaluate import ways
from kvfit.fit.evaluate.clock import TIMED
from kvfit.spec import KINDS, MapperSpec

SHORT = {"transfer": "transfer", "handoff": "handoff", "auto": "auto", "prefill": "prefill"} | {
    "reused_transfer": "transfer, half there",
    "reused_prefill": "prefill, half there",
}


@dataclass(frozen=True)
class Block:
    """A part of the report: optionally a heading, a paragraph, bullets, a table and a picture, in this order."""

    heading: str = ""
    text: str = ""
    bullets: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    picture: str = ""


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.0%}".replace("-0%", "0%")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g} x"


def blocks(report: dict[str, Any], spec: MapperSpec) -> Iterable[Block]:
    """The blocks of the report in order.

    Args:
        report: the content of `evaluation.json`.
        spec: the bundle's spec.
    """
    tokens, options = report["tokens"], report["options"]
    fine = "" if report["reasons"] else " No measurement speaks against moving conversations with this mapper."
    yield Block(text=f"Verdict: {report['verdict']}.{fine}", bullets=report["reasons"])
    yield Block(
        text=f"The source ({spec.source.ref}) has read a text; its cache is mapped, and the target ({spec.target.ref}) "
        f"continues from it. Measured on {tokens['documents']} documents of {report['text']}: {tokens['prefix']} tokens of "
        f"context, {tokens['continuation']} tokens scored. {_overlap(report)}"
    )
    yield from _ways(report)
    yield from _lengths(report)
    yield from _recall(report)
    yield from _texts(report)
    if report["layers"]:
        yield Block(
            "Layers",
            "How close mapped keys and values are to the target's own, per target layer. R2 is that of the map as it is used; "
            "explained is the R2 after rescaling every output. Concentration above 1 means that errors are where attention "
            "reads. Attention cosine compares what the target's own queries read from mapped and from own keys and values. "
            "Numbers per head are in `evaluation.json`.",
            picture="evaluation-layers.png",
            **_layers(report["layers"]),
        )
    yield from _turns(report)
    yield from _clock(report)
    judged = next(row for row in report["ways"] if row["judged"])
    yield Block(
        "What was judged",
        f"The verdict is about one way of moving: {judged['label']}. It holds for the weights `{report['weights_digest']}` "
        "only. Thresholds:",
        head=("threshold", "value"),
        rows=[(name, f"{value:g}") for name, value in options["thresholds"].items()],
    )


def _overlap(report: dict[str, Any]) -> str:
    """A sentence on whether the mapper was fitted on the evaluation's text. It makes a claim only if that was checked."""
    if not report["overlap"]["checked"]:
        return "It is not known whether the mapper was fitted on some of them: its bundle has no record of the documents."
    left_out = report["overlap"]["left_out"]
    return "Neither fit nor selection saw any of them" + (f"; {left_out} that they did see were left out." if left_out else ".")


def _interval(row: dict[str, Any]) -> str:
    return " to ".join(_percent(end) for end in row["interval"])


def _ways(report: dict[str, Any]) -> Iterable[Block]:
    judged = next(row for row in report["ways"] if row["judged"])
    kinds = list(dict.fromkeys(kind for row in report["ways"] for kind in row["recall_by_kind"]))
    speed = ways.speed_text(judged, report["tokens"]["prefix"] - 1)
    rows = []
    for row in report["ways"]:
        recalled = [row["recall_by_kind"].get(kind) for kind in kinds]
        rows.append(
            (
                f"{row['label']}{' (judged)' if row['judged'] else ''}",
                _number(row["nll"]),
                _percent(row["share_of_gap"]),
                _interval(row),
                _number(row["kl"]),
                _percent(row["greedy_match"]),
                *("-" if one is None else f"{one['recall']:.0%} ({one['log_probability']:.2f})" for one in recalled),
                _number(row["milliseconds"], 1),
                _times(row["speed"]),
                _percent(row["share_of_work"]),
            )
        )
    head = ("way of moving", "nats", "share of gap", "95 % interval", "KL", "greedy match")
    yield Block(
        "Ways of moving",
        f"Each row is one way, with its quality, its time and its work. {f'The judged handoff: {speed}.' if speed else ''}",
        head=(*head, *(f"recall of {kind}" for kind in kinds), "ms", "speed", "target's work"),
        rows=rows,
    )
    yield Block(
        bullets=[
            "Nats: mean negative log-likelihood per token; lower is better.",
            "Share of gap: 100 % is the target with its own cache, 0 % the source alone, below 0 worse than staying with the "
            "source; the interval is a bootstrap over documents.",
            "KL: distance to the predictions of the target with its own cache, in nats per token.",
            f"Greedy match: share of the target's own next {report['options']['greedy']} tokens before the first difference.",
            "Recall: share of exact answers, and mean log-probability of the answer's tokens.",
            "Ms: median for one sequence on the machine that evaluated; speed: as a multiple of a prefill's. Both leave out "
            "the source's own prefill, which happens before anything is moved.",
            "Target's work: operations as a share of a prefill by the target.",
            "The controls contain nothing of the context. A mapped cache that is no better than they are is useless.",
        ]
    )


def _lengths(report: dict[str, Any]) -> Iterable[Block]:
    if len(report["prefixes"]) < 2:
        return
    rows = []
    for prefix, found in report["prefixes"].items():
        by_way = {row["way"]: row for row in found["ways"]}
        moved = by_way["handoff"]
        rows.append(
            (
                f"{prefix} tokens",
                str(found["documents"]),
                *(_number(by_way[way]["nll"]) for way in ("native", "handoff", "source")),
                _percent(moved["share_of_gap"]),
                _interval(moved),
                _number(moved["kl"]),
                _percent(moved["greedy_match"]),
                _times(moved["speed"]),
            )
        )
    head = ("context", "documents", "native nats", "handoff nats", "source nats", "share of gap", "95 % interval", "KL")
    yield Block(
        "By length of the context",
        "The judged handoff.",
        head=(*head, "greedy match", "speed"),
        rows=rows,
        picture="evaluation-match.png",
    )


def _recall(report: dict[str, Any]) -> Iterable[Block]:
    order = ("native", "source", "transfer", "handoff", "auto", "mean", "shuffled")
    rows = []
    for prefix, found in report["prefixes"].items():
        for kind, entry in found["recall"].items():
            cells = []
            for arm in order:
                row = entry["arms"].get(arm)
                interval = "" if row is None else " to ".join(f"{end:.0%}" for end in row["interval"])
                cells.append("-" if row is None else f"{row['recall']:.0%} ({interval}), {row['log_probability']:.2f}")
            depth = entry["arms"].get("handoff", {}).get("by_depth", {})
            thirds = ", ".join(f"{name} {_percent(value)}" for name, value in depth.items() if value is not None)
            judges = "yes" if entry["judges"] else f"no: {entry['reason']}"
            rows.append((f"{prefix} tokens", kind, str(entry["count"]), judges, *cells, thirds or "-"))
    text = (
        "Likelihood can improve although no content of the context gets through. So facts that cannot be guessed are hidden "
        "in natural text, and asked for after a worked example. "
    )
    if not rows:
        yield Block("Recall", text + "No questions were asked.")
        return
    yield Block(
        "Recall",
        text
        + "Each cell: share of exact answers, its interval over contexts, mean log-probability of the answer's tokens. A kind "
        "that the target cannot answer with its own cache does not judge. Shuffled answers from another document and should "
        "only guess.",
        head=("context", "kind", "questions", "judges", *order, "handoff by depth of the fact"),
        rows=rows,
    )


def _texts(report: dict[str, Any]) -> Iterable[Block]:
    for name, found in report["texts"].items():
        left_out = f"; {found['left_out']} that the mapper was fitted on were left out" if found["left_out"] else ""
        yield Block(
            f"Other text: {name}",
            f"{found['documents']} documents of {found['text']}, a text of another kind{left_out}. Linear maps are "
            "known to fail on such text first.",
            head=("arm", "nats", "share of gap", "95 % interval", "KL", "top-1", "greedy match"),
            rows=[
                (
                    arm,
                    _number(row["nll"]),
                    _percent(row["share_of_gap"]),
                    _interval(row),
                    _number(row["kl"]),
                    _percent(row["top1"]),
                    _percent(row["greedy_match"]),
                )
                for arm, row in found["arms"].items()
            ],
        )
        if found["layers"]:
            yield Block(**_layers(found["layers"]))


def _layers(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Header and rows of a table with one row per target layer."""
    measures = ("r2", "explained", "relative_error", "cosine", "concentration")
    short = ("R2", "explained", "relative error", "cosine", "concentration")
    rows = [
        (
            str(layer["layer_index"]),
            *(_number(layer[kind].get(name), 2) for kind in KINDS for name in measures),
            _number(layer["attention_cosine"]),
        )
        for layer in layers
    ]
    return {"head": ("layer", *(f"{kind} {name}" for kind in KINDS for name in short), "attention cosine"), "rows": rows}


def _turns(report: dict[str, Any]) -> Iterable[Block]:
    if not report["turns"]:
        return
    yield Block(
        "Back and forth",
        "Source and target take turns on a text. Before each of its turns, the target gets only the new tokens. Drift is what "
        "it loses compared with the target that has read everything itself, in nats per token.",
        head=("turn", "tokens before", "mapped for it", "nats", "native nats", "source nats", "drift", "KL"),
        rows=[
            (
                str(turn["turn"]),
                str(turn["tokens_before"]),
                str(turn["mapped"]),
                *(_number(turn[name]) for name in ("nll", "native_nll", "source_nll", "drift", "kl")),
            )
            for turn in report["turns"]
        ],
    )


def _clock(report: dict[str, Any]) -> Iterable[Block]:
    times = report["milliseconds"]
    if not times:
        return

    def pays(name: str) -> str:
        length = times["breaks_even"][name]
        return "at no length that was timed" if length is None else f"from {length} tokens on"

    yield Block(
        "Time",
        "Milliseconds for one sequence on the machine that evaluated: median (95th percentile). Transfer maps the source's "
        "cache, handoff (as judged) and auto also run the exact tokens, prefill runs the target on everything. Half there "
        "means that the target already holds the first half in its cache. Transfer is faster than prefill "
        f"{pays('transfer')}, the judged handoff {pays('handoff')}; with the first half there, transfer "
        f"{pays('reused_transfer')}.",
        head=("tokens", *(SHORT[name] for name in TIMED)),
        rows=[
            (str(row["tokens"]), *(f"{row[name]['median']:.2f} ({row[name]['p95']:.2f})" for name in TIMED))
            for row in times["lengths"]
        ],
        picture="evaluation-time.png",
    )
