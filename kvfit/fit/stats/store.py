"""Store: the read side of the statistics on disk.

`Store` gives centred scatters, means and counts of any pair of blocks, each read from disk when asked for and checked
against the commit record. `Accumulator`, the write side, is here under the same roof for whoever captures. The format is
docs/reference/store-format.md.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import StoreError
from kvfit.fit.stats import moments
from kvfit.fit.stats.accumulate import Accumulator
from kvfit.fit.stats.layout import SPLITS, Block, BlockArray, Part, Split, VectorArray, array_path
from kvfit.fit.stats.record import Array, Record, read_chunk, read_record
from kvfit.spec import KINDS, Inputs, ModelSpec

__all__ = ["Accumulator", "Block", "Split", "Store"]

# Chunks of narrow models hold many blocks; keeping a few spares reading a chunk once per block.
CACHE_BYTES = 64_000_000


class Store:
    """A finished store, open for reading.

    Attributes:
        path: its folder.
        source, target: the models.
        inputs: ``same`` or ``both``.
        recipe: what the statistics were made from.
        finished: True for every store that `open` gives.
        bytes_read: bytes of chunks read from disk so far.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.source: ModelSpec = record.source
        self.target: ModelSpec = record.target
        self.inputs: Inputs = record.inputs
        self.recipe: dict[str, Any] = record.recipe
        self.finished: bool = record.finished
        self.bytes_read = 0
        self.record = record
        self._layout = record.layout
        self._cache: OrderedDict[tuple[Part, str, int], Array] = OrderedDict()
        self._vectors: dict[str, Tensor] = {}

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open a finished store.

        Raises:
            StoreError: there is none, it is not finished, its record is damaged, or its format is newer.
        """
        root = Path(path)
        record = read_record(root)
        if not record.finished:
            n_tokens = record.tokens.fit + record.tokens.holdout
            raise StoreError(
                f"{root} is incomplete: {n_tokens} tokens committed, but its capture has not finished; "
                "run the same kvfit capture again with --resume"
            )
        return cls(root, record)

    def count(self, split: Split) -> int:
        """N, the tokens in a split's sums."""
        return sum(getattr(self.record.tokens, part) for part in _parts(split))

    def quarantined(self) -> dict[str, Any]:
        """``seen`` and ``quarantined`` batches, and under ``first`` where the first bad value was (None for none)."""
        batches = self.record.batches
        first = None if batches.first is None else vars(batches.first)
        return {"seen": batches.seen, "quarantined": batches.quarantined, "first": first}

    def source_scatter(self, split: Split, a: Block, b: Block) -> Tensor:
        """Scatter of two source blocks about the split's own means, (F1, F1) float64; rows are features of `a`.

        Raises:
            StoreError: a block that the store does not hold, or a damaged chunk.
        """
        self._check(a, self.source, "source")
        self._check(b, self.source, "source")
        if (KINDS.index(a[0]), a[1]) > (KINDS.index(b[0]), b[1]):
            return self.source_scatter(split, b, a).T.contiguous()
        left, right = self._sum(split, "source_sum", a), self._sum(split, "source_sum", b)
        scatter = moments.centre(self._products(split, "source", a, b), left, right, self.count(split))
        return (scatter + scatter.T) / 2 if a == b else scatter  # a float32 product is symmetric but for its rounding

    def cross_scatter(self, split: Split, a: Block, b: Block) -> Tensor:
        """Scatter of source block `a` and target block `b` about the split's own means, (F1, G1) float64.

        Raises:
            StoreError: a block that the store does not hold, or a damaged chunk.
        """
        self._check(a, self.source, "source")
        self._check(b, self.target, "target")
        products = self._products(split, "cross", a, b)
        return moments.centre(products, self._sum(split, "source_sum", a), self._sum(split, "target_sum", b), self.count(split))

    def source_mean(self, split: Split, a: Block) -> Tensor:
        """Mean of a source block, (F1,) float64."""
        self._check(a, self.source, "source")
        return moments.mean(self._shift("shift/source", a), self._sum(split, "source_sum", a), self.count(split))

    def target_mean(self, split: Split, b: Block) -> Tensor:
        """Mean of a target block, (G1,) float64."""
        self._check(b, self.target, "target")
        return moments.mean(self._shift("shift/target", b), self._sum(split, "target_sum", b), self.count(split))

    def target_scatter(self, split: Split, b: Block) -> Tensor:
        """Sum of squares of each output of a target block about its mean, (G1,) float64."""
        self._check(b, self.target, "target")
        squares = self._sum(split, "target_square", b)
        return moments.centre_squares(squares, self._sum(split, "target_sum", b), self.count(split))

    def sums(self, split: Split, name: str) -> Tensor:
        """A small array about the shift: ``source_sum``, ``target_sum`` or ``target_square``, (2, layers, features) float64."""
        array = next(array for array in self._layout.sums if array.name == name)
        total = torch.zeros(array.shape, dtype=torch.float64)
        for part in _parts(split):
            generation = self.record.live.of(part)
            if generation is not None:
                total += self._vector(array_path(part, generation, array), array)
        return total

    def shift(self, array: VectorArray) -> Tensor:
        """The shift, (2, layers, features) float32; zero in a store that never saw a token."""
        return self._vector(array.name, array) if self.record.live.shift else torch.zeros(array.shape)

    def chunk(self, part: Part, array: BlockArray, number: int) -> Array:
        """One chunk of a split that has tokens, as stored (about the shifts) and checked.

        Raises:
            StoreError: missing or altered; names array and chunk.
        """
        generation = self.record.live.of(part)
        if generation is None:
            raise StoreError(f"{self.path} has no tokens in its {part} split, so no chunk of {array.name}")
        return self._read(array_path(part, generation, array), array, number)

    def verify(self) -> None:
        """Read every chunk.

        Raises:
            StoreError: names the first array and chunk that is missing or altered.
        """
        for path, array in self.record.live_arrays().items():
            for number in range(len(array.chunks)):
                self._read(path, array, number)

    def _check(self, block: Block, model: ModelSpec, name: str) -> None:
        kind, layer_index = block
        if kind not in KINDS or not 0 <= layer_index < model.n_layers:
            raise StoreError(f"{self.path} has no {name} block {block}; layers are 0..{model.n_layers - 1}")

    def _products(self, split: Split, role: Any, a: Block, b: Block) -> Tensor:
        array = self._layout.block(role, a[0], b[0])
        if array is None:
            raise StoreError(f"{self.path} holds no {a[0]} by {b[0]} blocks: capture with inputs=both")
        total = torch.zeros(array.rows, array.columns, dtype=torch.float64)
        pair = array.pair_index(a[1], b[1])
        for part in _parts(split):
            if self.record.live.of(part) is not None:
                for number in array.chunk_numbers(pair):
                    chunk = array.chunks[number]
                    band = self._cached(part, array, number)[pair - chunk.first, : chunk.bottom - chunk.top]
                    total[chunk.top : chunk.bottom] += torch.from_numpy(band.astype("f8"))
        return total

    def _sum(self, split: Split, name: str, block: Block) -> Tensor:
        return self.sums(split, name)[KINDS.index(block[0]), block[1]]

    def _shift(self, name: str, block: Block) -> Tensor:
        array = next(array for array in self._layout.shifts if array.name == name)
        return self.shift(array)[KINDS.index(block[0]), block[1]]

    def _vector(self, path: str, array: VectorArray) -> Tensor:
        if path not in self._vectors:
            self._vectors[path] = torch.from_numpy(self._read(path, array, 0).copy())
        return self._vectors[path]

    def _cached(self, part: Part, array: BlockArray, number: int) -> Array:
        key = (part, array.name, number)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        numbers = self._cache[key] = self.chunk(part, array, number)
        while len(self._cache) > 1 and sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return numbers

    def _read(self, path: str, array: BlockArray | VectorArray, number: int) -> Array:
        numbers = read_chunk(self.path, path, array, number, self.record.digests[path][number])
        self.bytes_read += numbers.nbytes
        return numbers


def _parts(split: Split) -> tuple[Part, ...]:
    if split == "all":
        return SPLITS
    if split in SPLITS:
        return (split,)
    raise StoreError(f"there is no split {split!r}; a store has fit, holdout and all")
