"""`BlockUpdater` adds rows of activations to every block of a split on disk, while products and disk work overlap."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.fit.stats import moments
from kvfit.fit.stats.layout import BlockArray, Group, Layout, Part
from kvfit.fit.stats.writer import StoreWriter

UNIT_NUMBERS = 8 * 2**20  # this many float64 numbers of blocks, 64 MiB, are summed at a time
SLOTS = 3  # one is being summed, one is being written, one waits
WRITING_THREADS = min(4, os.cpu_count() or 1)  # most of the time is spent in hashing, which runs outside Python's lock


@dataclass(frozen=True)
class _Slot:
    """Memory for the sums of one unit, which is reused: new memory of this size costs a tenth of the products.

    Attributes:
        total: the sums, float64, on the device of the rows.
        host: the sums on the host; the same memory where the rows are on the host.
        copied: on a graphics card, marks when `total` has been copied to `host`.
    """

    total: Tensor
    host: Tensor
    copied: CopyDone | None


class BlockUpdater:
    """Multiplies on the calling thread and reads, hashes and writes chunks on others.

    From a graphics card only finished blocks are copied to the host, while the next ones are being summed. One thread writes
    each chunk once, so the bits depend neither on the number of threads nor on their speed.

    Attributes:
        product_seconds: the time in matrix products; on a graphics card, the time to start them.
        wait_seconds: the time in which the products waited for the disk.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self.product_seconds = 0.0
        self.wait_seconds = 0.0
        self._writer = writer
        self._units = [(array, numbers) for array in writer.layout.blocks for numbers in units(array)]
        self._free_slots: list[_Slot] = []
        self._writing: deque[tuple[_Slot, list[Future[None]]]] = deque()  # slots whose chunks are being written, oldest first
        self._product: Tensor | None = None

    def update(self, split: Part, rows: Mapping[Group, Tensor]) -> dict[BlockArray, list[str]]:
        """Add the products of some rows to every block of a split.

        Args:
            split: the split.
            rows: the shifted rows, from `TokenBuffer.rows`.

        Returns:
            The digests of the chunks that were written, per array, for `StoreWriter.end`.

        Raises:
            StoreError: a stored chunk is missing or was altered.
            OSError: the disk fails.
        """
        self._allocate(rows["keys"].device)
        digests = {array: [""] * len(array.chunks) for array in self._writer.layout.blocks}
        with ThreadPoolExecutor(WRITING_THREADS, "kvfit-store") as pool:
            for array, numbers in self._units:
                slot = self._free_slots.pop() if self._free_slots else self._written_slot()
                total = self._sum(slot, array, numbers, rows)
                first, jobs = array.chunks[numbers[0]].first, []
                for number in numbers:
                    addition = total[array.chunks[number].first - first : array.chunks[number].last - first]
                    jobs.append(pool.submit(self._store, split, array, number, slot, addition, digests[array]))
                self._writing.append((slot, jobs))
            while self._writing:
                self._free_slots.append(self._written_slot())
        return digests

    def free(self) -> None:
        """Free the memory."""
        self._free_slots, self._product = [], None
        self._writing.clear()

    def _allocate(self, device: torch.device) -> None:
        if self._product is not None:
            return
        largest = max(unit_numbers(array, numbers) for array, numbers in self._units)
        self._product = torch.empty(largest, dtype=torch.float32, device=device)
        cuda = device.type == "cuda"
        # Pinned memory and events belong to the current card.
        with torch.cuda.device(device) if cuda else contextlib.nullcontext():
            for _ in range(SLOTS):
                total = torch.empty(largest, dtype=torch.float64, device=device)
                host = total if device.type == "cpu" else torch.empty(largest, dtype=torch.float64, pin_memory=cuda)
                self._free_slots.append(_Slot(total, host, CopyDone(device) if cuda else None))

    def _written_slot(self) -> _Slot:
        """Wait for the chunks of the oldest slot and return it; an error in writing them is raised here."""
        started = time.perf_counter()
        slot, jobs = self._writing.popleft()
        for job in jobs:
            job.result()
        self.wait_seconds += time.perf_counter() - started
        return slot

    def _sum(self, slot: _Slot, array: BlockArray, numbers: range, rows: Mapping[Group, Tensor]) -> Tensor:
        """The sums of products for the pairs of some consecutive chunks, (pairs, rows, columns) float64 on the host."""
        started = time.perf_counter()
        assert self._product is not None
        total = sum_unit(slot.total, self._product, self._writer.layout, array, numbers, rows)
        host = slot.host[: total.numel()].view(total.shape)
        if slot.host is not slot.total:
            host.copy_(total, non_blocking=True)
        if slot.copied is not None:
            slot.copied.record()
        self.product_seconds += time.perf_counter() - started
        return host

    def _store(self, split: Part, array: BlockArray, number: int, slot: _Slot, addition: Tensor, digests: list[str]) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()
        digests[number] = self._writer.add_to_chunk(split, array, number, addition.numpy())


