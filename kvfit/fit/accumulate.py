"""Accumulator: activations in, statistics on disk.

Activations are shifted and put into one buffer, `fit` rows from its front and `holdout` rows from its back. When the next
batch does not fit, every block is updated by matrix products over the buffer, written to the generation that is not live,
and one commit makes that generation live together with the cursor. Where the buffer is emptied depends on the sizes of the
batches alone, so a run that was killed and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import MismatchError, StoreError
from kvfit.fit import moments
from kvfit.fit.layout import SPLITS, BlockArray, Layout, Part, StatsDtype, array_path
from kvfit.fit.record import Array, BadValue, Batches, Tokens, first_difference
from kvfit.fit.writer import StoreWriter
from kvfit.spec import KINDS, Inputs, Kind, ModelSpec, to_json

LARGEST_VALUE = 1e15  # about the shift; the float32 sum of 1e8 squares of it is still finite
LARGEST_BUFFER = 32_768  # tokens; more would only make commits rarer
BUFFER_SHARE = 7 / 8  # of the memory budget; the rest, and a fixed few hundred MB, is for blocks on their way to disk
UNIT_NUMBERS = 8 * 2**20  # numbers of the float64 blocks that are summed at a time: 64 MiB
UNITS_IN_FLIGHT = 2
QUARANTINE_SHARE = 0.01
QUARANTINE_FROM = 100  # batches, before the share means anything

Activations = Mapping[Kind, Sequence[Tensor]]


class Accumulator:
    """A store that is being written; holds its lock until it is closed.

    A context manager. Leaving it commits nothing: what came after the last commit is captured again on resume, so that where
    the buffer is emptied, and with it every bit, does not depend on interruptions.

    Attributes:
        path: the store's folder.
        cursor: of the last commit; None for a fresh store.
        finished: whether the last commit finished the store.
        product_seconds: time spent in matrix products and sums.
    """

    def __init__(self, writer: StoreWriter, memory_budget: int, device: torch.device | str | None) -> None:
        record = writer.record
        self.path = writer.root
        self.cursor: Any = record.cursor
        self.finished = record.finished
        self.product_seconds = 0.0
        self._writer = writer
        self._layout: Layout = writer.layout
        self._device = None if device is None else torch.device(device)
        fits = max(1, min(LARGEST_BUFFER, int(memory_budget * BUFFER_SHARE) // self._layout.token_bytes))
        # The number of an earlier run gives the same bits again; it gives way where it no longer fits.
        self._capacity = min(fits, record.buffer_tokens or fits)
        self._rows: dict[Part, int] = {"fit": 0, "holdout": 0}
        self._tokens: dict[Part, int] = {"fit": record.tokens.fit, "holdout": record.tokens.holdout}
        self._batches = record.batches
        self._next_cursor: Any = record.cursor
        self._buffer: dict[Kind, Tensor] = {}
        self._shift: dict[Kind, Tensor] = {}
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
            memory_budget: bytes for the token buffer and the blocks on their way to disk.
            device: where buffer and products are; by default where the first batch's source activations are.

        Raises:
            StoreError: `path` exists, is being written by another process, or cannot be written.
        """
        layout = Layout(source, target, inputs, stats_dtype)
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
    def disk_seconds(self) -> float:
        """Time spent in reading, hashing and writing chunks; overlaps with `product_seconds`."""
        return self._writer.disk_seconds

    @property
    def buffer_tokens(self) -> int:
        """Tokens that the buffer holds."""
        return self._capacity

    def add(self, split: Literal["fit", "holdout"], source: Activations, target: Activations, cursor: Any) -> None:
        """Take one batch of a split; commits earlier ones when the buffer is full.

        Args:
            split: which statistics it belongs to.
            source, target: per kind, one tensor per layer, (N, F1) and (N, G1), of any float dtype and on any device. What is
                kept is copied.
            cursor: JSON value; where to continue once this batch is committed.

        Raises:
            MismatchError: shapes that are not those of the store's models, or token counts that differ between layers.
            StoreError: more than 1 % of the batches hold values that are not finite, or the disk refuses. The last commit
                stays readable; this object does not.
        """
        self._usable()
        n_tokens = self._check(split, source, target)
        with torch.no_grad(), self._failing(), moments.precise_matmul():
            if sum(self._rows.values()) and n_tokens > self._capacity - sum(self._rows.values()):
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
        self._buffer = {}
        self._writer.close()
        self._failed = self._failed or StoreError(f"{self.path} is closed; open it again with resume")

    def __enter__(self) -> Accumulator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def _check(self, split: str, source: Activations, target: Activations) -> int:
        if split not in SPLITS:
            raise MismatchError(f"split {split!r}, needs fit or holdout")
        n_tokens: int | None = None
        for name, model, given in (("source", self._layout.source, source), ("target", self._layout.target, target)):
            for kind in KINDS:
                layers = given.get(kind, ())
                if len(layers) != model.n_layers:
                    raise MismatchError(f"{name} gave {kind} of {len(layers)} layers, the store needs {model.n_layers}")
                for layer_index, rows in enumerate(layers):
                    n_tokens = rows.shape[0] if n_tokens is None and rows.ndim == 2 else n_tokens
                    if tuple(rows.shape) != (n_tokens, model.width) or not rows.is_floating_point():
                        raise MismatchError(
                            f"{name} {kind} of layer {layer_index} are {rows.dtype} {tuple(rows.shape)}, "
                            f"needs floats ({n_tokens}, {model.width})"
                        )
        return n_tokens or 0

    def _take(self, split: Part, source: Activations, target: Activations, n_tokens: int) -> BadValue | None:
        """Copy a batch into the buffer, or say what is wrong with it."""
        if not self._buffer:
            self._allocate(source["keys"][0].device)
        fresh = not self._shift
        if fresh:
            self._shift = {k: torch.cat([moments.shift_of(x).to(self._at) for x in _layers(source, target, k)]) for k in KINDS}
        pieces = range(0, n_tokens, self._capacity)
        for start in pieces:
            bad = self._load_piece(split, source, target, start, min(start + self._capacity, n_tokens))
            if bad is not None:
                self._shift = {} if fresh else self._shift
                return bad
        if len(pieces) > 1:  # larger than the buffer, which is empty then: piece by piece, one commit for all
            for start in pieces:
                stop = min(start + self._capacity, n_tokens)
                self._load_piece(split, source, target, start, stop)
                self._rows[split] = stop - start
                if stop < n_tokens:
                    self._flush()
        else:
            self._rows[split] += n_tokens
        self._tokens[split] += n_tokens
        return None

    def _load_piece(self, split: Part, source: Activations, target: Activations, start: int, stop: int) -> BadValue | None:
        n_tokens, kept = stop - start, self._rows[split]
        first = kept if split == "fit" else self._capacity - kept - n_tokens
        peaks = []
        for kind in KINDS:
            rows, column = self._buffer[kind][first : first + n_tokens], 0
            for layer in _layers(source, target, kind):
                place = rows[:, column : column + layer.shape[1]]
                shift = self._shift[kind][column : column + layer.shape[1]]
                if layer.dtype == torch.float64:
                    place.copy_(layer[start:stop].to(self._at) - shift)
                else:
                    place.copy_(layer[start:stop]).sub_(shift)
                low, high = place.aminmax()
                peaks.append(torch.maximum(-low, high))
                column += layer.shape[1]
        good = torch.stack(peaks) < LARGEST_VALUE  # false for NaN
        if bool(good.all()):
            return None
        number = int(good.to(torch.int8).argmin())
        n_source, n_target = self._layout.source.n_layers, self._layout.target.n_layers
        kind, layer_index = KINDS[number // (n_source + n_target)], number % (n_source + n_target)
        if layer_index < n_source:
            return BadValue("source", kind, layer_index)
        return BadValue("target", kind, layer_index - n_source)

    def _allocate(self, device: torch.device) -> None:
        self._at = self._device or (device if device.type != "mps" else torch.device("cpu"))  # sums need float64
        width = sum(self._layout.widths)
        self._buffer = {kind: torch.empty(self._capacity, width, dtype=torch.float32, device=self._at) for kind in KINDS}
        self._shift = {kind: shift.to(self._at) for kind, shift in self._shift.items()}

    def _check_share(self) -> None:
        seen, quarantined, first = self._batches.seen, self._batches.quarantined, self._batches.first
        if first is not None and quarantined > QUARANTINE_SHARE * seen:
            raise StoreError(
                f"{quarantined} of {seen} batches hold values that are not finite, first the {first.kind} of {first.model} "
                f"layer {first.layer_index}; at most 1 % may; run the models in bfloat16 or float32"
            )

    # -- flush and commit ---------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Update every block of every split that has rows in the buffer."""
        for split in SPLITS:
            n_rows = self._rows[split]
            if n_rows == 0:
                continue
            first = 0 if split == "fit" else self._capacity - n_rows
            rows = {kind: self._buffer[kind][first : first + n_rows] for kind in KINDS}
            digests = self._writer.start()
            with ThreadPoolExecutor(1, "kvfit-store") as pool:
                waiting: deque[Future[None]] = deque()
                for array in self._layout.blocks:
                    for numbers in _units(array):
                        total = self._products(array, numbers, rows)
                        waiting.append(pool.submit(self._store, split, array, numbers, total, digests[array]))
                        if len(waiting) > UNITS_IN_FLIGHT:
                            waiting.popleft().result()
                for future in waiting:
                    future.result()
            self._add_sums(split, rows)
            self._writer.end(split, digests, {name: total.cpu().numpy() for name, total in self._sums[split].items()})
            self._rows[split] = 0

    def _products(self, array: BlockArray, numbers: range, rows: Mapping[Kind, Tensor]) -> Tensor:
        """Sums of products of the pairs of some consecutive chunks, (pairs, rows, columns) float64 on the host."""
        started = time.perf_counter()
        chunks = [array.chunks[number] for number in numbers]
        first, last, top, bottom = chunks[0].first, chunks[-1].last, chunks[0].top, chunks[-1].bottom
        total = torch.zeros(last - first, bottom - top, array.columns, dtype=torch.float64, device=self._at)
        offset = 0 if array.role == "source" else self._layout.widths[0]
        pair = first
        while pair < last:  # one product for all right-hand blocks of a left-hand one
            left, right = array.pairs[pair]
            n_pairs = min(last - pair, array.n_right - right)
            begin = offset + right * array.columns
            moments.add_products(
                total[pair - first : pair - first + n_pairs],
                rows[array.kinds[0]][:, left * array.rows + top : left * array.rows + bottom],
                rows[array.kinds[1]][:, begin : begin + n_pairs * array.columns],
            )
            pair += n_pairs
        total = total.cpu()
        self.product_seconds += time.perf_counter() - started
        return total

    def _store(self, split: Part, array: BlockArray, numbers: range, total: Tensor, digests: list[str]) -> None:
        first = array.chunks[numbers[0]].first
        for number in numbers:
            chunk = array.chunks[number]
            addition = total[chunk.first - first : chunk.last - first].numpy()
            digests[number] = self._writer.add_to_chunk(split, array, number, addition)

    def _add_sums(self, split: Part, rows: Mapping[Kind, Tensor]) -> None:
        started = time.perf_counter()
        sums, (n_source, _) = self._sums[split], self._layout.widths
        for index, kind in enumerate(KINDS):
            for name, side in (("source_sum", rows[kind][:, :n_source]), ("target_sum", rows[kind][:, n_source:])):
                layers, width = sums[name].shape[1:]
                for layer_index in range(layers):
                    columns = side[:, layer_index * width : (layer_index + 1) * width]
                    moments.add_sums(sums[name][index, layer_index], columns.cpu())
                    if name == "target_sum":
                        moments.add_squares(sums["target_square"][index, layer_index], columns.cpu())
        self.product_seconds += time.perf_counter() - started

    def _commit(self, *, finished: bool) -> None:
        writer = self._writer
        if self._shift and not writer.record.live.shift:
            writer.write_shifts(self._shifts_by_name())
        writer.commit(
            cursor=self._next_cursor,
            tokens=Tokens(self._tokens["fit"], self._tokens["holdout"]),
            batches=self._batches,
            buffer_tokens=self._capacity if self._shift else None,
            finished=finished,
        )
        self.cursor, self.finished = writer.record.cursor, finished

    def _shifts_by_name(self) -> dict[str, Array]:
        n_source = self._layout.widths[0]
        both = torch.stack([self._shift[kind] for kind in KINDS]).cpu()  # (2, source and target features)
        source, target = (array.shape for array in self._layout.shifts)
        return {
            "shift/source": both[:, :n_source].reshape(source).numpy(),
            "shift/target": both[:, n_source:].reshape(target).numpy(),
        }

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
            source, target = (torch.from_numpy(writer.read_vector(array.name, array)) for array in layout.shifts)
            self._shift = {kind: torch.cat([source[i].flatten(), target[i].flatten()]) for i, kind in enumerate(KINDS)}

    # -- failure ------------------------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._failed is not None:
            raise StoreError(f"{self.path} cannot be written on after an error ({self._failed}); open it again with resume")

    def _failing(self) -> _Failing:
        return _Failing(self)


class _Failing:
    """Remembers an error, so that nothing is committed after it, and turns the disk's into a `StoreError`."""

    def __init__(self, owner: Accumulator) -> None:
        self.owner = owner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return
        self.owner._failed = error
        if isinstance(error, OSError):
            raise StoreError(
                f"{self.owner.path} cannot be written: {error}; the last commit is intact: "
                "free space and run again with --resume"
            ) from error


def _layers(source: Activations, target: Activations, kind: Kind) -> list[Tensor]:
    return [*source[kind], *target[kind]]


def _units(array: BlockArray) -> Iterator[range]:
    """Runs of consecutive chunks that are summed at a time, each within `UNIT_NUMBERS` or a single chunk."""
    deep, high, columns = array.chunk_shape
    at_once = max(1, UNIT_NUMBERS // (deep * high * columns)) if high >= array.rows else 1
    for start in range(0, len(array.chunks), at_once):
        yield range(start, min(start + at_once, len(array.chunks)))


def _as_json(recipe: dict[str, Any]) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(json.dumps(recipe, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the recipe holds a value that is not JSON: {error}") from error
    return value
