"""Time each way of moving a context and a prefill by the target, by context length, and find out from where on it pays."""

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
    """Wait until the devices have finished their work."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


def devices_of(pair: arms.Pair) -> set[torch.device]:
    """The devices that take part in moving a context."""
    return {*caches.layer_devices(pair.source, 1), *caches.layer_devices(pair.target, pair.mapper.spec.target.n_layers)}


def timed(run: Callable[[], Any], devices: set[torch.device], seconds: float) -> dict[str, float | int]:
    """Median and 95th percentile of the milliseconds that `run` takes, with synchronisation before and after.

    The first run is not counted; it shows how many runs there is time for. These are split into up to 30 counted runs, at least
    one, and up to 10 warm-up runs before them, one for every four counted ones.

    Args:
        run: the function to time.
        devices: the devices that it works on.
        seconds: time for all runs together.

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
    """Powers of two from 64 to below `longest`, `longest` itself, and `more`, ascending."""
    found, length = {longest, *more}, SHORTEST
    while length < longest:
        found.add(length)
        length *= 2
    return sorted(found)


def milliseconds(
    pair: arms.Pair, ids: Tensor, *, lengths: Iterable[int], seconds: float, progress: bool = True
) -> dict[str, Any]:
    """Time moving and prefilling for one sequence, with batch size 1.

    `transfer` maps the source's cache, including copies between devices. It does not include the source's own prefill, which
    happens in any case. `handoff` and `auto` also run the exact tokens and the guide. `prefill` runs the target without its
    language-model head. `reused_transfer` and `reused_prefill` start from a target cache that holds the first half already,
    such as a shared prefix.

    Args:
        pair: models and mapper.
        ids: (1, P) token ids; shorter lengths use its first tokens.
        lengths: the lengths to time, at most P.
        seconds: time for all timings together.
        progress: whether to show progress.

    Returns:
        ``lengths``: a row per length, with ``median``, ``p95`` and ``repeats`` of each way. ``breaks_even``: for
        ``transfer``, ``handoff``, ``auto`` and ``reused_transfer``, the shortest length from which on it is faster than a
        prefill at every timed length; None if it is slower at the longest.
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
    """The functions to time at one length, by the names of `TIMED`."""
    prefixes = arms.Prefixes(pair, ids)
    sources = prefixes.sources
    half = ids.shape[1] // 2
    held = arms.Rewindable(arms.Prefixes(pair, ids[:, :half]).cache("native"))
    second_half = ids[:, half:].to(input_device(pair.target))

    def transfer(cache: Any) -> None:
        pair.mapper.transfer(sources, into=cache, input_ids=ids, target_model=pair.target)

    return {
        "transfer": lambda: transfer(caches.new_cache(pair.target)),
        "handoff": lambda: prefixes.cache("handoff"),
        "auto": lambda: prefixes.cache("auto"),
        "prefill": lambda: prefixes.cache("native"),
        "reused_transfer": lambda: transfer(held.fresh(pair.target)),
        "reused_prefill": lambda: caches.forward(pair.target, second_half, held.fresh(pair.target), base=True),
    }


def shown(milliseconds: float) -> str:
    """A time as text, with three digits or without decimals."""
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def at_length(times: dict[str, Any], tokens: int) -> dict[str, Any] | None:
    """The row of a length; None if it was not timed."""
    return next((row for row in times.get("lengths", ()) if row["tokens"] == tokens), None)


def crossover(rows: list[tuple[int, float, float]]) -> int | None:
    """The shortest length from which on the first time is below the second; rows are (length, first, second), ascending."""
    found = None
    for length, first, second in reversed(rows):
        if first >= second:
            break
        found = length
    return found
