"""Quality, speed and cost for cards and registry entries: one row per way of moving, read from ``evaluation.json``.

Evaluations of kvfit 0.1 have no list ``ways``; their rows are made from ``arms`` and ``milliseconds``. The records have no
schema, so every value is checked before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvfit.bundle.records import value_at
from kvfit.runtime import EXACT_HEAD

_MEANINGS = {
    "native": "the target prefills the whole prefix itself: the ceiling",
    "transfer": "mapped cache alone",
    "handoff": "mapped cache with {handoff}, as in production: the verdict is about this row",
    "source": "the source continues by itself: moving has to be better than this",
    "raw": "control: the source's cache, unmapped",
    "mean": "control: the mean cache, no context",
    "shuffled": "control: another document's mapped cache",
    "no_context": "the target without the prefix",
}
_SCORES = {"nll": "NLL", "kl": "KL to native", "kl_p95": "KL, 95th percentile", "top1": "top-1 agreement", "recall": "recall"}
# Names of the timings in evaluations without `ways`.
_TIMED = {"native": "prefill", "transfer": "transfer", "handoff": "handoff"}


def ways(evaluation: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Quality, time and share of the target's work for each way of moving, the known ways first.

    Args:
        evaluation: evaluation of the weights; None gives no rows.
    """
    rows = {}
    listed, arms = value_at(evaluation, "ways"), value_at(evaluation, "arms")
    if isinstance(listed, list):
        rows = {row["way"]: row for row in listed if isinstance(row, dict) and isinstance(row.get("way"), str)}
    elif isinstance(arms, Mapping):
        times = value_at(evaluation, "milliseconds")
        rows = {name: row | _timing(name, times) for name, row in arms.items() if isinstance(row, dict)}
    known = [way for way in _MEANINGS if way in rows]
    return {way: rows[way] for way in known + sorted(set(rows) - set(known))}


def quality_table(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Header and rows of the quality table: quality, time and share of the target's work for each way of moving."""
    rows = ways(evaluation)
    meanings = _MEANINGS | {"handoff": _MEANINGS["handoff"].format(handoff=f"`{judged_arguments(evaluation)}`")}
    columns: list[tuple[str, list[Any]]] = [("way", [f"`{way}`" for way in rows])]
    columns += [(label, [row.get(name) for row in rows.values()]) for name, label in _SCORES.items()]
    columns += [
        ("share of gap", [_share(row) for row in rows.values()]),
        ("time", [_with_unit(row.get("milliseconds"), " ms") for row in rows.values()]),
        ("times as fast as a prefill", [_with_unit(row.get("speed"), "") for row in rows.values()]),
        ("share of the target's work", [_percent(row.get("share_of_work")) for row in rows.values()]),
        ("pays from", [_with_unit(row.get("breaks_even"), " tokens") for row in rows.values()]),
        ("what it is", [meanings.get(way, row.get("label")) for way, row in rows.items()]),
    ]
    shown = [(label, values) for label, values in columns if any(value is not None for value in values)]
    return {"header": [label for label, _ in shown], "rows": list(zip(*(values for _, values in shown), strict=True))}


def judged_arguments(evaluation: Mapping[str, Any] | None) -> str:
    """The arguments of `handoff` in the evaluation. The verdict says little about other arguments."""
    options = value_at(evaluation, "options")
    # Evaluations of kvfit 0.1 need not say it; they were measured with one. What was not evaluated is used with the default.
    unsaid = EXACT_HEAD if evaluation is None else 1
    found = {name: value for name, value in options.items() if _is_number(value)} if isinstance(options, Mapping) else {}
    arguments = [f"exact_head={found.get('exact_head', unsaid)}"]
    if found.get("exact_tail"):
        arguments.append(f"exact_tail={found['exact_tail']}")
    if found.get("recompute"):
        arguments.append(f"recompute={found['recompute']}, guide=source_model")
    return ", ".join(arguments)


def verdict_reasons(evaluation: Mapping[str, Any] | None) -> list[Any]:
    """The reasons of the verdict."""
    reasons = value_at(evaluation, "reasons")
    return reasons if isinstance(reasons, list) else []


def where_measured(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The evaluation's text, how much of it was read, and whether the mapper was fitted on some of it."""
    tokens = value_at(evaluation, "tokens")
    if not isinstance(tokens, Mapping):
        return None
    counts = ", ".join(f"{tokens[name]} {name}" for name in sorted(tokens))
    return {"name": value_at(evaluation, "text"), "counts": counts, "overlap": _overlap(evaluation)}


def cost_text(cost: Any) -> str | None:
    """The map's cost per token and its share of the target's prefill; None if ``solve.json`` does not have it."""
    parts = []
    for name, unit in (("flops", "MFLOP"), ("bytes", "MB")):
        found, prefill = value_at(cost, f"{name}_per_token"), value_at(cost, f"prefill_{name}_per_token")
        if _is_number(found) and _is_number(prefill) and prefill > 0:
            parts.append(f"{found / 1e6:.3g} {unit} ({100 * found / prefill:.2g} %)")
    if not parts:
        return None
    about = ", estimated" if value_at(cost, "estimated") is True else ""
    return f"{' and '.join(parts)} of the target's prefill per token{about}"


def _timing(way: str, times: Any) -> dict[str, Any]:
    found, prefill = value_at(times, _TIMED.get(way, "")), value_at(times, "prefill")
    if not (_is_number(found) and _is_number(prefill) and found > 0):
        return {}
    return {"milliseconds": found, "speed": prefill / found}


def _overlap(evaluation: Mapping[str, Any] | None) -> str:
    """A sentence on whether the mapper was fitted on the evaluation's text. It makes a claim only if that was checked."""
    if value_at(evaluation, "overlap", "checked") is not True:
        return "It is not known whether the mapper was fitted on some of it, because the documents were not recorded."
    left_out = value_at(evaluation, "overlap", "left_out")
    more = f"; {left_out} documents that they did see were left out" if type(left_out) is int and left_out else ""
    return f"Neither fit nor selection saw any of these documents{more}."


def _share(row: Mapping[str, Any]) -> str | None:
    share, interval = row.get("share_of_gap"), row.get("interval")
    if not _is_number(share):
        return None
    if isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval)):
        return f"{share:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{share:.3f}"


def _with_unit(value: Any, unit: str) -> str | None:
    return f"{value:.3g}{unit}" if _is_number(value) else None


def _percent(value: Any) -> str | None:
    return f"{100 * value:.3g} %" if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
