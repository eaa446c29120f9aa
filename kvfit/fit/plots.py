"""Pictures of a solve report, as PNG bytes. matplotlib is imported only here, without a display."""

from __future__ import annotations

import io
from typing import Any

from kvfit.spec import KINDS


def r2_map(report: dict[str, Any]) -> bytes:
    """Holdout R2 of every target layer from every single source layer, keys and values side by side; rings: what is read."""
    figure, axes = _figure(len(KINDS))
    n_source = len(report["probe"][KINDS[0]]["holdout"][0])
    chosen = {(d["kind"], d["layer_index"]): d["source_layers"] for d in report["layers"]}
    some = any(len(layers) < n_source for layers in chosen.values())
    for axis, kind in zip(axes, KINDS, strict=True):
        values = report["probe"][kind]["holdout"]
        # Worse than the mean is drawn as the mean: what it could be is without bound, and would hide the rest.
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
    """R2 per target layer: best single source layer, chosen layers on both splits, and per head."""
    figure, axes = _figure(len(KINDS))
    for axis, kind in zip(axes, KINDS, strict=True):
        layers = [detail for detail in report["layers"] if detail["kind"] == kind]
        at = [detail["layer_index"] for detail in layers]
        for detail in layers:
            heads = detail["r2_holdout_heads"]
            axis.plot([detail["layer_index"]] * len(heads), heads, ".", color="0.7", zorder=1)
        axis.plot(at, [max(report["probe"][kind]["holdout"][t]) for t in at], "o--", label="best single source layer, holdout")
        axis.plot(at, [detail["r2_fit"] for detail in layers], "s-", label="chosen layers, fit")
        axis.plot(at, [detail["r2_holdout"] for detail in layers], "o-", label="chosen layers, holdout")
        axis.set(title=kind, xlabel="target layer", ylabel="R2", ylim=(min(0.0, axis.get_ylim()[0]), 1.0))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower left", fontsize=8)
    figure.suptitle("R2 per target layer before the gain (grey: heads, holdout)")
    return _png(figure)


def sweep_curves(rows: list[dict[str, Any]]) -> bytes:
    """R2 of a sweep over the number of source layers, a line per combination of the other options; fit split dashed."""
    figure, axes = _figure(len(KINDS))
    sizes = list(dict.fromkeys(str(row["top_k"]) for row in rows))
    swept = [name for name in ("penalty", "gain", "support", "select") if len({row[name] for row in rows}) > 1]
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in swept), []).append(row)
    for axis, kind in zip(axes, KINDS, strict=True):
        for values, line in lines.items():
            at = [sizes.index(str(row["top_k"])) for row in line]
            label = ", ".join(f"{name} {value}" for name, value in zip(swept, values, strict=True)) or "holdout"
            (drawn,) = axis.plot(at, [row[f"{kind}_r2_holdout"] for row in line], "o-", label=label)
            axis.plot(at, [row[f"{kind}_r2_fit"] for row in line], "--", color=drawn.get_color(), alpha=0.5)
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set(title=kind, xlabel="source layers per target layer", ylabel="R2, mean over target layers")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.suptitle("R2 before the gain: holdout split (solid) and fit split (dashed)")
    return _png(figure)


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    # A bare Figure draws with Agg and touches no global state, unlike pyplot.
    figure = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    return figure, figure.subplots(1, columns)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # No software version or date in the file: equal reports give equal bytes.
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
