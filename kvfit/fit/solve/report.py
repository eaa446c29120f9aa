"""The content of `solve.json`: how good each map is, before and after its gain and as it is stored. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from kvfit.fit.solve.fitter import Fitted, Fitter
from kvfit.fit.solve.select import Probe
from kvfit.fit.stats.layout import SPLITS
from kvfit.spec import KINDS, Kind, ModelSpec


def layer_report(fitted: Fitted) -> dict[str, Any]:
    """The entry of one map in solve.json."""
    gain = fitted.gain
    return {
        "kind": fitted.kind,
        "layer_index": fitted.layer_index,
        "source_layers": list(fitted.source_layers),
        "penalty": fitted.penalty,
        "r2_fit": fitted.quality.fit,
        "r2_holdout": fitted.quality.holdout,
        "r2_holdout_with_gain": fitted.quality.used,
        "r2_holdout_stored": fitted.stored,
        "r2_holdout_heads": fitted.heads,
        "gain": {"min": float(gain.min()), "median": float(gain.median()), "max": float(gain.max())},
        "condition": fitted.condition,
        "damping": fitted.damping,
    }


def solve_report(fitter: Fitter, probes: dict[Kind, Probe], details: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of solve.json, except for the choice of the map and its cost.

    Args:
        fitter: the fitter that made the maps.
        probes: the probes of single source layers.
        details: the `layer_report` of each map, in the order of the spec.
    """
    options, reader = fitter.options, fitter.reader

    def summary(kind: Kind) -> dict[str, Any]:
        of_kind = [detail for detail in details if detail["kind"] == kind]
        single = probes[kind].layers
        best = single["holdout"].argmax(1, keepdim=True)

        def mean(name: str) -> float:
            return float(sum(detail[name] for detail in of_kind) / len(of_kind))

        return {
            "single": {split: float(single[split].gather(1, best).mean()) for split in SPLITS},
            "chosen": {split: mean(f"r2_{split}") for split in SPLITS},
            "chosen_with_gain": {"holdout": mean("r2_holdout_with_gain")},
            "stored": {"holdout": mean("r2_holdout_stored")},
        }

    one = probes["keys"]
    return {
        "options": dataclasses.asdict(options),
        "precision": reader.precision,
        "tokens": {split: reader.store.count(split) for split in SPLITS},
        "gain_split": options.gain_from(reader.store),
        "r2": {kind: summary(kind) for kind in KINDS},
        "layers": details,
        "probe": {
            "support": one.support,
            "penalty": one.penalty,
            **{
                kind: {split: probes[kind].layers[split].tolist() for split in SPLITS}
                | {f"{split}_heads": _heads(probes[kind].heads[split], kind, reader.store.target) for split in SPLITS}
                for kind in KINDS
            },
        },
    }


def _heads(scores: Tensor, kind: Kind, target: ModelSpec) -> list[list[list[float]]]:
    """Scores (L_target, L_source, H_target) as lists, of as many heads as each target layer has."""
    return [layer[:, : target.shape(kind, layer_index)[0]].tolist() for layer_index, layer in enumerate(scores)]
