"""Accumulator: activations in, statistics on disk.

Activations are shifted and put into one buffer, `fit` rows from its front and `holdout` rows from its back. When the next
batch does not fit, every block is updated by matrix products over the buffer, written to the generation that is not live,
and one commit makes that generation live together with the cursor. Where the buffer is emptied depends on the sizes of the
batches alone, so a run that was killed and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import MismatchError, StoreError
from kvfit.fit.stats import moments
from kvfit.fit.stats.buffer import Activations, TokenBuffer
from kvfit.fit.stats.layout import SPLITS, Layout, Part, StatsDtype, array_path
from kvfit.fit.stats.record import BadValue, Batches, Tokens, first_difference
from kvfit.fit.stats.updater import BlockUpdater, working_bytes
from kvfit.fit.stats.writer import StoreWriter
from kvfit.spec import Inputs, ModelSpec, to_json

LARGEST_BUFFER = 32_768  # tokens; more would only make commits rarer
BUFFER_SHARE = 7 / 8  # of the memory budget; the rest, and a fixed few hundred MB, is for blocks on their way to disk
QUARANTINE_SHARE = 0.01
QUARANTINE_FROM = 100  # batches, before the share means anything


def buffer_tokens(layout: Layout, memory_budget: int) -> int:
    """Tokens that the buffer of a store holds within `memory_budget` bytes."""
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


class Accumulator:
    """A store that is being written; holds its lock until it is closed.

    A context manager. Leaving it commits nothing: what came after the last commit is captured again on resume, so that where
    the buffer is emptied, and with it every bit, does not depend on interruptions.

    Attributes:
        path: the store's folder.
        cursor: of the last commit; None for a fresh store.
        finished: whether the last commit finished the store.
    """

    def __init__(self, writer: StoreWriter, memory_budget: int, device: torch.device | str | None) -> None:
        record = writer.record
        self.path = writer.root
        self.cursor: Any = record.cursor
        self.finished = record.finished
        self._updater = BlockUpdater(writer)
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
    ) -> Accumulator:
        """A new store.

        Args:
            path: where; must not exist.
            source, target: the models.
            recipe: JSON values; all that makes the statistics what they are.
            inputs: ``both`` adds the keys-by-values blocks.
            stats_dtype: of the stored matrices.
            lexical_lags: of the lexical inputs, ascending; empty for none.
            memory_budget: bytes for the token buffer and the blocks on their way to disk.
            device: where buffer and products are; by default where the first batch's source activations are.

        Raises:
            StoreError: `path` exists, is being written by another process, or cannot be written.
        """
        layout = Layout(source, target, inputs, stats_dtype, lexical_lags)
        return cls(StoreWriter.create(Path(path), layout, _as_json(recipe)), memory_budget, device)

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
            return cls(writer, memory_budget, device)
        except BaseException:
            writer.close()
            raise

    @property
    def seconds(self) -> dict[str, float]:
        """Time so far in ``products``, in ``disk`` (reading, hashing and writing chunks, beside the products), in
        ``disk_processor`` (what of that a processor was busy), and the ``wait`` of the products for the disk."""
        return {
            "products": self._updater.product_seconds,
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
        """Let go of the store and the buffer; what was not committed is gone."""
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
        for split in SPLITS:
            if self._buffer.n_rows[split]:
                digests = self._updater.update(split, self._buffer.rows(split))
                self._buffer.sums(split, self._sums[split])
                self._writer.end(split, digests, {name: total.numpy() for name, total in self._sums[split].items()})
                self._buffer.clear(split)

    def _commit(self, *, finished: bool) -> None:
        writer = self._writer
        if self._buffer.shift and not writer.record.live.shift:
            writer.write_shifts(self._buffer.shifts())
        writer.commit(
            cursor=self._next_cursor,
            tokens=Tokens(self._tokens["fit"], self._tokens["holdout"]),
            batches=self._batches,
            buffer_tokens=self._buffer.capacity if self._buffer.shift else None,
            finished=finished,
        )
        self.cursor, self.finished = writer.record.cursor, finished

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
