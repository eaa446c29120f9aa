"""The verb `solve`: read a store and write a bundle, without running a model.

For each kind and target layer it chooses source layers and the penalty, solves, and folds the gain into weight and bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save

import kvfit
from kvfit.bundle.bundle import add_files, write_bundle
from kvfit.bundle.files import require_writable, scratch_folder
from kvfit.cost import map_cost, prefill_of
from kvfit.errors import MismatchError, SolveError
from kvfit.fit.capture.models import find_device
from kvfit.fit.capture.recipe import bundle_recipe
from kvfit.fit.plots import r2_layers, r2_map
from kvfit.fit.progress import track
from kvfit.fit.solve.choice import Choice, choose
from kvfit.fit.solve.fitter import Fitter
from kvfit.fit.solve.options import HOLDOUT_ENOUGH, RECIPES, Options
from kvfit.fit.solve.reader import Reader, check_budget, least_bytes
from kvfit.fit.solve.report import layer_report, solve_report
from kvfit.fit.solve.ridge import Precision
from kvfit.fit.solve.select import Probe, probe
from kvfit.fit.stats.budget import free_memory
from kvfit.fit.stats.store import Store
from kvfit.hub.card import write_card
from kvfit.spec import FORMAT_VERSION, KINDS, Kind, LayerMap, MapperSpec

__all__ = ["HOLDOUT_ENOUGH", "RECIPES", "Options", "Solved", "solve"]

MEMORY_BUDGET = 4 << 30  # for a memory budget of ``auto``; more only where one system needs more
# NVIDIA's data-centre parts multiply float64 at half the speed of float32; every other card at a 32nd or a 64th.
FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


@dataclass(frozen=True)
class Solved:
    """The result of `solve`.

    Attributes:
        bundle: the bundle's folder.
        report: the content of its `solve.json`.
        bytes_read: the bytes that were read from the store.
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
    memory_budget: int | Literal["auto"] = "auto",
    precision: Precision | Literal["auto"] = "auto",
    plots: bool = False,
    progress: bool = True,
) -> Solved:
    """Solve the maps from a store's statistics and write them as a bundle.

    The same store, options and machine give the same bytes.

    Args:
        store: a finished store.
        out: the bundle's folder, which must not exist. Until it is complete, the weights are in a temporary folder beside it.
        options: see `Options`.
        device: where the linear algebra runs.
        memory_budget: bytes for the linear algebra; ``auto`` for 4 GiB, or for as much as one system needs if that is more.
        precision: ``float64``; ``mixed`` factors in float32 and refines in float64; ``auto`` is ``mixed`` on graphics cards
            that are slow at float64.
        plots: also draw the R2 map and the curves per layer into the bundle.
        progress: whether to show bars.

    Raises:
        StoreError: the store is missing, unfinished or damaged.
        SolveError: a system has no trustworthy solution, the holdout split is empty, or the budget is too small.
        MismatchError: the store or the device does not allow what the options ask for.
        BundleError: `out` exists or cannot be written.
    """
    out = Path(out)
    check_new(out)
    reader = open_reader(store, options or Options(), device=device, memory_budget=memory_budget, precision=precision)
    options = (options or Options()).for_store(reader.store)
    fitter = Fitter(reader, options, progress=progress)
    probes = probe_kinds(reader, options, progress)
    prefill = prefill_of(reader.store.target, reader.store.recipe)
    choice = choose(fitter, probes, prefill)
    with scratch_folder(out) as scratch:
        # The bundle needs the maps in order, but they are solved in the order of their inputs, and may not all fit in memory.
        details = sorted(
            _solve_layers(fitter, choice, scratch), key=lambda detail: (detail["layer_index"], KINDS.index(detail["kind"]))
        )
        spec = mapper_spec(reader.store, options, map(_layer_map, details), choice.rank)
        cost = map_cost(spec, prefill)
        report = solve_report(fitter, probes, details) | {"choice": choice.report, "cost": cost.to_json()}
        tensors = ((m, load_file(_path(scratch, m.kind, m.layer_index))) for m in spec.layers)
        weights = ((m.kind, m.layer_index, found["weight"], found["bias"]) for m, found in tensors)
        recipe = bundle_recipe(reader.store.recipe, reader.store.record.cursor)
        basis = None if choice.basis is None else choice.basis.weight.to(getattr(torch, spec.dtype)).cpu()
        write_bundle(out, spec, weights, recipe=recipe, solve=report, basis=basis)
    if plots:
        add_files(out, {"r2-map.png": r2_map(report), "r2-layers.png": r2_layers(report)})
    write_card(out)
    return Solved(out, report, reader.store.bytes_read)


