"""Pictures of a solve report and of an evaluation, as PNG bytes. Only this module imports matplotlib; it needs no display."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from kvfit.spec import KINDS


def r2_map(report: dict[str, Any]) -> bytes:
    """Holdout R2 of every target layer from every single source layer, per kind. Rings mark the layers that the map reads."""
    figure, axes = _figure(len(KINDS))
    n_source = len(report["probe"][KINDS[0]]["holdout"][0])
    chosen = {(d["kind"], d["layer_index"]): d["source_layers"] for d in report["layers"]}
    some = any(len(layers) < n_source for layers in chosen.values())
    for axis, kind in zip(axes, KINDS, strict=True):
        values = report["probe"][kind]["holdout"]
        # Negative values are drawn as 0, because they have no lower bound and would hide all differences between the others.
        image = axis.imshow(values, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axis.set(title=kind, xlabel="source layer", ylabel="target layer")
        axis.set_xticks(range(0, n_source, max(1, n_source // 8)))
        axis.set_yticks(range(0, len(values), max(1, len(values) // 8)))
        if some:
            ringed = [(i, t) for t in range(len(values)) for i in chosen.get((kind, t), [])]
            size = min(160.0, 40000.0 / (n_source * len(values)))
            axis.scatter(*zip(*ringed, strict=True), s=size, facecolors="none", edgecolors="tab:red", linewidths=1.0)
        if len(values) * n_source <= 64:
            for target_layer, row in enumerate(values):
                for source_layer, value in enumerate(row):
                    colour = "white" if value < 0.6 else "black"
                    axis.text(source_layer, target_layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
        figure.colorbar(image, ax=axis, label="R2 on the holdout split")
    read = "rings: source layers that the map reads" if some else "the map reads all source layers"
    figure.suptitle(f"How much of a target layer one source layer explains ({read})")
    return _png(figure)


def r2_layers(report: dict[str, Any]) -> bytes:
    """R2 per target layer, for the best single source layer, for the chosen layers on both splits, and per head."""
    figure, axes = _figure(len(KINDS))
    for axis, kind in zip(axes, KINDS, strict=True):
        layers = [detail for detail in report["layers"] if detail["kind"] == kind]
        indices = [detail["layer_index"] for detail in layers]
        for detail in layers:
            heads = detail["r2_holdout_heads"]
            axis.plot([detail["layer_index"]] * len(heads), heads, ".", color="0.7", zorder=1)
        axis.plot(
            indices,
            [max(report["probe"][kind]["holdout"][t]) for t in indices],
            "o--",
            label="best single source layer, holdout",
        )
        axis.plot(indices, [detail["r2_fit"] for detail in layers], "s-", label="chosen layers, fit")
        axis.plot(indices, [detail["r2_holdout"] for detail in layers], "o-", label="chosen layers, holdout")
        axis.set(title=kind, xlabel="target layer", ylabel="R2")
        _shares(axis)
        axis.set_xticks(indices[:: max(1, len(indices) // 8)])
        axis.grid(alpha=0.3)
    _legend(figure, axes[:1])
    figure.suptitle("How much of each target layer the map explains: R2 before the gain (grey: heads, holdout)")
    return _png(figure)


def sweep_curves(rows: list[dict[str, Any]]) -> bytes:
    """R2 of a sweep over the number of source layers, with a line per combination of the other options."""
    figure, axes = _figure(len(KINDS))
    sizes = list(dict.fromkeys(str(row["top_k"]) for row in rows))
    swept = [name for name in ("penalty", "gain", "support", "select") if len({row[name] for row in rows}) > 1]
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in swept), []).append(row)
    for axis, kind in zip(axes, KINDS, strict=True):
        for values, line in lines.items():
            places = [sizes.index(str(row["top_k"])) for row in line]
            label = ", ".join(f"{name} {value}" for name, value in zip(swept, values, strict=True)) or "holdout"
            (drawn,) = axis.plot(places, [row[f"{kind}_r2_holdout"] for row in line], "o-", label=label)
            axis.plot(places, [row[f"{kind}_r2_fit"] for row in line], "--", color=drawn.get_color(), alpha=0.5)
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set(title=kind, xlabel="source layers per target layer", ylabel="R2, mean over target layers")
        axis.grid(alpha=0.3)
    _legend(figure, axes[:1])
    figure.suptitle("Do more source layers help? R2 before the gain on the holdout split (solid) and the fit split (dashed)")
    return _png(figure)


def evaluation_pictures(report: dict[str, Any]) -> dict[str, bytes]:
    """The pictures of `evaluation.json` for which it has data, PNG files by name."""
    found = {}
    if report["layers"]:
        found["evaluation-layers.png"] = layer_curves(report["layers"])
    if len(report["prefixes"]) > 1:
        found["evaluation-match.png"] = length_curves(report["prefixes"])
    if report["milliseconds"]:
        found["evaluation-time.png"] = time_curves(report["milliseconds"]["lengths"])
    return found


def layer_curves(layers: list[dict[str, Any]]) -> bytes:
    """How close mapped keys, values and attention outputs are to the target's own, per target layer."""
    figure, axes = _figure(len(KINDS) + 1)
    indices = [layer["layer_index"] for layer in layers]
    styles = (("explained", "explained variance", "o-"), ("r2", "R2 in use", "s--"), ("cosine", "cosine", "^:"))
    for axis, kind in zip(axes, KINDS, strict=False):
        for layer in layers:
            heads = _curve(layer[kind]["heads"]["explained"])
            axis.plot([layer["layer_index"]] * len(heads), heads, ".", color="0.75", zorder=1)
        for name, label, style in styles:
            axis.plot(indices, _curve(layer[kind][name] for layer in layers), style, label=label)
        axis.set(title=kind)
    for layer in layers:
        heads = _curve(layer["attention_cosine_heads"] or [])
        axes[-1].plot([layer["layer_index"]] * len(heads), heads, ".", color="0.75", zorder=1)
    axes[-1].plot(indices, _curve(layer["attention_cosine"] for layer in layers), "o-")
    axes[-1].set(title="cosine of what attention reads")
    for axis in axes:
        _shares(axis)
        axis.set_xticks(indices[:: max(1, len(indices) // 8)])
        axis.set_xlabel("target layer")
        axis.grid(alpha=0.3)
    _legend(figure, axes[:1])
    figure.suptitle("Higher is better: mapped keys and values against the target's own, per layer (grey: heads)")
    return _png(figure)


def length_curves(prefixes: dict[str, Any]) -> bytes:
    """Greedy match and likelihood by context length."""
    drawn = (("greedy_match", "greedy match with native"), ("nll", "nats per token (lower is better)"))
    figure, axes = _figure(len(drawn))
    lengths = [int(prefix) for prefix in prefixes]
    for axis, (name, title) in zip(axes, drawn, strict=True):
        for arm, style in (("native", "o-"), ("handoff", "s-"), ("source", "^--"), ("shuffled", "x:")):
            axis.plot(lengths, _curve(found["arms"][arm][name] for found in prefixes.values()), style, label=arm)
        axis.set(title=title, xlabel="tokens of context", xscale="log")
        _length_ticks(axis, lengths)
    _legend(figure, axes[:1])
    figure.suptitle("Does the handoff stay near native as the context grows?")
    return _png(figure)


def time_curves(lengths: list[dict[str, Any]]) -> bytes:
    """Time of each way of moving by context length, and its speed relative to a prefill."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = _figure(2)
    tokens = [row["tokens"] for row in lengths]
    for name, label, style in (
        ("prefill", "prefill by the target", "^-"),
        ("transfer", "transfer (map alone)", "o-"),
        ("handoff", "handoff (as judged)", "s-"),
        ("auto", "handoff, auto", "d-"),
        ("reused_prefill", "prefill, first half there", "^:"),
        ("reused_transfer", "transfer, first half there", "o:"),
    ):
        axes[0].plot(tokens, [row[name]["median"] for row in lengths], style, label=label)
    for name, style, colour in (("transfer", "o-", "C1"), ("handoff", "s-", "C2"), ("auto", "d-", "C3")):
        speeds = [row["prefill"]["median"] / row[name]["median"] for row in lengths]
        axes[1].plot(tokens, speeds, style, color=colour)
    axes[1].axhline(1.0, color="0.4", linewidth=1)
    axes[0].set(title="milliseconds, median", xlabel="tokens moved", xscale="log", yscale="log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # write 100 instead of a power of ten
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[1].set(title="times as fast as a prefill (grey line: as fast)", xlabel="tokens moved", xscale="log")
    for axis in axes:
        _length_ticks(axis, tokens)
    axes[1].set_ylim(bottom=0)
    _legend(figure, axes[:1])
    figure.suptitle("From which length on does moving pay? Where a curve on the right is above the line")
    return _png(figure)


def _shares(axis: Any) -> None:
    """Limits for R2 and cosines: from the lowest value, but not below -0.5, to 1."""
    bottom = max(axis.get_ylim()[0], -0.5)
    axis.set_ylim(bottom, 1 + 0.03 * (1 - bottom))


def _curve(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _length_ticks(axis: Any, lengths: list[int]) -> None:
    """Ticks with plain numbers at the lengths, without those that would overlap the next."""
    shown = [length for i, length in enumerate(lengths) if i == len(lengths) - 1 or lengths[i + 1] > 1.25 * length]
    axis.set_xticks(shown, [str(length) for length in shown])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3, which="both")


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes[0].get_legend_handles_labels()
    n_lines = -(-len(labels) // 5)
    columns = -(-len(labels) // n_lines)  # balances the lines
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    # Unlike pyplot, a plain Figure draws with Agg and changes no global state.
    figure = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    return figure, figure.subplots(1, columns)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without version and date in the file, equal reports give equal bytes.
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
