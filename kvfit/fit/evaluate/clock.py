"""Time of each way of moving a context against a prefill by the target, by length, and from where on it pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kvfit.fit.evaluate import arms
from kvfit.fit.progress import track
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device

SHORTEST = 64
MOST_REPEATS, MOST_WARM_UPS = 30, 10
TIMED = ("transfer", "handoff", "auto", "prefill", "reused_transfer", "reused_prefill")


def synchronise(devices: set[torch.device]) -> None:
    """Wait until the devices have done what they were given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


def devices_of(pair: arms.Pair) -> set[torch.device]:
    """The devices that moving a context works on."""
    return {*caches.layer_devices(pair.source, 1), *caches.layer_devices(pair.target, pair.mapper.spec.target.n_layers)}


def timed(run: Callable[[], Any], devices: set[torch.device], seconds: float) -> dict[str, float | int]:
    """Median and 95th percentile of the milliseconds that `run` takes, synchronised before and after.

    The first run is not counted and says how many more there is time for: up to 10 that are not counted, a quarter of those
    that are, and up to 30 that are, at least one.

    Args:
        run: what is timed.
        devices: that work on it.
        seconds: for all runs together.

    Returns:
        ``median``, ``p95``, ``repeats``.
    """

    def once() -> float:
        synchronise(devices)
        start = time.perf_counter()
        run()
        synchronise(devices)
        return 1000 * (time.perf_counter() - start)

    possible = int(max(0.0, 1000 * seconds / max(once(), 1e-3)) - 1)
    repeats = min(MOST_REPEATS, max(1, possible * 4 // 5))
    for _ in range(min(MOST_WARM_UPS, possible - repeats) if possible > repeats else 0):
        once()
    taken = sorted(once() for _ in range(repeats))
    return {
        "median": statistics.median(taken),
        "p95": taken[min(len(taken) - 1, int(0.95 * len(taken)))],
        "repeats": len(taken),
    }


def lengths_up_to(longest: int, *more: int) -> list[int]:
    """Powers of two from 64 on that are shorter than `longest`, `longest`, and `more`, ascending."""
    found, length = {longest, *more}, SHORTEST
    while length < longest:
        found.add(length)
        length *= 2
    return sorted(found)


def milliseconds(
    pair: arms.Pair, ids: Tensor, *, lengths: Iterable[int], seconds: float, progress: bool = True
) -> dict[str, Any]:
    """Time moving against prefilling one sequence, batch 1.

    `transfer` maps the source's cache as it lies, moves between devices included; it does not include the source's own
    prefill, which it had to do anyway. `handoff` and `auto` also run the exact tokens, the guide included. `prefill` runs the
    target without its language-model head. `reused` does both where the target holds the first half already (a shared prefix in
    its cache).

    Args:
        pair: models and mapper.
        ids: (1, P) token ids; shorter lengths are its beginnings.
        lengths: tokens to time, at most P.
        seconds: for all timings together.
        progress: show a bar.

    Returns:
        ``lengths``: a row per length, each way with its ``median``, ``p95`` and ``repeats``. ``breaks_even``: for ``transfer``,
        ``handoff``, ``auto`` and ``reused_transfer``, the shortest length from which on it is faster than a prefill at every
        length that was timed; None where it is not at the longest.
    """
    devices = devices_of(pair)
    lengths = list(lengths)
    each = seconds / (len(lengths) * len(TIMED))
    rows: list[dict[str, Any]] = []
    for length in track(lengths, "evaluate, time", "lengths", show=progress):
        runs = _runs(pair, ids[:, :length])
        rows.append({"tokens": length} | {name: timed(runs[name], devices, each) for name in TIMED})

    def breaks_even(name: str, against: str) -> int | None:
        return crossover([(row["tokens"], row[name]["median"], row[against]["median"]) for row in rows])

    return {
        "lengths": rows,
        "breaks_even": {
            "transfer": breaks_even("transfer", "prefill"),
            "handoff": breaks_even("handoff", "prefill"),
            "auto": breaks_even("auto", "prefill"),
            "reused_transfer": breaks_even("reused_transfer", "reused_prefill"),
        },
    }


def _runs(pair: arms.Pair, ids: Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed at one length, by the names of `TIMED`."""
    prefixes = arms.Prefixes(pair, ids)
    sources, lexical = prefixes.sources, arms.lexical(pair.mapper, ids, pair.target)
    half = ids.shape[1] // 2
    held = arms.Rewindable(arms.Prefixes(pair, ids[:, :half]).cache("native"))
    second_half = ids[:, half:].to(input_device(pair.target))

    def transfer(cache: Any) -> None:
        pair.mapper.transfer(sources, into=cache, **lexical)

    return {
        "transfer": lambda: transfer(caches.new_cache(pair.target)),
        "handoff": lambda: prefixes.cache("handoff"),
        "auto": lambda: prefixes.cache("auto"),
        "prefill": lambda: prefixes.cache("native"),
        "reused_transfer": lambda: transfer(held.fresh(pair.target)),
        "reused_prefill": lambda: caches.forward(pair.target, second_half, held.fresh(pair.target), base=True),
    }


def shown(milliseconds: float) -> str:
    """A time in words: three digits, or all those before the point."""
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def at_length(times: dict[str, Any], tokens: int) -> dict[str, Any] | None:
    """The row of a length, None where it was not timed."""
    return next((row for row in times.get("lengths", ()) if row["tokens"] == tokens), None)


def crossover(rows: list[tuple[int, float, float]]) -> int | None:
    """The shortest length from which on the first time is below the second at every length; rows (length, first, second)."""
    found = None
    for length, first, second in reversed(rows):
        if first >= second:
            break
        found = length
    return found