def check_new(out: Path) -> None:
    """Refuse a place that exists or cannot be written to.

    Raises:
        MismatchError: the place exists.
        BundleError: nothing can be written there.
    """
    if out.exists():
        raise MismatchError(f"found {out} already there, needed a new folder: choose another --out or remove it")
    require_writable(out)


def open_reader(
    store: str | Path,
    options: Options,
    *,
    device: torch.device | str = "cpu",
    memory_budget: int | Literal["auto"] = "auto",
    precision: Precision | Literal["auto"] = "auto",
) -> Reader:
    """Open a reader, after checking that store, device and memory budget allow what the options ask for.

    Raises:
        StoreError, SolveError, MismatchError: as in `solve`.
    """
    opened = Store.open(store)
    if opened.count("holdout") < 2:
        raise SolveError(
            f"{opened.path}: found {opened.count('holdout')} holdout tokens, needed at least 2: capture with --holdout above 0"
        )
    options = options.for_store(opened)
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
    reader = Reader(opened, device=place, precision=precision)
    n_source = opened.source.n_layers
    largest = n_source if isinstance(options.top_k, str) else options.top_k
    # Refuse before the long work starts what is already known not to fit.
    inputs = Fitter(reader, options).reads("keys", tuple(range(largest)))
    basis = options.rank != "none"
    if memory_budget == "auto":
        check_budget(inputs, max(MEMORY_BUDGET, free_memory(place)), precision, basis=basis)
        reader.memory_budget = max(MEMORY_BUDGET, least_bytes(inputs, precision, basis=basis))
    else:
        check_budget(inputs, memory_budget, precision, basis=basis)
        reader.memory_budget = memory_budget
    return reader


def probe_kinds(reader: Reader, options: Options, progress: bool = True) -> dict[Kind, Probe]:
    """Measure the single-source R2 of both kinds under some options."""
    arguments = {"ranking": options.ranking, "support": options.support, "inputs": options.inputs}
    return {kind: probe(reader, kind, progress=progress, **arguments) for kind in KINDS}  # type: ignore[arg-type]


def _solve_layers(fitter: Fitter, choice: Choice, scratch: Path) -> Iterator[dict[str, Any]]:
    """Write weight and bias of every map to the scratch folder, and yield its entry of the report."""
    targets = len(fitter.targets)
    for fitted in track(choice.fit(fitter), "solve", "maps", total=targets, show=fitter.progress):
        # Biases stay in float32: they are few, and biases of keys can be hundreds of times the spread.
        weight, bias = fitted.weight.cpu().contiguous(), fitted.bias.cpu().contiguous()
        if not (bool(torch.isfinite(weight).all()) and bool(torch.isfinite(bias).all())):
            raise SolveError(
                f"{fitted.kind} of target layer {fitted.layer_index}: found weights beyond {fitter.options.dtype}, needed "
                f"finite ones: use --dtype float32"
            )
        # Not by the library's own writer, which reports a full disk as an error of its own kind.
        _path(scratch, fitted.kind, fitted.layer_index).write_bytes(save({"weight": weight, "bias": bias}))
        yield layer_report(fitted)


def _path(scratch: Path, kind: Kind, layer_index: int) -> Path:
    return scratch / f"{kind}-{layer_index}.safetensors"


def _layer_map(detail: dict[str, Any]) -> LayerMap:
    return LayerMap(
        kind=detail["kind"],
        layer_index=detail["layer_index"],
        source_layers=tuple(detail["source_layers"]),
        penalty=detail["penalty"],
        r2_fit=detail["r2_fit"],
        r2_holdout=detail["r2_holdout"],
    )


def mapper_spec(store: Store, options: Options, layers: Iterable[LayerMap], rank: int | None = None) -> MapperSpec:
    """Make the spec of a mapper that was solved from a store.

    Args:
        store: the store.
        options: the options, from `Options.for_store`.
        layers: the maps of the layers, in the order of the spec.
        rank: the rank of the shared basis; None where there is no basis.
    """
    assert options.inputs != "auto", "options are those for the store"
    assert options.dtype != "auto", "options are those for the store"
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
        lexical_lags=options.lags(store.lexical_lags),
        rank=rank,
    )
