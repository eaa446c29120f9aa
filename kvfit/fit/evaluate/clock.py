"""Time of a transfer against a prefill by the target, by length, and from where the transfer wins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvfit.fit.evaluate import arms
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device

SHORTEST = 64


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        warm_ups: runs that are not counted.
        repeats: runs that are.
        seconds: most seconds for one median; fewer runs are counted where they take longer, at least 3.
    """

    warm_ups: int = 10
    repeats: int = 30
    seconds: float = 20.0


def synchronise(devices: set[torch.device]) -> None:
    """Wait until the devices have done what they were given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


def timed(run: Callable[[], Any], devices: set[torch.device], effort: Effort) -> dict[str, float | int]:
    """Median and 95th percentile of the milliseconds that `run` takes, synchronised before and after.

    Returns:
        ``median``, ``p95``, ``repeats``.
    """
    begun = time.perf_counter()
    taken: list[float] = []
    warming = effort.warm_ups
    while len(taken) < effort.repeats:
        synchronise(devices)
        start = time.perf_counter()
        run()
        synchronise(devices)
        now = time.perf_counter()
        late = now - begun > effort.seconds
        if warming > 0 and not late:
            warming -= 1
            continue
        warming = 0
        taken.append(1000 * (now - start))
        if late and len(taken) >= 3:
            break
    ordered = sorted(taken)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "repeats": len(ordered),
    }


def lengths_up_to(longest: int) -> list[int]:
    """Powers of two from 64 on that are shorter than `longest`, and `longest`."""
    found, length = [], SHORTEST
    while length < longest:
        found.append(length)
        length *= 2
    return [*found, longest]


def milliseconds(pair: arms.Pair, prefix_ids: Tensor, *, effort: Effort | None = None, progress: bool = True) -> dict[str, Any]:
    """Time mapping against prefilling one sequence, batch 1.

    `transfer` maps the source's cache as it lies, moves between devices included; it does not include the source's own
    prefill, which it had to do anyway. `prefill` runs the target without its language-model head. `reused` does both where the
    target holds the first half already (a shared prefix in its cache).

    Args:
        pair: models and mapper.
        prefix_ids: (1, P) token ids; all shorter lengths are its beginnings.
        effort: how long to measure.
        progress: show a bar.

    Returns:
        ``transfer``, ``prefill`` and ``handoff`` (with the exact tokens in use): medians at P; their ``_p95``; ``lengths`` with
        all that was measured; ``crossover``: the length from which on every measured transfer was faster, None where the
        longest was not; ``crossover_reused`` likewise.
    """
    effort = effort or Effort()
    used = (*caches.layer_devices(pair.source, 1), *caches.layer_devices(pair.target, pair.mapper.spec.target.n_layers))
    devices = set(used)
    rows = []
    for length in tqdm(lengths_up_to(prefix_ids.shape[1]), desc="time", disable=None if progress else True):
        ids = prefix_ids[:, :length]
        prefixes = arms.Prefixes(pair, ids)
        sources = prefixes.sources

        def transfer(ids: Tensor = ids, sources: arms.Pairs = sources) -> None:
            pair.mapper.transfer(sources, into=caches.new_cache(pair.target), **arms.lexical(pair.mapper, ids, pair.target))

        def moved(prefixes: arms.Prefixes = prefixes) -> None:
            prefixes.cache("handoff")

        def prefill(prefixes: arms.Prefixes = prefixes) -> None:
            prefixes.cache("native")

        row: dict[str, Any] = {"tokens": length}
        for name, run in (("transfer", transfer), ("handoff", moved), ("prefill", prefill)):
            row[name] = timed(run, devices, effort)
        row |= _reused(pair, ids, sources, devices, effort)
        rows.append(row)
    last = rows[-1]
    return {
        **{name: last[name]["median"] for name in ("transfer", "handoff", "prefill")},
        **{f"{name}_p95": last[name]["p95"] for name in ("transfer", "handoff", "prefill")},
        "crossover": crossover([(row["tokens"], row["transfer"]["median"], row["prefill"]["median"]) for row in rows]),
        "crossover_reused": crossover(
            [(row["tokens"], row["reused_transfer"]["median"], row["reused_prefill"]["median"]) for row in rows]
        ),
        "lengths": rows,
    }


def _reused(
    pair: arms.Pair, ids: Tensor, sources: arms.Pairs, devices: set[torch.device], effort: Effort
) -> dict[str, dict[str, float | int]]:
    """The same where the target holds the first half of the tokens already."""
    half = ids.shape[1] // 2
    held = arms.Rewindable(arms.Prefixes(pair, ids[:, :half]).cache("native"))
    rest = ids[:, half:].to(input_device(pair.target))
    return {
        "reused_transfer": timed(
            lambda: pair.mapper.transfer(sources, into=held.fresh(pair.target), **arms.lexical(pair.mapper, ids, pair.target)),
            devices,
            effort,
        ),
        "reused_prefill": timed(lambda: caches.forward(pair.target, rest, held.fresh(pair.target), base=True), devices, effort),
    }


def crossover(rows: list[tuple[int, float, float]]) -> int | None:
    """The shortest length from which on the first time is below the second at every length; rows (length, first, second)."""
    found = None
    for length, first, second in reversed(rows):
        if first >= second:
            break
        found = length
    return found
