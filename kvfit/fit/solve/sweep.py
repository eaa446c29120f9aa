"""The verb `solve --sweep`: measure every combination of options into one table, without running a model.

R2 does not rank maps by what the target does with them (docs/concepts/r2-and-likelihood.md). So use the table to narrow the
choice down, and `kvfit evaluate` to make it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.bundle.files import whole_folder, write_file
from kvfit.errors import OptionError
from kvfit.fit.plots import sweep_curves
from kvfit.fit.progress import track
from kvfit.fit.solve.fitter import Fitter, Quality, Sets
from kvfit.fit.solve.options import Options
from kvfit.fit.solve.ridge import Precision
from kvfit.fit.solve.select import Probe
from kvfit.fit.solve.solve import check_new, mapper_spec, open_reader, probe_kinds
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS, Kind, LayerMap, MapperSpec, ModelSpec, Support

Grid = dict[str, list[Any]]

# The options that can be swept, and the words among their values.
CHOICES = {
    "top_k": ("all", "auto"),
    "penalty": ("auto",),
    "gain": ("variance", "head", "none"),
    "support": ("full", "head"),
    "select": ("independent", "greedy"),
}
NUMBERS: dict[str, type[int] | type[float]] = {"top_k": int, "penalty": float}
# A map is timed on a cache of so many tokens, as the median of so many runs, with so many bytes of different weights: more than
# a processor caches, but less than a large map has.
TIMED_TOKENS, TIMED_RUNS, TIMED_BYTES = 512, 5, 512 << 20


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep: a row per combination of options."""

    folder: Path
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "rows": self.rows}

    def __str__(self) -> str:
        best = max(self.rows, key=lambda row: sum(row[f"{kind}_r2_used"] for kind in KINDS))
        asked = " ".join(f"{name}={best[name]}" for name in CHOICES)
        found = ", ".join(f"{best[f'{kind}_r2_used']:.3f} {kind}" for kind in KINDS)
        return f"{self.folder}: {len(self.rows)} maps; highest holdout R2 as used {found} with {asked}"


def parse_grid(items: Sequence[str]) -> Grid:
    """Parse a grid such as ``["top_k=1,2,all", "penalty=1e-3,1e-2"]`` into names and values.

    Raises:
        OptionError: a name is unknown or there twice, or the option does not take a value.
    """
    grid: Grid = {}
    for item in items:
        name, _, values = item.partition("=")
        if name not in CHOICES or name in grid:
            raise OptionError(
                f"--sweep: found {item!r}, needed NAME=VALUE,VALUE with NAME one of {', '.join(CHOICES)}, each once"
            )
        grid[name] = [_value(name, value) for value in values.split(",")]
        if len(set(grid[name])) < len(grid[name]):
            raise OptionError(f"--sweep: found {item!r} with one value twice, needed each once")
    return grid


def _value(name: str, text: str) -> Any:
    if text in CHOICES[name]:
        return text
    try:
        value: Any = NUMBERS[name](text)
        asked: dict[str, Any] = {name: value}
        Options(**asked)
    except (KeyError, ValueError):
        needed = ", ".join([*(["a number"] if name in NUMBERS else []), *CHOICES[name]])
        raise OptionError(f"--sweep {name}: found {text!r}, needed {needed}") from None
    return value


