"""Accumulator: activations in, statistics on disk.

Activations are shifted and put into one buffer, `fit` rows from its front and `holdout` rows from its back. When the next
batch does not fit, the buffer is emptied: every block is updated by matrix products over its rows. Where all blocks fit into
the memory budget they stay in memory, and a snapshot is written every few minutes while the next batches run. Otherwise they
are updated on disk, one by one, each time. Either way new numbers go to the generation that is not live, and one commit makes
it live together with the cursor.

Where the buffer is emptied depends on its size and on those of the batches alone, and only such a moment is committed. So a
run that was killed and resumed ends with the same bits as one that was not, however often it was written.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.bundle.records import to_json
from kvfit.errors import MismatchError, StoreError
from kvfit.fit.stats import moments
from kvfit.fit.stats.buffer import Activations, TokenBuffer
from kvfit.fit.stats.layout import SPLITS, Layout, Part, StatsDtype, array_path
from kvfit.fit.stats.record import BadValue, Batches, Tokens, first_difference
from kvfit.fit.stats.resident import ResidentBlocks, resident_bytes
from kvfit.fit.stats.updater import BlockUpdater, working_bytes
from kvfit.fit.stats.writer import StoreWriter
from kvfit.spec import Inputs, ModelSpec

LARGEST_BUFFER = 32_768  # tokens; more would only make commits rarer
RESIDENT_BUFFER = 8192  # tokens with the blocks in memory; adding to the blocks then costs 2 % of the products
LEAST_RESIDENT_BUFFER = 1024
SNAPSHOT_SECONDS = 600.0
AUTO_SHARE = 0.5  # of the free memory, for a memory budget of ``auto``
BUFFER_SHARE = 7 / 8  # of the memory budget; the rest, and a fixed few hundred MB, is for blocks on their way to disk
QUARANTINE_SHARE = 0.01
QUARANTINE_FROM = 100  # batches, before the share means anything


def free_share(device: torch.device | str | None = None) -> int:
    """The memory budget that ``auto`` means: half of what is free where the statistics are, bytes."""
    place = torch.device(device or "cpu")
    if place.type == "cuda":
        return int(AUTO_SHARE * torch.cuda.mem_get_info(place)[0])
    import psutil

    return int(AUTO_SHARE * psutil.virtual_memory().available)


def fits_in_memory(layout: Layout, memory_budget: int) -> bool:
    """Whether all blocks and a buffer of `LEAST_RESIDENT_BUFFER` tokens fit into `memory_budget` bytes."""
    return memory_budget >= resident_bytes(layout) + LEAST_RESIDENT_BUFFER * layout.token_bytes


def buffer_tokens(layout: Layout, memory_budget: int) -> int:
    """Tokens that the buffer of a store holds within `memory_budget` bytes."""
    if fits_in_memory(layout, memory_budget):
        return min(RESIDENT_BUFFER, LARGEST_BUFFER, (memory_budget - resident_bytes(layout)) // layout.token_bytes)
    return max(1, min(LARGEST_BUFFER, int(memory_budget * BUFFER_SHARE) // layout.token_bytes))


def check_budget(layout: Layout, memory_budget: int) -> None:
    """Refuse a budget that one token and the blocks on their way to disk exceed.

    Raises:
        MismatchError: with the least that will do.
    """
    least = layout.token_bytes + working_bytes(layout)
    if memory_budget < least:
        kib = -(-least // 1024)
        raise MismatchError(
            f"--memory-budget: found {memory_budget} bytes, needed at least {kib}KiB for one token and the blocks of this "
            "pair: raise it"
        )


@dataclass(frozen=True)
class _Point:
    """What a commit says of the moment when the buffer was emptied."""

    cursor: Any
    tokens: Tokens
    batches: Batches


class Accumulator:
    """A store that is being written; holds its lock until it is closed.

    A context manager. Leaving it before the end commits what was in the blocks when the buffer was last emptied, and never
    what is in the buffer: that is captured again on resume, so that where the buffer is emptied, and with it every bit, does
    not depend on interruptions.

    Attributes:
        path: the store's folder.
    """

    def __init__(
        self,
        writer: StoreWriter,
        memory_budget: int,
        device: torch.device | str | None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> None:
        record = writer.record
        self.path = writer.root
        self._updater = BlockUpdater(writer)
        self._resident = ResidentBlocks(writer) if fits_in_memory(writer.layout, memory_budget) else None
        self._snapshot_seconds = snapshot_seconds
        self._written_at = time.monotonic()
        self._snapshot: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, "kvfit-snapshot")
        self._flushed: _Point | None = None  # where the blocks in memory stand, if that can be committed and is not yet
        self._writer = writer
        self._layout: Layout = writer.layout
        fits = buffer_tokens(self._layout, memory_budget)
        # The number of an earlier run gives the same bits again; it gives way where it no longer fits.
        capacity = min(fits, record.buffer_tokens or fits)
        self._buffer = TokenBuffer(self._layout, capacity, None if device is None else torch.device(device))
        self._tokens: dict[Part, int] = {"fit": record.tokens.fit, "holdout": record.tokens.holdout}
        self._batches = record.batches
        self._next_cursor: Any = record.cursor
        self._failed: BaseException | None = None
        self._load()

    @property
    def cursor(self) -> Any:
        """Of the last commit; None for a fresh store."""
        return self._writer.record.cursor

    @property
    def finished(self) -> bool:
        """Whether the last commit finished the store."""
        return self._writer.record.finished

    @property
    def resumable(self) -> bool:
        """Whether leaving now leaves something to go on from."""
        return self.cursor is not None or self._flushed is not None

    @property
    def in_memory(self) -> bool:
        """Whether all blocks are in memory between snapshots."""
        return self._resident is not None

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        source: ModelSpec,
        target: ModelSpec,
        recipe: dict[str, Any],
        inputs: Inputs = "same",
        stats_dtype: StatsDtype = "float32",
        lexical_lags: tuple[int, ...] = (),
        memory_budget: int = 2 << 30,
        device: torch.device | str | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> Accumulator:
        """A new store.

        Args:
            path: where; must not exist.
            source, target: the models.
            recipe: JSON values; all that makes the statistics what they are.
            inputs: ``both`` adds the keys-by-values blocks.
            stats_dtype: of the stored matrices.
            lexical_lags: of the lexical inputs, ascending; empty for none.
            memory_budget: bytes for the token buffer, and for all blocks or for those on their way to disk.
            snapshot_seconds: between two snapshots of blocks in memory.
            device: where buffer and products are; by default where the first batch's source activations are.

        Raises:
            StoreError: `path` exists, is being written by another process, or cannot be written.
        """
        layout = Layout(source, target, inputs, stats_dtype, lexical_lags)
        return cls(StoreWriter.create(Path(path), layout, _as_json(recipe)), memory_budget, device, snapshot_seconds)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        *,
        recipe: dict[str, Any],
        memory_budget: int = 2 << 30,
        device: torch.device | str | None = None,
        source: ModelSpec | None = None,
        target: ModelSpec | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> Accumulator:
        """Continue a store from its last commit; `cursor` says from where.

        Raises:
            StoreError: no store, damaged, written by another process, or made by another recipe or other models; names the
                field with both values.
        """
        writer = StoreWriter.open(Path(path))
        try:
            pairs = [(writer.record.recipe, _as_json(recipe), "recipe")]
            for name, spec in (("source", source), ("target", target)):
                if spec is not None:
                    pairs.append((to_json(getattr(writer.record, name)), to_json(spec), name))
            for stored, given, name in pairs:
                difference = first_difference(stored, given, name)
                if difference is not None:
                    field, old, new = difference
                    raise StoreError(
                        f"{path} was made with {field} = {old!r}, this run has {new!r}; use the same value or another --out"
                    )
            return cls(writer, memory_budget, device, snapshot_seconds)
        except BaseException:
            writer.close()
            raise

    @property
    def seconds(self) -> dict[str, float]:
        """Time so far in ``products``, in ``disk`` (reading, hashing and writing chunks, beside the products), in
        ``disk_processor`` (what of that a processor was busy), and the ``wait`` of the products for the disk."""
        return {
            "products": self._updater.product_seconds + (self._resident.product_seconds if self._resident else 0.0),
            "disk": self._writer.disk_seconds,
            "disk_processor": self._writer.disk_processor_seconds,
            "wait": self._updater.wait_seconds,
        }

    @property
    def commits(self) -> int:
        """Commits that the store has seen, of earlier runs too."""
        return self._writer.record.commit

    @property
    def buffer_tokens(self) -> int:
        """Tokens that the buffer holds."""
        return self._buffer.capacity

    def add(self, split: Literal["fit", "holdout"], source: Activations, target: Activations, cursor: Any) -> None:
        """Take one batch of a split; commits earlier ones when the buffer is full.

        Args:
            split: which statistics it belongs to.
            source, target: per kind, one tensor per layer, (N, F1) and (N, G1), of any float dtype and on any device. What is
                kept is copied. Lexical inputs are in `source` under ``lexical``, one tensor per lag, (N, 2 * G1).
            cursor: JSON value; where to continue once this batch is committed.

        Raises:
            MismatchError: shapes that are not those of the store's models, or token counts that differ between layers.
            StoreError: more than 1 % of the batches hold values that are not finite, or the disk refuses. The last commit
                stays readable; this object does not.
        """
        self._usable()
        n_tokens = self._buffer.check(split, source, target)
        with torch.no_grad(), self._failing(), moments.precise_matmul():
            if self._buffer.used and n_tokens > self._buffer.capacity - self._buffer.used:
                self._flush()
                self._commit(finished=False)
            bad = self._take(split, source, target, n_tokens) if n_tokens else None
            seen, quarantined = self._batches.seen + 1, self._batches.quarantined + (bad is not None)
            self._batches = Batches(seen, quarantined, self._batches.first or bad)
            self._next_cursor = cursor
            if seen >= QUARANTINE_FROM:
                self._check_share()

    def finish(self, cursor: Any) -> None:
        """Commit everything and mark the store as finished.

        Raises:
            StoreError: more than 1 % of the batches hold values that are not finite, or the disk refuses.
        """
        self._usable()
        with torch.no_grad(), self._failing(), moments.precise_matmul():
            self._check_share()
            self._next_cursor = cursor
            self._flush()
            self._commit(finished=True)

    def close(self) -> None:
        """Let go of the store and the buffer; what was not committed is gone, but for what memory holds, see above."""
        try:
            if self._failed is None:
                with torch.no_grad(), self._failing():
                    self._wait()
                    if self._flushed is not None:
                        self._write(self._flushed, finished=False)
        finally:
            self._background.shutdown()
            self._release()

    def _release(self) -> None:
        if self._resident is not None:
            self._resident.free()
        self._buffer.free()
        self._updater.free()
        self._writer.close()
        self._failed = self._failed or StoreError(f"{self.path} is closed; open it again with resume")

    def __enter__(self) -> Accumulator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take(self, split: Part, source: Activations, target: Activations, n_tokens: int) -> BadValue | None:
        """Copy a batch into the buffer, or say what is wrong with it."""
        buffer, fresh = self._buffer, not self._buffer.shift
        buffer.fix_shift(source, target)
        starts = range(0, n_tokens, buffer.capacity)
        for start in starts:
            bad = buffer.load(split, source, target, start, min(start + buffer.capacity, n_tokens))
            if bad is not None:
                if fresh:
                    buffer.shift = {}  # it came from the bad values
                return bad
        if len(starts) == 1:
            buffer.n_rows[split] += n_tokens
        else:  # larger than the buffer, which is empty then: piece by piece, and one commit for all of it later
            for start in starts:
                stop = min(start + buffer.capacity, n_tokens)
                self._flush()
                buffer.load(split, source, target, start, stop)
                buffer.n_rows[split] = stop - start
        self._tokens[split] += n_tokens
        return None

    def _check_share(self) -> None:
        seen, quarantined, first = self._batches.seen, self._batches.quarantined, self._batches.first
        if first is not None and quarantined > QUARANTINE_SHARE * seen:
            raise StoreError(
                f"{quarantined} of {seen} batches hold values that are not finite, first the {first.kind} of {first.model} "
                f"layer {first.layer_index}; at most 1 % may; run the models in bfloat16 or float32"
            )

    def _flush(self) -> None:
        """Update every block of every split that has rows in the buffer."""
        self._wait()
        self._flushed = None
        for split in SPLITS:
            if self._buffer.n_rows[split] and self._resident is not None:
                self._resident.update(split, self._buffer.rows(split))
                self._buffer.sums(split, self._sums[split])
                self._buffer.clear(split)
            elif self._buffer.n_rows[split]:
                digests = self._updater.update(split, self._buffer.rows(split))
                self._buffer.sums(split, self._sums[split])
                self._writer.end(split, digests, {name: total.numpy() for name, total in self._sums[split].items()})
                self._buffer.clear(split)

    def _commit(self, *, finished: bool) -> None:
        """Make what was flushed live: at once, or in the background where the blocks are in memory and a snapshot is due."""
        point = _Point(self._next_cursor, Tokens(self._tokens["fit"], self._tokens["holdout"]), self._batches)
        if self._resident is None or finished:
            self._write(point, finished=finished)
            return
        self._flushed = point
        if time.monotonic() - self._written_at >= self._snapshot_seconds:
            self._snapshot = self._background.submit(self._write, point, finished=False)

    def _write(self, point: _Point, *, finished: bool) -> None:
        writer = self._writer
        if self._resident is not None:
            self._resident.write(self._sums)
        if self._buffer.shift and not writer.record.live.shift:
            writer.write_shifts(self._buffer.shifts())
        writer.commit(
            cursor=point.cursor,
            tokens=point.tokens,
            batches=point.batches,
            buffer_tokens=self._buffer.capacity if self._buffer.shift else None,
            finished=finished,
        )
        self._flushed, self._written_at = None, time.monotonic()

    def _wait(self) -> None:
        """Let a snapshot end before anything that it reads changes."""
        if self._snapshot is not None:
            started = time.perf_counter()
            snapshot, self._snapshot = self._snapshot, None
            snapshot.result()
            self._updater.wait_seconds += time.perf_counter() - started

    def _load(self) -> None:
        """Small arrays of the last commit into memory."""
        record, layout, writer = self._writer.record, self._layout, self._writer
        self._sums: dict[Part, dict[str, Tensor]] = {}
        for split in SPLITS:
            generation = record.live.of(split)
            self._sums[split] = {
                array.name: torch.zeros(array.shape, dtype=torch.float64)
                if generation is None
                else torch.from_numpy(writer.read_vector(array_path(split, generation, array), array))
                for array in layout.sums
            }
        if record.live.shift:
            self._buffer.set_shifts({array.name: writer.read_vector(array.name, array) for array in layout.shifts})

    def _usable(self) -> None:
        if self._failed is not None:
            raise StoreError(f"{self.path} cannot be written on after an error ({self._failed}); open it again with resume")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Remember an error, so that nothing is committed after it, and turn the disk's into a `StoreError`."""
        try:
            yield
        except OSError as error:
            self._failed = error
            raise StoreError(
                f"{self.path} cannot be written: {error}; the last commit is intact: free space and run again with --resume"
            ) from error
        except BaseException as error:
            self._failed = error
            raise


def _as_json(recipe: dict[str, Any]) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(json.dumps(recipe, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the recipe holds a value that is not JSON: {error}") from error
    return value
