"""Pictures of an evaluation: curves per layer, by length of the context, and of time."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from kvfit.spec import KINDS


def pictures(report: dict[str, Any]) -> dict[str, bytes]:
    """PNG files by name; only those that there is something to draw for."""
    found = {}
    if report["layers"]:
        found["evaluation-layers.png"] = _layer_curves(report["layers"])
    if len(report["prefixes"]) > 1:
        found["evaluation-match.png"] = _match_curves(report["prefixes"])
    if report["milliseconds"]:
        found["evaluation-time.png"] = _time_curves(report["milliseconds"]["lengths"])
    return found


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    # A bare Figure draws with Agg and touches no global state, unlike pyplot.
    figure = Figure(figsize=(5.2 * columns, 4.0), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _curve(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _layer_curves(layers: list[dict[str, Any]]) -> bytes:
    figure, axes = _figure(3)
    at = [layer["layer_index"] for layer in layers]
    for axis, kind in zip(axes, KINDS, strict=False):
        for layer in layers:
            heads = _curve(layer[kind]["heads"]["explained"])
            axis.plot([layer["layer_index"]] * len(heads), heads, ".", color="0.75", zorder=1)
        for name, label, style in (
            ("explained", "explained variance", "o-"),
            ("r2", "R2 in use", "s--"),
            ("cosine", "cosine", "^:"),
        ):
            axis.plot(at, _curve(layer[kind][name] for layer in layers), style, label=label)
        axis.set(title=kind, xlabel="target layer", ylim=(-0.5, 1.02))
        axis.legend(loc="lower left", fontsize=8)
    for layer in layers:
        heads = _curve(layer["attention_cosine_heads"] or [])
        axes[2].plot([layer["layer_index"]] * len(heads), heads, ".", color="0.75", zorder=1)
    axes[2].plot(at, _curve(layer["attention_cosine"] for layer in layers), "o-")
    axes[2].set(title="attention output: cosine", xlabel="target layer", ylim=(-0.05, 1.02))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle("Mapped against the target's own, per layer (grey: heads)")
    return _png(figure)


def _match_curves(prefixes: dict[str, Any]) -> bytes:
    figure, axes = _figure(2)
    at = [int(prefix) for prefix in prefixes]
    for axis, name, title in ((axes[0], "greedy_match", "greedy match"), (axes[1], "nll", "nats per token")):
        for arm, style in (("native", "o-"), ("handoff", "s-"), ("source", "^--"), ("shuffled", "x:")):
            axis.plot(at, _curve(found["arms"][arm][name] for found in prefixes.values()), style, label=arm)
        axis.set(title=title, xlabel="tokens of context", xscale="log")
        axis.set_xticks(at, [str(length) for length in at])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle("By length of the context")
    return _png(figure)


def _time_curves(lengths: list[dict[str, Any]]) -> bytes:
    figure, axes = _figure(1)
    at = [row["tokens"] for row in lengths]
    for name, label, style in (
        ("transfer", "transfer", "o-"),
        ("handoff", "handover", "s-"),
        ("prefill", "prefill by the target", "^-"),
        ("reused_transfer", "transfer, half there", "o:"),
        ("reused_prefill", "prefill, half there", "^:"),
    ):
        axes[0].plot(at, [row[name]["median"] for row in lengths], style, label=label)
    axes[0].set(xlabel="tokens", ylabel="milliseconds (median)", xscale="log", yscale="log")
    axes[0].set_xticks(at, [str(length) for length in at])
    axes[0].set_xticks([], minor=True)
    axes[0].grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    figure.suptitle("Time for one sequence")
    return _png(figure)
