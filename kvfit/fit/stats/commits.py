"""Decide when sums become live: at once, or in the background where the blocks are in memory and a snapshot is due."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvfit.fit.stats.layout import Part
from kvfit.fit.stats.record import Array, Batches, Tokens
from kvfit.fit.stats.resident import ResidentBlocks
from kvfit.fit.stats.writer import StoreWriter

SNAPSHOT_SECONDS = 600.0


@dataclass(frozen=True)
class Point:
    """The state that a commit records, at a moment when the buffer is empty.

    Attributes:
        cursor: where to continue.
        tokens: the number of tokens in each split.
        batches: how many batches were added and set aside.
        buffer_tokens: the buffer's capacity; None before the first token.
        shifts: the arrays of the shift by name; empty before the first token.
        sums: per split, the small arrays by name.
    """

    cursor: Any
    tokens: Tokens
    batches: Batches
    buffer_tokens: int | None
    shifts: dict[str, Array]
    sums: Mapping[Part, Mapping[str, Tensor]]


class Commits:
    """Commits sums; a thread of its own writes snapshots.

    Attributes:
        pending: the state of the blocks in memory that could be committed now; None where it has been.
        wait_seconds: how long the caller has waited for snapshots.
    """

    def __init__(self, writer: StoreWriter, resident: ResidentBlocks | None, snapshot_seconds: float) -> None:
        """Commit through `writer`; `resident` holds the blocks where they are in memory."""
        self.pending: Point | None = None
        self.wait_seconds = 0.0
        self._writer, self._resident, self._snapshot_seconds = writer, resident, snapshot_seconds
        self._written_at = time.monotonic()
        self._snapshot: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, "kvfit-snapshot")

    def reach(self, point: Point) -> None:
        """Commit a point: now if the blocks are on disk, in the background if a snapshot is due, and otherwise later."""
        if self._resident is None:
            self.write(point)
            return
        self.pending = point
        if time.monotonic() - self._written_at >= self._snapshot_seconds:
            self._snapshot = self._background.submit(self.write, point)

    def write(self, point: Point, *, finished: bool = False) -> None:
        """Commit a point.

        Raises:
            OSError: the disk fails.
        """
        writer = self._writer
        if self._resident is not None:
            self._resident.write(point.sums)
        if point.shifts and not writer.record.live.shift:
            writer.write_shifts(point.shifts)
        writer.commit(
            cursor=point.cursor,
            tokens=point.tokens,
            batches=point.batches,
            buffer_tokens=point.buffer_tokens,
            finished=finished,
        )
        self.pending, self._written_at = None, time.monotonic()

    def wait(self) -> None:
        """Wait until a snapshot has ended, before anything changes that it reads.

        Raises:
            OSError: the disk failed in it.
        """
        if self._snapshot is not None:
            started = time.perf_counter()
            snapshot, self._snapshot = self._snapshot, None
            snapshot.result()
            self.wait_seconds += time.perf_counter() - started

    def stop(self) -> None:
        """End the thread."""
        self._background.shutdown()
