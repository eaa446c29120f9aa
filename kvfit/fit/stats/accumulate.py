"""`Accumulator` turns activations into statistics on disk.

It shifts activations and collects them in one buffer, `fit` rows from the front and `holdout` rows from the back. When the next
batch does not fit, it empties the buffer: it updates every block by matrix products over the rows. Where all blocks fit into
the memory budget, they stay in memory, and a snapshot is written every few minutes while the next batches run. Otherwise the
blocks are updated on disk, one by one, each time. Either way the new numbers go to the generation that is not live, and one
commit makes that generation live together with the cursor.

When the buffer is emptied depends only on its size and on the batches' sizes, and a commit holds only such a moment. So a run
that was killed and resumed ends with the same bits as one that was not, however often it was written. Forward passes wait for
an update on disk. With two buffers of half the size they would not, but every block would be rewritten twice as often, which
takes longer wherever an update takes longer than the passes that fill the buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.bundle.records import to_json
from kvfit.errors import StoreError
from kvfit.fit.stats import moments
from kvfit.fit.stats.budget import buffer_tokens, fits_in_memory
from kvfit.fit.stats.buffer import Activations, TokenBuffer
from kvfit.fit.stats.commits import SNAPSHOT_SECONDS, Commits, Point
from kvfit.fit.stats.layout import SPLITS, Layout, Part, array_path
from kvfit.fit.stats.record import BadValue, Tokens, as_json, require_same
from kvfit.fit.stats.resident import ResidentBlocks
from kvfit.fit.stats.updater import BlockUpdater
from kvfit.fit.stats.writer import StoreWriter


class Accumulator:
    """A store that is being written. It holds the store's lock until it is closed.

    Use it as a context manager. Leaving it before the end commits the blocks as they were when the buffer was last emptied,
    never the rows in the buffer. Those rows are captured again on resume, so interruptions change neither when the buffer is
    emptied nor any bit of the result.

    Attributes:
        path: the store's folder.
    """

    def __init__(
        self, writer: StoreWriter, memory_budget: int, device: torch.device | str | None, snapshot_seconds: float
    ) -> None:
        record, self._layout = writer.record, writer.layout
        self.path = writer.root
        self._updater = BlockUpdater(writer)
        self._resident = ResidentBlocks(writer) if fits_in_memory(writer.layout, memory_budget) else None
        self._commits = Commits(writer, self._resident, snapshot_seconds)
        self._writer = writer
        fits = buffer_tokens(self._layout, memory_budget)
        # The capacity of an earlier run gives the same bits again, but it must fit into this budget.
        capacity = min(fits, record.buffer_tokens or fits)
        self._buffer = TokenBuffer(self._layout, capacity, None if device is None else torch.device(device))
        self._tokens: dict[Part, int] = {"fit": record.tokens.fit, "holdout": record.tokens.holdout}
        self._batches = record.batches
        self._next_cursor: Any = record.cursor
        self._failed: BaseException | None = None
        self._load()

    @property
    def cursor(self) -> Any:
        """The cursor of the last commit; None in a new store."""
        return self._writer.record.cursor

    @property
    def finished(self) -> bool:
        """Whether the last commit finished the store."""
        return self._writer.record.finished

    @property
    def resumable(self) -> bool:
        """Whether a later run could continue if this one stopped now."""
        return self.cursor is not None or self._commits.pending is not None

    @property
    def in_memory(self) -> bool:
        """Whether all blocks are in memory between snapshots."""
        return self._resident is not None

    @classmethod
    def create(
        cls,
        path: str | Path,
        layout: Layout,
        *,
        recipe: dict[str, Any],
        memory_budget: int = 2 << 30,
        device: torch.device | str | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> Accumulator:
        """Make a new store.

        Args:
            path: the store's folder, which must not exist.
            layout: the two models, and which statistics are kept.
            recipe: JSON values that say everything the statistics depend on.
            memory_budget: bytes for the token buffer, and for all blocks or for those on their way to disk.
            device: the device of the buffer and the products; by default that of the first batch's source activations.
            snapshot_seconds: the time between two snapshots where the blocks are in memory.

        Raises:
            StoreError: `path` exists, is being written by another process, or cannot be written; or the recipe is not JSON.
        """
        return cls(StoreWriter.create(Path(path), layout, as_json(recipe)), memory_budget, device, snapshot_seconds)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        *,
        recipe: dict[str, Any],
        memory_budget: int = 2 << 30,
        device: torch.device | str | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> Accumulator:
        """Continue a store from its last commit; `cursor` then says where to continue.

        Raises:
            StoreError: there is no store, it is damaged, another process writes it, or it was made with another recipe or other
                models; then the message names the field with both values.
        """
        writer = StoreWriter.open(Path(path))
        try:
            require_same(path, writer.record.recipe, as_json(recipe), "recipe")
            if layout is not None:
                require_same(path, to_json(writer.layout), to_json(layout), "layout")
            return cls(writer, memory_budget, device, snapshot_seconds)
        except BaseException:
            writer.close()
            raise

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in ``products``, in ``disk`` work beside them, of a processor in that work, and in ``wait`` for the disk."""
        return {
            "products": self._updater.product_seconds + (self._resident.product_seconds if self._resident else 0.0),
            "disk": self._writer.disk_seconds,
            "disk_processor": self._writer.disk_processor_seconds,
            "wait": self._updater.wait_seconds + self._commits.wait_seconds,
        }

    @property
    def buffer_tokens(self) -> int:
        """The number of tokens that fit into the buffer."""
        return self._buffer.capacity

    def add(self, split: Literal["fit", "holdout"], source: Activations, target: Activations, cursor: Any) -> None:
        """Take one batch of a split. Where the buffer is full, the earlier batches are committed first.

        Args:
            split: the split that it belongs to.
            source, target: per kind, one tensor per layer, (N, F1) and (N, G1), of any float dtype and on any device; they are
                copied. Lexical inputs are in `source` under ``lexical``, one tensor per lag, (N, 2 * G1).
            cursor: a JSON value that says where to continue once this batch is committed.

        Raises:
            MismatchError: shapes do not fit the store's models, or token counts differ between layers.
            StoreError: more than 1 % of the batches hold values that are not finite, or the disk fails. The last commit stays
                readable, but this object can no longer be used.
        """
        self._usable()
        n_tokens = self._buffer.check(split, source, target)
        with torch.no_grad(), self._failing(), moments.precise_matmul():
            if self._buffer.used and n_tokens > self._buffer.capacity - self._buffer.used:
                self._flush()
                self._commits.reach(self._point())
            bad = self._take(split, source, target, n_tokens) if n_tokens else None
            self._batches = self._batches.and_one(bad)
            self._next_cursor = cursor
            self._batches.check()

    def finish(self, cursor: Any) -> None:
        """Commit everything and mark the store as finished.

        Raises:
            StoreError: more than 1 % of the batches hold values that are not finite, or the disk fails.
        """
        self._usable()
        with torch.no_grad(), self._failing(), moments.precise_matmul():
            self._batches.check(at_end=True)
            self._next_cursor = cursor
            self._flush()
            self._commits.write(self._point(), finished=True)

    def close(self) -> None:
        """Commit what can be committed (see the class), and release the store and the buffer."""
        try:
            if self._failed is None:
                with torch.no_grad(), self._failing():
                    self._commits.wait()
                    if self._commits.pending is not None:
                        self._commits.write(self._commits.pending)
        finally:
            self._commits.stop()
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
        """Copy a batch into the buffer; return None, or the first bad value of a batch that is set aside."""
        buffer, fresh = self._buffer, not self._buffer.shift
        buffer.fix_shift(source, target)
        starts = range(0, n_tokens, buffer.capacity)
        for start in starts:
            bad = buffer.load(split, source, target, start, min(start + buffer.capacity, n_tokens))
            if bad is not None:
                if fresh:
                    buffer.shift = {}  # the shift was computed from the bad values
                return bad
        if len(starts) == 1:
            buffer.n_rows[split] += n_tokens
        else:  # the batch is larger than the buffer, which is empty here: take it in pieces, with one commit for all later
            for start in starts:
                stop = min(start + buffer.capacity, n_tokens)
                self._flush()
                buffer.load(split, source, target, start, stop)
                buffer.n_rows[split] = stop - start
        self._tokens[split] += n_tokens
        return None

    def _flush(self) -> None:
        """Update every block of every split that has rows in the buffer."""
        self._commits.wait()
        self._commits.pending = None
        for split in SPLITS:
            if not self._buffer.n_rows[split]:
                continue
            rows, sums = self._buffer.rows(split), self._sums[split]
            if self._resident is not None:
                self._resident.update(split, rows)
                self._buffer.sums(split, sums)
            else:
                digests = self._updater.update(split, rows)
                self._buffer.sums(split, sums)
                self._writer.end(split, digests, {name: total.numpy() for name, total in sums.items()})
            self._buffer.clear(split)

    def _point(self) -> Point:
        """The state that can be committed just after a flush."""
        buffer = self._buffer
        return Point(
            cursor=self._next_cursor,
            tokens=Tokens(self._tokens["fit"], self._tokens["holdout"]),
            batches=self._batches,
            buffer_tokens=buffer.capacity if buffer.shift else None,
            shifts=buffer.shifts() if buffer.shift else {},
            sums=self._sums,
        )

    def _load(self) -> None:
        """Read the small arrays of the last commit."""
        writer, layout = self._writer, self._layout
        self._sums: dict[Part, dict[str, Tensor]] = {}
        for split in SPLITS:
            generation = writer.record.live.of(split)
            self._sums[split] = {
                array.name: torch.zeros(array.shape, dtype=torch.float64)
                if generation is None
                else torch.from_numpy(writer.read_vector(array_path(split, generation, array), array))
                for array in layout.sums
            }
        if writer.record.live.shift:
            self._buffer.set_shifts({array.name: writer.read_vector(array.name, array) for array in layout.shifts})

    def _usable(self) -> None:
        if self._failed is not None:
            raise StoreError(f"{self.path} cannot be written on after an error ({self._failed}); open it again with resume")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Remember an error, so that nothing is committed after it, and turn an error of the disk into a `StoreError`."""
        try:
            yield
        except OSError as error:
            self._failed = error
            kept = "nothing was committed before" if self.cursor is None else "the last commit is intact"
            raise StoreError(f"{self.path} cannot be written: {error}; {kept}: free space and run it with --resume") from error
        except BaseException as error:
            self._failed = error
            raise