class CopyDone:
    """Tells when a copy from a graphics card has arrived on the host.

    The event is made on the card that copies and recorded on that card's own stream. The current device may be another card,
    whose event would be done before the copy is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark the end of the copies that have been started."""
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait until the marked copies are done."""
        self._event.synchronize()


def sum_unit(
    total: Tensor, product: Tensor, layout: Layout, array: BlockArray, numbers: range, rows: Mapping[Group, Tensor]
) -> Tensor:
    """Compute the sums of products for the pairs of some consecutive chunks.

    Args:
        total, product: memory for the sums, float64, and for one product, float32, flat and at least as long.
        layout: the store's layout.
        array, numbers: the array, and the numbers of its chunks.
        rows: the shifted rows, from `TokenBuffer.rows`.

    Returns:
        (pairs, rows, columns) float64, in `total`.
    """
    first, last, top, bottom = _extent(array, numbers)
    total = total[: unit_numbers(array, numbers)].view(last - first, bottom - top, array.columns)
    offset = 0 if array.role == "source" else layout.widths[0]
    pair = first
    while pair < last:  # one product for each left block and all of its right blocks
        left, right = array.pairs[pair]
        n_pairs = min(last - pair, array.n_right - right)
        begin = offset + right * array.columns
        moments.sum_products(
            total[pair - first : pair - first + n_pairs],
            rows[array.groups[0]][:, left * array.rows + top : left * array.rows + bottom],
            rows[array.groups[1]][:, begin : begin + n_pairs * array.columns],
            scratch=product,
        )
        pair += n_pairs
    return total


def working_bytes(layout: Layout) -> int:
    """The bytes that it takes to update the blocks of a store and to write them, whatever the number of tokens."""
    largest = max(unit_numbers(array, numbers) for array in layout.blocks for numbers in units(array))
    # Sums in float64 and one product in float32; in every thread a chunk as it was read and as it will be written.
    return largest * (8 * SLOTS + 4) + 2 * WRITING_THREADS * max(array.chunk_bytes for array in layout.blocks)


def units(array: BlockArray) -> Iterator[range]:
    """Runs of consecutive chunks that are summed at a time: at most `UNIT_NUMBERS` numbers, or a single chunk."""
    deep, high, columns = array.chunk_shape
    at_once = max(1, UNIT_NUMBERS // (deep * high * columns)) if high >= array.rows else 1
    for start in range(0, len(array.chunks), at_once):
        yield range(start, min(start + at_once, len(array.chunks)))


def _extent(array: BlockArray, numbers: range) -> tuple[int, int, int, int]:
    chunks = [array.chunks[number] for number in numbers]
    return chunks[0].first, chunks[-1].last, chunks[0].top, chunks[-1].bottom


def unit_numbers(array: BlockArray, numbers: range) -> int:
    """The number of numbers in the blocks of some consecutive chunks."""
    first, last, top, bottom = _extent(array, numbers)
    return (last - first) * (bottom - top) * array.columns
