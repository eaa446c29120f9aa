"""`Store` reads the statistics on disk.

It returns centred scatters, means and counts of any pair of blocks. Each is read from disk when it is needed and checked
against the commit record. `Accumulator`, which writes stores, can be imported from here too. docs/reference/store-format.md
describes the format.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import StoreError
from kvfit.fit.stats import moments
from kvfit.fit.stats.accumulate import Accumulator
from kvfit.fit.stats.layout import (
    GROUPS,
    SPLITS,
    Block,
    BlockArray,
    InputBlock,
    Part,
    Split,
    VectorArray,
    array_path,
    vector_of,
)
from kvfit.fit.stats.record import Array, Record, read_chunk, read_record
from kvfit.spec import KINDS, Inputs, ModelSpec

__all__ = ["Accumulator", "Block", "InputBlock", "Split", "Store"]

# The chunks of narrow models hold many blocks; with a few of them in memory, a chunk need not be read once per block.
CACHE_BYTES = 64_000_000


class Store:
    """A finished store, open for reading.

    Attributes:
        path: the store's folder.
        source, target: the two models.
        inputs: ``same`` or ``both``.
        lexical_lags: the lags of the lexical inputs; empty where there are none.
        recipe: what the statistics were made from.
        finished: True for every store that `open` returns.
        bytes_read: the bytes of chunks that have been read from disk.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.source: ModelSpec = record.source
        self.target: ModelSpec = record.target
        self.inputs: Inputs = record.inputs
        self.lexical_lags: tuple[int, ...] = record.lexical_lags
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
            StoreError: there is no store, it is not finished, its record is damaged, or its format is newer.
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
        """N, the number of tokens in a split's sums."""
        return sum(getattr(self.record.tokens, part) for part in _parts(split))

    def quarantined(self) -> dict[str, Any]:
        """The numbers of ``seen`` and ``quarantined`` batches, and where the ``first`` bad value was, or None."""
        batches = self.record.batches
        first = None if batches.first is None else vars(batches.first)
        return {"seen": batches.seen, "quarantined": batches.quarantined, "first": first}

    def source_scatter(self, split: Split, a: InputBlock, b: InputBlock) -> Tensor:
        """The scatter of two input blocks about the split's own means, (F_a, F_b) float64; rows are features of `a`.

        An input block is ``("keys", layer)`` or ``("values", layer)`` of the source, with F1 features, or ``("lexical", n)``
        for the n-th of `lexical_lags`: the target's layer-0 keys and values of the token that many places earlier, with 2 * G1
        features.

        Raises:
            StoreError: a block that the store does not hold, or a damaged chunk.
        """
        self._check(a, "source")
        self._check(b, "source")
        if (GROUPS.index(a[0]), a[1]) > (GROUPS.index(b[0]), b[1]):
            return self.source_scatter(split, b, a).T.contiguous()
        left, right = self._sum(split, "source", a), self._sum(split, "source", b)
        scatter = moments.centre(self._products(split, "source", a, b), left, right, self.count(split))
        return (scatter + scatter.T) / 2 if a == b else scatter  # a float32 product is symmetric up to rounding

    def cross_scatter(self, split: Split, a: InputBlock, b: Block) -> Tensor:
        """The scatter of input block `a` and target block `b` about the split's own means, (F_a, G1) float64.

        Raises:
            StoreError: a block that the store does not hold, or a damaged chunk.
        """
        self._check(a, "source")
        self._check(b, "target")
        products = self._products(split, "cross", a, b)
        return moments.centre(products, self._sum(split, "source", a), self._sum(split, "target", b), self.count(split))

    def source_mean(self, split: Split, a: InputBlock) -> Tensor:
        """The mean of an input block, (F_a,) float64."""
        self._check(a, "source")
        return moments.mean(self._shift("source", a), self._sum(split, "source", a), self.count(split))

    def target_mean(self, split: Split, b: Block) -> Tensor:
        """The mean of a target block, (G1,) float64."""
        self._check(b, "target")
        return moments.mean(self._shift("target", b), self._sum(split, "target", b), self.count(split))

    def target_scatter(self, split: Split, b: Block) -> Tensor:
        """The sum of squares of each output of a target block about its mean, (G1,) float64."""
        self._check(b, "target")
        squares = self.sums(split, "target_square")[vector_of("target", b[0])[1], b[1], : self._width("target", b)]
        return moments.centre_squares(squares, self._sum(split, "target", b), self.count(split))

    def sums(self, split: Split, name: str) -> Tensor:
        """A small array of sums about the shift, such as ``source_sum``, (kinds, layers or lags, features) float64."""
        array = next(array for array in self._layout.sums if array.name == name)
        total = torch.zeros(array.shape, dtype=torch.float64)
        for part in _parts(split):
            generation = self.record.live.of(part)
            if generation is not None:
                total += self._vector(array_path(part, generation, array), array)
        return total

    def shift(self, array: VectorArray) -> Tensor:
        """The shift, (2, layers, features) float32; zero in a store without tokens."""
        return self._vector(array.name, array) if self.record.live.shift else torch.zeros(array.shape)

    def chunk(self, part: Part, array: BlockArray, number: int) -> Array:
        """Read and check one chunk of a split that has tokens; its numbers are about the shifts.

        Raises:
            StoreError: the chunk is missing or was altered; the message names the array and the chunk.
        """
        generation = self.record.live.of(part)
        if generation is None:
            raise StoreError(f"{self.path} has no tokens in its {part} split, so no chunk of {array.name}")
        return self._read(array_path(part, generation, array), array, number)

    def verify(self) -> None:
        """Read and check every chunk.

        Raises:
            StoreError: a chunk is missing or was altered; the message names the array and the chunk.
        """
        for path, array in self.record.live_arrays().items():
            for number in range(len(array.chunks)):
                self._read(path, array, number)

    def _check(self, block: InputBlock, model: Literal["source", "target"]) -> None:
        group, index = block
        if group == "lexical" and model == "source":
            if not 0 <= index < len(self.lexical_lags):
                lags = ", ".join(map(str, self.lexical_lags)) or "none"
                raise StoreError(f"{self.path} has no lexical block {index}, its lags are {lags}; capture with --lexical")
        elif group not in KINDS or not 0 <= index < getattr(self, model).n_layers:
            raise StoreError(f"{self.path} has no {model} block {block}; layers are 0..{getattr(self, model).n_layers - 1}")

    def _products(self, split: Split, role: Any, a: InputBlock, b: InputBlock) -> Tensor:
        array = self._layout.block(role, a[0], b[0])
        if array is None:
            raise StoreError(f"{self.path} holds no {a[0]} by {b[0]} blocks: capture with inputs=both")
        width = self._width("source", a), self._width("source" if role == "source" else "target", b)
        total = torch.zeros(array.rows, array.columns, dtype=torch.float64)
        pair = array.pair_index(a[1], b[1])
        for part in _parts(split):
            if self.record.live.of(part) is not None:
                for number in array.chunk_numbers(pair):
                    chunk = array.chunks[number]
                    band = self._cached(part, array, number)[pair - chunk.first, : chunk.bottom - chunk.top]
                    total[chunk.top : chunk.bottom] += torch.from_numpy(band.astype("f8"))
        return total[: width[0], : width[1]]

    def _width(self, model: Literal["source", "target"], block: InputBlock) -> int:
        """Features of a block; its array may have more rows or columns."""
        group, index = block
        if group == "lexical":
            return self._layout.lexical_width
        spec: ModelSpec = getattr(self, model)
        return spec.width_of(group, index)

    def _sum(self, split: Split, model: Literal["source", "target"], block: InputBlock) -> Tensor:
        name, place = vector_of(model, block[0])
        return self.sums(split, f"{name}_sum")[place, block[1], : self._width(model, block)]

    def _shift(self, model: Literal["source", "target"], block: InputBlock) -> Tensor:
        name, place = vector_of(model, block[0])
        array = next(array for array in self._layout.shifts if array.name == f"shift/{name}")
        return self.shift(array)[place, block[1], : self._width(model, block)]

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
