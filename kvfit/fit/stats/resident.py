"""`ResidentBlocks` keeps every block of a store in memory and writes them to disk only at snapshots.

The arithmetic is that of `BlockUpdater`: the same products, added in float64 to the stored numbers and rounded to the stored
dtype once per flush. So a store has the same bits whether its blocks were in memory or on disk, and however often it was
written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kvfit.fit.stats.layout import SPLITS, BlockArray, Group, Layout, Part
from kvfit.fit.stats.updater import WRITING_THREADS, sum_unit, unit_numbers, units
from kvfit.fit.stats.writer import StoreWriter


class ResidentBlocks:
    """The blocks of all splits: one tensor of the stored dtype for each chunk, on the device that multiplies.

    Attributes:
        changed: the splits whose blocks differ from those that were written last.
        product_seconds: the time in matrix products and additions; on a graphics card, the time to start them.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self.changed: set[Part] = set()
        self.product_seconds = 0.0
        self._writer = writer
        self._layout: Layout = writer.layout
        self._chunks: dict[Part, dict[BlockArray, list[Tensor]]] = {}
        self._scratch: tuple[Tensor, Tensor] | None = None

    def update(self, split: Part, rows: Mapping[Group, Tensor]) -> None:
        """Add the products of some rows to every block of a split.

        Args:
            split: the split.
            rows: the shifted rows, from `TokenBuffer.rows`.

        Raises:
            StoreError: a chunk of the last commit, which is read first, is missing or was altered.
        """
        started = time.perf_counter()
        device = rows["keys"].device
        if self._scratch is None:
            largest = max(unit_numbers(array, numbers) for array in self._layout.blocks for numbers in units(array))
            self._scratch = (
                torch.empty(largest, dtype=torch.float64, device=device),
                torch.empty(largest, dtype=torch.float32, device=device),
            )
        fresh = split not in self._chunks and self._writer.record.live.of(split) is None
        if split not in self._chunks:
            self._chunks[split] = {array: self._start(split, array, device) for array in self._layout.blocks}
        for array in self._layout.blocks:
            for numbers in units(array):
                total = sum_unit(self._scratch[0], self._scratch[1], self._layout, array, numbers, rows)
                first = array.chunks[numbers[0]].first
                for number in numbers:
                    chunk, stored = array.chunks[number], self._chunks[split][array][number]
                    inside = stored[: chunk.last - chunk.first, : chunk.bottom - chunk.top]
                    addition = total[chunk.first - first : chunk.last - first]
                    # In place, in the scratch memory: new memory for the sum of every chunk costs more than the addition.
                    inside.copy_(addition if fresh else addition.add_(inside))
        self.changed.add(split)
        self.product_seconds += time.perf_counter() - started

    def write(self, sums: Mapping[Part, Mapping[str, Tensor]]) -> None:
        """Write the changed splits, with several threads, to the generations that the next commit makes live.

        Args:
            sums: per split, the small arrays by name.

        Raises:
            OSError: the disk fails.
        """
        for split in [split for split in SPLITS if split in self.changed]:
            jobs = [(array, number) for array in self._layout.blocks for number in range(len(array.chunks))]

            def write(job: tuple[BlockArray, int], split: Part = split) -> str:
                array, number = job
                return self._writer.write_chunk(split, array, number, self._chunks[split][array][number].cpu().numpy())

            with ThreadPoolExecutor(WRITING_THREADS, "kvfit-store") as pool:
                written = list(pool.map(write, jobs))
            digests: dict[BlockArray, list[str]] = {array: [] for array in self._layout.blocks}
            for (array, _), digest in zip(jobs, written, strict=True):
                digests[array].append(digest)
            self._writer.end(split, digests, {name: total.numpy() for name, total in sums[split].items()})
        self.changed = set()

    def free(self) -> None:
        """Free the memory."""
        self._chunks, self._scratch = {}, None

    def _start(self, split: Part, array: BlockArray, device: torch.device) -> list[Tensor]:
        """The chunks of the last commit, or zeros."""
        numbers = range(len(array.chunks))
        if self._writer.record.live.of(split) is None:
            dtype = getattr(torch, array.dtype)
            return [torch.zeros(array.chunk_shape, dtype=dtype, device=device) for _ in numbers]
        return [torch.from_numpy(self._writer.read_block(split, array, number).copy()).to(device) for number in numbers]


def resident_bytes(layout: Layout) -> int:
    """The bytes that the blocks of both splits and their sums take in memory."""
    largest = max(unit_numbers(array, numbers) for array in layout.blocks for numbers in units(array))
    chunk = max(array.chunk_bytes for array in layout.blocks)
    return 2 * layout.split_bytes + 12 * largest + chunk * (3 + WRITING_THREADS)