def sweep(
    store: str | Path,
    out: str | Path,
    grid: Grid,
    *,
    options: Options | None = None,
    device: torch.device | str = "cpu",
    memory_budget: int | Literal["auto"] = "auto",
    precision: Precision | Literal["auto"] = "auto",
    progress: bool = True,
) -> Sweep:
    """Measure every combination of a grid and write ``sweep.csv`` and ``sweep.png``.

    Args:
        store: a finished store.
        out: the folder to write, which must not exist.
        grid: from `parse_grid`; every option that it does not name is taken from `options`.
        options: see `Options`.
        device, memory_budget, precision: as in `solve`.
        progress: whether to show bars.

    Raises:
        OptionError: `options` ask for a rank.
        StoreError, SolveError, MismatchError: as in `solve`.
        BundleError: `out` cannot be written.
    """
    options, out = options or Options(), Path(out)
    if isinstance(options.rank, int):
        raise OptionError(
            f"--rank: found {options.rank} with --sweep, which makes separate maps per layer, needed none: leave --rank out, "
            "or solve without --sweep, whose solve.json has the error of every smaller rank"
        )
    check_new(out)
    # A sweep compares separate maps. For a shared basis, solve.json already has the error of every rank.
    options = dataclasses.replace(options, rank="none", cost=None)
    combinations = [dataclasses.replace(options, **dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
    largest = max(combinations, key=lambda asked: asked.top_k if isinstance(asked.top_k, int) else math.inf)
    full = [asked for asked in combinations if asked.support == "full"]
    wanted = dataclasses.replace(largest, support="full" if full else "head")
    reader = open_reader(store, wanted, device=device, memory_budget=memory_budget, precision=precision)
    combinations = [asked.for_store(reader.store) for asked in combinations]
    shared: dict[Options, dict[Any, Quality]] = {}
    probes: dict[Support, dict[Kind, Probe]] = {}
    times: dict[tuple[Any, ...], float] = {}
    rows = []
    for asked in track(combinations, "sweep", "maps", show=progress):
        # Combinations that differ only in layers and penalties share their measurements.
        known = shared.setdefault(dataclasses.replace(asked, top_k="all", penalty="auto", select="independent"), {})
        fitter = Fitter(reader, asked, progress=False, known=known)
        if asked.support not in probes:
            probes[asked.support] = probe_kinds(reader, asked, progress)
        others = {p for one in combinations if dataclasses.replace(one, penalty=asked.penalty) == asked for p in one.penalties}
        rows.append(_row(fitter, fitter.sets(fitter.choose(probes[asked.support])), sorted(others), times))
    with whole_folder(out) as folder:
        write_file(folder / "sweep.csv", _csv(rows))
        write_file(folder / "sweep.png", sweep_curves(rows))
    return Sweep(out, rows)


def _row(fitter: Fitter, sets: Sets, penalties: list[float], times: dict[tuple[Any, ...], float]) -> dict[str, Any]:
    options, reader = fitter.options, fitter.reader
    row: dict[str, Any] = {name: getattr(options, name) for name in CHOICES}
    found = fitter.qualities(sets, penalties)
    for kind in KINDS:
        of_kind = {target: quality for target, (_, quality) in found.items() if target[0] == kind}
        for name in Quality._fields:
            row[f"{kind}_r2_{name}"] = statistics.fmean(getattr(quality, name) for quality in of_kind.values())
        row[f"{kind}_layers"] = statistics.fmean(len(sets[target].source_layers) for target in of_kind)
    layers = [LayerMap(*t, sets[t].source_layers, penalty, q.fit, q.holdout) for t, (penalty, q) in found.items()]
    layers.sort(key=lambda layer: (layer.layer_index, KINDS.index(layer.kind)))
    spec = mapper_spec(reader.store, options, layers)
    sizes = {layer: math.prod(spec.weight_shape(*layer)) for layer in ((one.kind, one.layer_index) for one in spec.layers)}
    item: int = getattr(torch, options.dtype).itemsize
    row["weight_bytes"] = sum(size * item + 4 * spec.target.width_of(*layer) for layer, size in sizes.items())
    key = (options.support, options.dtype, tuple((one.kind, one.source_layers) for one in spec.layers))
    if key not in times:
        times[key] = _milliseconds(spec, reader.device)
    row["milliseconds"] = times[key]
    return row


def _milliseconds(spec: MapperSpec, device: torch.device) -> float:
    """The median time to transfer a cache of random numbers through random weights of the spec's shapes."""
    dtype = getattr(torch, spec.dtype)
    keys = [(layer.kind, layer.layer_index) for layer in spec.layers]
    # Layers of equal shape share a few tensors in turn, so that a large map is timed in little memory.
    made: dict[tuple[int, ...], list[Tensor]] = {}
    weights = {}
    for number, key in enumerate(keys):
        shape = spec.weight_shape(*key)
        turns = made.setdefault(shape, [])
        if len(turns) * math.prod(shape) * dtype.itemsize < TIMED_BYTES:
            turns.append(torch.randn(shape, device=device).to(dtype))
        weights[key] = (turns[number % len(turns)], torch.zeros(spec.target.width_of(*key), dtype=dtype, device=device))
    mapper = Mapper(spec, weights)

    def states(model: ModelSpec, layer_index: int) -> tuple[Tensor, Tensor]:
        shapes = [model.shape(kind, layer_index) for kind in KINDS]
        keys, values = (torch.randn(1, h, TIMED_TOKENS, d, device=device).to(dtype) for h, d in shapes)
        return keys, values

    cache = [states(spec.source, layer_index) for layer_index in range(spec.source.n_layers)]
    first = states(spec.target, 0) if spec.lexical_lags else None
    found = []
    for _ in range(TIMED_RUNS + 1):
        started = time.perf_counter()
        mapper.transfer_layers(cache, first_layer=first)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(1000 * (time.perf_counter() - started))
    return statistics.median(found[1:])  # the first one warms up


def _csv(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    )
    return buffer.getvalue().encode()
