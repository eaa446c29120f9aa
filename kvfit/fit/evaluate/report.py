"""`evaluation.md`: what `evaluate` found, for a reader who has not seen the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvfit.spec import KINDS, MapperSpec

ARM_NAMES = {
    "native": "target, its own cache (full prefill)",
    "transfer": "target, mapped cache",
    "handoff": "**target, mapped cache, handed over as in use**",
    "source": "source alone",
    "no_context": "target without the context",
    "mean": "control: mean keys and values, no content",
    "shuffled": "control: another document's mapped cache",
    "raw": "control: the source's cache unmapped",
}


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.0%}".replace("-0%", "0%")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def written(report: dict[str, Any], spec: MapperSpec) -> str:
    """The report as Markdown.

    Args:
        report: the content of `evaluation.json`.
        spec: of the bundle.
    """
    tokens, options = report["tokens"], report["options"]
    lines = [
        f"# Evaluation: {spec.source.ref} to {spec.target.ref}",
        "",
        f"**Verdict: {report['verdict']}.** "
        + ("" if report["reasons"] else "Nothing that was measured speaks against moving conversations with this mapper."),
        "",
        *(f"- {reason}" for reason in report["reasons"]),
        "",
        f"The source ({spec.source.ref}) has read a text; its cache is mapped, and the target ({spec.target.ref}) "
        f"continues from it. Measured on {tokens['documents']} documents of {report['text']}: {tokens['prefix']} tokens of "
        f"context, {tokens['continuation']} tokens scored. {_overlap(report)}",
        "",
        "## Likelihood",
        "",
        *_arms(report["arms"]),
        "*nats* is the mean negative log-likelihood per token: lower is better. *Share of gap* is 100 % for the "
        "target with its own cache, 0 % for the source alone, and below 0 where staying with the source is better; "
        "its interval is the 95 % bootstrap interval over documents. *KL* is the distance to what the target with "
        "its own cache would say, in nats per token: mean, 95th percentile, and mean over the first 16 tokens. "
        "*Top-1* is how often both find the same token likeliest. *Greedy match* is how much of the target's own "
        f"next {options['greedy']} tokens comes out alike before the first difference. The controls hold none of the "
        "context: a mapped cache that is no better than they are carries nothing.",
        "",
        *_prefixes(report),
        *_recall(report),
        *_texts(report),
        *_layers(report),
        *_turns(report),
        *_times(report),
        "## What was judged",
        "",
        f"The arm that is judged is the handover as in use: exact first tokens {options['exact_head']}, exact last tokens "
        f"{options['exact_tail']}, share recomputed {options['recompute']:g}. Thresholds:",
        "",
        *_table(("threshold", "value"), ((name, f"{value:g}") for name, value in options["thresholds"].items())),
        f"The verdict holds for the weights `{report['weights_digest']}` only.",
        "",
    ]
    return "\n".join(lines)


def _overlap(report: dict[str, Any]) -> str:
    """Whether the mapper was fitted on what it was measured on: claimed only where it was looked up."""
    if not report["overlap"]["checked"]:
        return "Whether the mapper was fitted on some of them is not known: its bundle keeps no record of the documents."
    left_out = report["overlap"]["left_out"]
    return "Neither fit nor selection saw any of them" + (f"; {left_out} that they did see were left out." if left_out else ".")


def _arms(table: dict[str, Any]) -> list[str]:
    head = ("", "nats", "share of gap", "95 % interval", "KL", "KL p95", "KL first 16", "top-1", "greedy match")
    return _table(
        head,
        (
            (
                ARM_NAMES[arm],
                _number(row["nll"]),
                _percent(row["share_of_gap"]),
                " to ".join(_percent(end) for end in row["interval"]),
                _number(row["kl"]),
                _number(row["kl_p95"]),
                _number(row["kl_first"]),
                _percent(row["top1"]),
                _percent(row["greedy_match"]),
            )
            for arm, row in ((arm, table[arm]) for arm in ARM_NAMES if arm in table)
        ),
    )


def _prefixes(report: dict[str, Any]) -> list[str]:
    if len(report["prefixes"]) < 2:
        return []
    head = (
        "context",
        "documents",
        "native nats",
        "handover nats",
        "source nats",
        "share of gap",
        "95 % interval",
        "KL",
        "greedy match",
    )
    rows = []
    for prefix, found in report["prefixes"].items():
        table, moved = found["arms"], found["arms"]["handoff"]
        nats = [_number(table[arm]["nll"]) for arm in ("native", "handoff", "source")]
        interval = " to ".join(_percent(end) for end in moved["interval"])
        shares = [_percent(moved["share_of_gap"]), interval, _number(moved["kl"]), _percent(moved["greedy_match"])]
        rows.append((f"{prefix} tokens", str(found["documents"]), *nats, *shares))
    return ["### By length of the context", "", *_table(head, rows), "![greedy match](evaluation-match.png)", ""]


def _recall(report: dict[str, Any]) -> list[str]:
    lines = [
        "## Recall",
        "",
        "Likelihood can improve while nothing of the context arrives. So facts are hidden in natural text that "
        "nobody could guess (random codes, words, lookups over two sentences), and the answer has to come out "
        "exactly. A kind that the target does not answer with its own cache judges nothing. Each cell: share of exact answers, "
        "its interval over contexts, mean log-probability of the answer's tokens.",
        "",
    ]
    arms = ("native", "source", "transfer", "handoff", "mean", "shuffled")
    head = ("context", "probe", "questions", *(arm.replace("_", " ") for arm in arms), "handover by depth of the fact")
    rows = []
    for prefix, found in report["prefixes"].items():
        for kind, entry in found["recall"].items():
            cells = []
            for arm in arms:
                row = entry["arms"].get(arm)
                cells.append(
                    "-"
                    if row is None
                    else f"{row['recall']:.0%} ({row['interval'][0]:.0%} to {row['interval'][1]:.0%}), "
                    f"{row['log_probability']:.2f}"
                )
            depth = entry["arms"].get("handoff", {}).get("by_depth", {})
            by_depth = ", ".join(f"{name} {_percent(value)}" for name, value in depth.items() if value is not None)
            rows.append((f"{prefix} tokens", kind, str(entry["count"]), *cells, by_depth or entry["reason"] or "-"))
    if not rows:
        return [*lines, "No probes were asked.", ""]
    return [
        *lines,
        *_table(head, rows),
        "Intervals are over contexts. *shuffled* answers from another document and should be at chance.",
        "",
    ]


def _texts(report: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, found in report["texts"].items():
        lines += [
            f"## Other text: {name}",
            "",
            f"{found['documents']} documents of {found['text']}, a text of another kind"
            + (f"; {found['left_out']} that the mapper was fitted on were left out" if found["left_out"] else "")
            + ". Linear maps are known to fail there first.",
            "",
            *_arms(found["arms"]),
            *_layer_table(found["layers"]),
        ]
    return lines


def _layers(report: dict[str, Any]) -> list[str]:
    if not report["layers"]:
        return []
    return [
        "## Layers",
        "",
        "How near mapped keys and values are to the target's own, per target layer. *R2* is of the map as it is "
        "used; *explained* is what is left of it when every output may be rescaled. *Concentration* above 1 says "
        "that errors lie where attention reads. *Attention cosine* compares what the target's own queries read from "
        "mapped and from own keys and values. Numbers per head are in `evaluation.json`.",
        "",
        *_layer_table(report["layers"]),
        "![layers](evaluation-layers.png)",
        "",
    ]


def _layer_table(layers: list[dict[str, Any]]) -> list[str]:
    if not layers:
        return []
    measures = ("r2", "explained", "relative_error", "cosine", "concentration")
    short = ("R2", "explained", "relative error", "cosine", "concentration")
    head = ("layer", *(f"{kind} {name}" for kind in KINDS for name in short), "attention cosine")
    rows = (
        (
            str(layer["layer_index"]),
            *(_number(layer[kind].get(name), 2) for kind in KINDS for name in measures),
            _number(layer["attention_cosine"]),
        )
        for layer in layers
    )
    return _table(head, rows)


def _turns(report: dict[str, Any]) -> list[str]:
    if not report["turns"]:
        return []
    head = ("turn", "tokens before", "mapped for it", "nats", "native nats", "source nats", "drift", "KL")
    rows = (
        (
            str(turn["turn"]),
            str(turn["tokens_before"]),
            str(turn["mapped"]),
            *(_number(turn[name]) for name in ("nll", "native_nll", "source_nll", "drift", "kl")),
        )
        for turn in report["turns"]
    )
    text = (
        "Source and target take turns over a text. Before each of its turns the target takes over only what is new. *Drift* is "
    )
    text += "what it loses against the target that has read everything itself, in nats per token."
    return ["## Back and forth", "", text, "", *_table(head, rows)]


def _times(report: dict[str, Any]) -> list[str]:
    times = report["milliseconds"]
    if not times:
        return []
    names = ("transfer", "handoff", "prefill", "reused_transfer", "reused_prefill")
    head = ("tokens", "transfer", "handover", "prefill", "transfer, half there", "prefill, half there")
    rows = (
        (str(row["tokens"]), *(f"{row[name]['median']:.2f} ({row[name]['p95']:.2f})" for name in names))
        for row in times["lengths"]
    )

    def said(length: int | None) -> str:
        return "not at any length that was measured" if length is None else f"from {length} tokens on"

    return [
        "## Time",
        "",
        "Milliseconds for one sequence on the machine that evaluated: median (95th percentile). *Transfer* maps the "
        "source's cache, *handover* also runs the exact tokens, *prefill* is the target reading everything. *Half "
        "there* is the same where the target already holds the first half in its cache.",
        "",
        *_table(head, rows),
        f"Transfer is faster than prefill {said(times['crossover'])}; with the first half there, "
        f"{said(times['crossover_reused'])}.",
        "",
        "![time](evaluation-time.png)",
        "",
    ]
