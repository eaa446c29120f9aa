"""Show the progress of long work: a bar on a terminal, log lines elsewhere.

    with Progress("capture", total=500, unit="sequences", plan="two models over 512,000 tokens", show=progress) as shown:
        for batch in batches:
            work(batch)
            shown.advance(len(batch))
        shown.finish("pair.zarr", then="kvfit solve pair.zarr --out bundle")

    for layer_index in track(range(28), "probe", "layers", show=progress):
        ...

Without a terminal, a run logs what it does when it starts, then its state at most every 30 seconds and at most every 5 %, and
at the end where the result is and what to run next. The lines go to the logger ``kvfit`` at level INFO. The command line shows
them unless ``--quiet``; in other programs they are silent by default. Short work should not use this.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import TypeVar

from tqdm import tqdm

LOGGER = logging.getLogger("kvfit")
SECONDS = 30.0  # the least time between two lines
SHARE = 0.05  # the least share of the total between two lines

T = TypeVar("T")


class Progress:
    """The progress of one piece of work, as a context manager that closes the bar at the end.

    Attributes:
        done: number of units done so far, including those of an earlier run that is resumed.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        *,
        initial: int = 0,
        plan: str = "",
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the work.

        Args:
            name: name of the work, such as ``capture``.
            total: number of all units; None if it is unknown.
            unit: name of the units in the plural, such as ``sequences``.
            initial: number of units that an earlier run has done.
            plan: what will happen and how long it may take, for the first line.
            show: False for no bar and no lines.
            clock: returns the time in seconds.
        """
        self.done = initial
        self._name, self._total, self._unit = name, total, unit
        self._show, self._clock = show, clock
        self._initial, self._started = initial, clock()
        self._last_time, self._last_done = self._started, initial
        bar = show and sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")
        self._bar = tqdm(total=total, initial=initial, desc=name, unit=f" {unit}", disable=False) if bar else None
        resumed = f", {initial} of them done before" if initial else ""
        amount = f"{unit} of unknown number" if total is None else f"{total} {unit}"
        self._say(f"{amount}{resumed}{f'; {plan}' if plan else ''}")

    def advance(self, count: int = 1) -> None:
        """Add to the units that are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        if not self._show:
            return
        now = self._clock()
        enough = self._total is None or self.done - self._last_done >= SHARE * self._total
        if enough and now - self._last_time >= SECONDS:
            self._last_time, self._last_done = now, self.done
            self._say(self._state(now))

    def finish(self, result: str, then: str = "") -> None:
        """Log where the result is, and the command to run next."""
        seconds = self._clock() - self._started
        self.close()
        self._say(f"{self.done} {self._unit} in {duration(seconds)}; {result}{f'; next: {then}' if then else ''}")

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _state(self, now: float) -> str:
        rate = (self.done - self._initial) / max(now - self._started, 1e-9)
        if self._total is None:
            return f"{self.done} {self._unit}, {rate:.3g} a second"
        left = duration((self._total - self.done) / rate) if rate > 0 else "unknown"
        share = self.done / max(self._total, 1)
        return f"{self.done} of {self._total} {self._unit} ({share:.0%}), {rate:.3g} a second, {left} left"

    def _say(self, text: str) -> None:
        if self._show and self._bar is None:
            LOGGER.info("%s: %s", self._name, text)


def track(items: Iterable[T], name: str, unit: str, *, total: int | None = None, show: bool = True) -> Iterator[T]:
    """Yield the items and show the progress. An item counts as done when the next one is requested.

    Args:
        items: the items.
        name: name of the work.
        unit: name of the items in the plural.
        total: number of items; by default their length if they have one.
        show: False for no bar and no lines.
    """
    number = len(items) if total is None and isinstance(items, Sized) else total
    with Progress(name, number, unit, show=show) as shown:
        for item in items:
            yield item
            shown.advance()


def duration(seconds: float) -> str:
    """A number of seconds in readable form: ``42 s``, ``7 min 5 s``, ``3 h 20 min``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"
