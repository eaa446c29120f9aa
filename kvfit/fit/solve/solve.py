"""The verb `solve`: a store in, a bundle out. No model runs here.

For each kind and target layer: choose source layers, choose the penalty, solve, and fold the gain into weight and bias.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvfit
from kvfit.bundle.bundle import add_files, write_bundle
from kvfit.bundle.files import require_writable
from kvfit.errors import MismatchError, SolveError
from kvfit.fit.capture.models import find_device
from kvfit.fit.capture.recipe import bundle_recipe
from kvfit.fit.plots import r2_layers, r2_map
from kvfit.fit.solve.fitter import HOLDOUT_ENOUGH, Fitted, Fitter, Sets
from kvfit.fit.solve.options import RECIPES, Options
from kvfit.fit.solve.reader import Reader, check_budget
from kvfit.fit.solve.ridge import Precision
from kvfit.fit.solve.select import Probe, probe
from kvfit.fit.solve.system import input_set
from kvfit.fit.stats.layout import SPLITS
from kvfit.fit.stats.store import Store
from kvfit.hub.card import write_card
from kvfit.spec import FORMAT_VERSION, KINDS, Kind, LayerMap, MapperSpec

__all__ = ["HOLDOUT_ENOUGH", "RECIPES", "Options", "Solved", "solve"]

MEMORY_BUDGET = 4 << 30
# NVIDIA's data-centre parts multiply float64 at half the speed of float32; every other card at a 32nd or a 64th.
FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


@dataclass(frozen=True)
class Solved:
    """What `solve` made.

    Attributes:
        bundle: its folder.
        report: the content of its `solve.json`.
        bytes_read: from the store.
    """

    bundle: Path
    report: dict[str, Any]
    bytes_read: int

    def to_json(self) -> dict[str, Any]:
        return {"bundle": str(self.bundle), "bytes_read": self.bytes_read, **self.report}

    def __str__(self) -> str:
        found = {kind: self.report["r2"][kind]["chosen"]["holdout"] for kind in KINDS}
        return f"{self.bundle}: holdout R2 {found['keys']:.3f} keys, {found['values']:.3f} values"


def solve(
    store: str | Path,
    out: str | Path,
    *,
    options: Options | None = None,
    device: torch.device | str = "cpu",
    memory_budget: int = MEMORY_BUDGET,
    precision: Precision | Literal["auto"] = "auto",
    plots: bool = False,
    progress: bool = True,
) -> Solved:
    """Solve the maps that a store's statistics allow and write them as a bundle.

    The same store, options and machine give the same bytes.

    Args:
        store: a finished store.
        out: the bundle's folder; must not exist. While it is made, the weights lie in a temporary folder beside it.
        options: see `Options`.
        device: where the linear algebra runs.
        memory_budget: bytes for the linear algebra.
        precision: ``float64``; ``mixed`` factors in float32 and refines in float64; ``auto`` is ``mixed`` on graphics cards
            that are slow at float64.
        plots: also draw the R2 map and the curves per layer into the bundle.
        progress: show bars.

    Raises:
        StoreError: the store is missing, unfinished or damaged.
        SolveError: a system has no trustworthy solution, the holdout split is empty, or the budget is too small.
        MismatchError: the options ask for what the store or the device does not allow.
        BundleError: `out` exists or cannot be written.
    """
    options, out = options or Options(), Path(out)
    check_new(out)
    reader = open_reader(store, options, device=device, memory_budget=memory_budget, precision=precision)
    fitter = Fitter(reader, options, progress=progress)
    probes = probe_kinds(reader, options, progress)
    chosen = fitter.choose(probes)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Layers that read the same set are solved together, the bundle wants them in order, and all of them may not fit in memory.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        details = list(_solve_layers(fitter, fitter.sets(chosen), Path(scratch)))
        details.sort(key=lambda detail: (detail["layer_index"], KINDS.index(detail["kind"])))
        spec = mapper_spec(reader.store, options, map(_layer_map, details))
        report = _report(reader, options, probes, details)
        weights = ((m.kind, m.layer_index, *_load(Path(scratch), m.kind, m.layer_index)) for m in spec.layers)
        recipe = bundle_recipe(reader.store.recipe, reader.store.record.cursor)
        write_bundle(out, spec, weights, recipe=recipe, solve=report)
    if plots:
        add_files(out, {"r2-map.png": r2_map(report), "r2-layers.png": r2_layers(report)})
    write_card(out)
    return Solved(out, report, reader.store.bytes_read)


def check_new(out: Path) -> None:
    """Refuse to write over anything, and a place that cannot be written.

    Raises:
        MismatchError: something is there.
        BundleError: nothing can be made there.
    """
    if out.exists():
        raise MismatchError(f"found {out} already there, needed a new folder: choose another --out or remove it")
    require_writable(out)


def open_reader(
    store: str | Path,
    options: Options,
    *,
    device: torch.device | str = "cpu",
    memory_budget: int = MEMORY_BUDGET,
    precision: Precision | Literal["auto"] = "auto",
) -> Reader:
    """A reader of a store that has what the options ask for, on a device that can do it, with a budget that allows it.

    Raises:
        StoreError, SolveError, MismatchError: as `solve`.
    """
    opened = Store.open(store)
    if opened.count("holdout") < 2:
        raise SolveError(
            f"{opened.path}: found {opened.count('holdout')} holdout tokens, needed at least 2: capture with --holdout above 0"
        )
    if options.inputs == "both" and opened.inputs != "both":
        raise MismatchError(
            f"{opened.path}: found statistics of like kinds only, needed keys by values: capture with --inputs both"
        )
    place = find_device(device)
    try:
        torch.zeros(1, dtype=torch.float64, device=place)
    except (RuntimeError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise MismatchError(f"--device {device}: found {reason!r}, needed a device that has float64: use cpu") from None
    if precision == "auto":
        slow = (
            place.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(place) not in FAST_FLOAT64
        )
        precision = "mixed" if slow else "float64"
    reader = Reader(opened, device=place, memory_budget=memory_budget, precision=precision)
    n_source = opened.source.n_layers
    options.check_layers(n_source)
    largest = n_source if isinstance(options.top_k, str) else options.top_k
    # Before anything long: what is known to be too much is refused now.
    inputs = input_set(reader.models, "keys", range(largest), options.support, options.inputs)
    check_budget(inputs, memory_budget, precision)
    return reader


def probe_kinds(reader: Reader, options: Options, progress: bool = True) -> dict[Kind, Probe]:
    """Single-source R2 of both kinds under some options."""
    arguments = {"ranking": options.ranking, "support": options.support, "inputs": options.inputs}
    return {kind: probe(reader, kind, progress=progress, **arguments) for kind in KINDS}  # type: ignore[arg-type]


def _solve_layers(fitter: Fitter, sets: Sets, scratch: Path) -> Iterator[dict[str, Any]]:
    """Put weight and bias of every layer map into the scratch folder, in the stored dtype; give what the report says of it."""
    dtype: torch.dtype = getattr(torch, fitter.options.dtype)
    for fitted in fitter.fit(sets):
        # Biases stay in float32: they are few, and key biases can be hundreds of times the spread.
        weight, bias = fitted.weight.to(dtype).cpu().contiguous(), fitted.bias.float().cpu().contiguous()
        if not (bool(torch.isfinite(weight).all()) and bool(torch.isfinite(bias).all())):
            raise SolveError(
                f"{fitted.kind} of target layer {fitted.layer_index}: found weights beyond {fitter.options.dtype}, needed "
                f"finite ones: use --dtype float32"
            )
        save_file({"weight": weight, "bias": bias}, _path(scratch, fitted.kind, fitted.layer_index))
        yield _detail(fitted)


def _path(scratch: Path, kind: Kind, layer_index: int) -> Path:
    return scratch / f"{kind}-{layer_index}.safetensors"


def _load(scratch: Path, kind: Kind, layer_index: int) -> tuple[Tensor, Tensor]:
    path = _path(scratch, kind, layer_index)
    tensors = load_file(path)
    return tensors["weight"], tensors["bias"]


def _detail(fitted: Fitted) -> dict[str, Any]:
    gain = fitted.gain
    return {
        "kind": fitted.kind,
        "layer_index": fitted.layer_index,
        "source_layers": list(fitted.source_layers),
        "penalty": fitted.penalty,
        "r2_fit": fitted.quality.fit,
        "r2_holdout": fitted.quality.holdout,
        "r2_holdout_with_gain": fitted.quality.used,
        "r2_holdout_heads": fitted.heads,
        "gain": {"min": float(gain.min()), "median": float(gain.median()), "max": float(gain.max())},
        "condition": fitted.condition,
        "damping": fitted.damping,
    }


def _layer_map(detail: dict[str, Any]) -> LayerMap:
    return LayerMap(
        kind=detail["kind"],
        layer_index=detail["layer_index"],
        source_layers=tuple(detail["source_layers"]),
        penalty=detail["penalty"],
        r2_fit=detail["r2_fit"],
        r2_holdout=detail["r2_holdout"],
    )


def mapper_spec(store: Store, options: Options, layers: Iterable[LayerMap]) -> MapperSpec:
    """The spec of a mapper that was solved from a store."""
    return MapperSpec(
        format_version=FORMAT_VERSION,
        kvfit_version=kvfit.__version__,
        source=store.source,
        target=store.target,
        keys_rotated=False,
        support=options.support,
        inputs=options.inputs,
        gain=options.gain,
        dtype=options.dtype,
        layers=tuple(layers),
    )


def _report(reader: Reader, options: Options, probes: dict[Kind, Probe], details: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of solve.json."""

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
        }

    one = probes["keys"]
    return {
        "options": dataclasses.asdict(options),
        "precision": reader.precision,
        "tokens": {split: reader.store.count(split) for split in SPLITS},
        "gain_split": "holdout" if reader.store.count("holdout") >= HOLDOUT_ENOUGH else "fit",
        "r2": {kind: summary(kind) for kind in KINDS},
        "layers": details,
        "probe": {
            "support": one.support,
            "penalty": one.penalty,
            **{
                kind: {split: probes[kind].layers[split].tolist() for split in SPLITS}
                | {f"{split}_heads": probes[kind].heads[split].tolist() for split in SPLITS}
                for kind in KINDS
            },
        },
    }
