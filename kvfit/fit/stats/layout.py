"""The arrays of a store, the blocks that they hold, and how they are cut into chunks.

This is the only place that knows names, shapes and chunks; see docs/reference/store-format.md. All functions are pure, except
for `create_arrays`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvfit.spec import KINDS, Inputs, Kind, ModelSpec

# The features that are summed: the keys and values of a layer, and the lexical inputs of a lag (see `kvfit.spec.MapperSpec`).
Group = Literal["keys", "values", "lexical"]
Block = tuple[Kind, int]
InputBlock = tuple[Group, int]
Split = Literal["fit", "holdout", "all"]
Part = Literal["fit", "holdout"]
Generation = Literal["a", "b"]
StatsDtype = Literal["float32", "float64"]

GROUPS: tuple[Group, ...] = (*KINDS, "lexical")
SPLITS: tuple[Part, Part] = ("fit", "holdout")
GENERATIONS: tuple[Generation, Generation] = ("a", "b")
ITEM_BYTES = {"float32": 4, "float64": 8}
SMALLEST_CHUNK = 4_000_000  # bytes
LARGEST_CHUNK = 64_000_000


@dataclass(frozen=True)
class Chunk:
    """One chunk file of an array of blocks.

    Attributes:
        key: the file's name in the array's folder.
        first, last: it holds the pairs ``first <= p < last``.
        top, bottom: it holds the rows ``top <= r < bottom`` of each pair's matrix.
    """

    key: str
    first: int
    last: int
    top: int
    bottom: int


@dataclass(frozen=True)
class BlockArray:
    """An array of matrices, one per pair of blocks.

    Attributes:
        role: ``source`` for pairs of input blocks, ``cross`` for pairs of an input block and a target block.
        groups: the groups of the left and of the right block.
        n_left, n_right: the number of layers or lags on either side.
        rows, columns: the size of each matrix.
        dtype: the dtype of the stored numbers.
    """

    role: Literal["source", "cross"]
    groups: tuple[Group, Group]
    n_left: int
    n_right: int
    rows: int
    columns: int
    dtype: StatsDtype

    @property
    def name(self) -> str:
        """The array's path under the generation's folder."""
        return f"{self.role}/{self.groups[0]}-{self.groups[1]}"

    @property
    def vectors(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Where to find the sums and shifts of the left and of the right blocks, see `vector_of`."""
        return vector_of("source", self.groups[0]), vector_of("source" if self.role == "source" else "target", self.groups[1])

    @property
    def triangular(self) -> bool:
        """Whether only pairs i <= j are stored."""
        return self.role == "source" and self.groups[0] == self.groups[1]

    @property
    def n_pairs(self) -> int:
        """The number of matrices in the array."""
        return self.n_left * (self.n_left + 1) // 2 if self.triangular else self.n_left * self.n_right

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(left layer or lag, right layer or lag) of each matrix; the right one varies fastest."""
        return tuple((i, j) for i in range(self.n_left) for j in range(i if self.triangular else 0, self.n_right))

    def pair_index(self, left: int, right: int) -> int:
        """The index of the matrix of a pair of layers; left <= right where the array is triangular."""
        return left * self.n_right + right - (left * (left + 1) // 2 if self.triangular else 0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pairs, rows, columns)."""
        return (self.n_pairs, self.rows, self.columns)

    @cached_property
    def chunk_shape(self) -> tuple[int, int, int]:
        """As many matrices as reach 4 MB; where a single matrix is above 64 MB, a band of its rows."""
        matrix = self.rows * self.columns * ITEM_BYTES[self.dtype]
        if matrix > LARGEST_CHUNK:
            bands = math.ceil(matrix / LARGEST_CHUNK)
            return (1, math.ceil(self.rows / bands), self.columns)
        return (min(self.n_pairs, math.ceil(SMALLEST_CHUNK / matrix)), self.rows, self.columns)

    @property
    def chunk_bytes(self) -> int:
        """The length of every chunk file."""
        return math.prod(self.chunk_shape) * ITEM_BYTES[self.dtype]

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, in C order of the grid."""
        deep, high, _ = self.chunk_shape
        return tuple(
            Chunk(f"c.{p // deep}.{r // high}.0", p, min(p + deep, self.n_pairs), r, min(r + high, self.rows))
            for p in range(0, self.n_pairs, deep)
            for r in range(0, self.rows, high)
        )

    def chunk_numbers(self, pair: int) -> range:
        """The numbers of the chunks that hold the matrix of one pair."""
        bands = math.ceil(self.rows / self.chunk_shape[1])
        first = (pair // self.chunk_shape[0]) * bands
        return range(first, first + bands)


@dataclass(frozen=True)
class VectorArray:
    """A small array of one chunk: sums, squares and shifts, (2, layers, features)."""

    name: str
    shape: tuple[int, int, int]
    dtype: StatsDtype

    @property
    def chunk_bytes(self) -> int:
        """The length of the chunk file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def chunk_shape(self) -> tuple[int, int, int]:
        """The whole array."""
        return self.shape

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The only chunk."""
        return (Chunk("c.0.0.0", 0, self.shape[0], 0, self.shape[1]),)


@dataclass(frozen=True)
class Layout:
    """The arrays of one store.

    All blocks of a model have the rows or columns of its widest layer. A narrower layer's are followed by zeros, which
    `Store` leaves out again; so one array holds all layers, whatever their heads.

    Attributes:
        source, target: the two models.
        inputs: ``same`` or ``both``; see `kvfit.spec.MapperSpec`.
        stats_dtype: the dtype of the matrices.
        lexical_lags: the lags of the lexical inputs; see `kvfit.spec.MapperSpec`. Empty where there are none.
    """

    source: ModelSpec
    target: ModelSpec
    inputs: Inputs = "same"
    stats_dtype: StatsDtype = "float32"
    lexical_lags: tuple[int, ...] = ()

    @cached_property
    def blocks(self) -> tuple[BlockArray, ...]:
        """The arrays of matrices of each split."""
        groups = GROUPS if self.lexical_lags else GROUPS[:2]
        of_source, of_lexical = (self.source.n_layers, self.source.width), (len(self.lexical_lags), self.lexical_width)
        sizes: dict[Group, tuple[int, int]] = {"keys": of_source, "values": of_source, "lexical": of_lexical}
        target = (self.target.n_layers, self.target.width)
        source_pairs = [(a, b) for number, a in enumerate(groups) for b in groups[number:] if self._together(a, b)]
        cross_pairs = [(a, b) for a in groups for b in KINDS if self._together(a, b)]

        def array(role: Literal["source", "cross"], pair: tuple[Group, Group], right: tuple[int, int]) -> BlockArray:
            (n_left, rows), (n_right, columns) = sizes[pair[0]], right
            return BlockArray(role, pair, n_left, n_right, rows, columns, self.stats_dtype)

        return tuple(
            [array("source", pair, sizes[pair[1]]) for pair in source_pairs]
            + [array("cross", pair, target) for pair in cross_pairs]
        )

    def _together(self, a: Group, b: Group) -> bool:
        """Whether a map can read both groups: lexical inputs go with everything, keys and values go together for ``both``."""
        return a == b or self.inputs == "both" or "lexical" in (a, b)

    @cached_property
    def sums(self) -> tuple[VectorArray, ...]:
        """The small arrays of each split."""
        sums = [VectorArray(f"{name}_sum", shape, "float64") for name, shape in self._vectors.items()]
        return (*sums, VectorArray("target_square", self._vectors["target"], "float64"))

    @property
    def arrays(self) -> tuple[BlockArray | VectorArray, ...]:
        """All arrays of each split."""
        return (*self.blocks, *self.sums)

    @cached_property
    def shifts(self) -> tuple[VectorArray, ...]:
        """The arrays of shifts, shared by the splits."""
        return tuple(VectorArray(f"shift/{name}", shape, "float32") for name, shape in self._vectors.items())

    @property
    def _vectors(self) -> dict[str, tuple[int, int, int]]:
        shapes = {name: (2, model.n_layers, model.width) for name, model in (("source", self.source), ("target", self.target))}
        return shapes | ({"lexical": (1, len(self.lexical_lags), self.lexical_width)} if self.lexical_lags else {})

    @property
    def lexical_width(self) -> int:
        """The number of features in one lag's lexical inputs: the target's keys and values of its first layer."""
        return self.target.first_width

    @property
    def widths(self) -> tuple[int, int]:
        """The number of columns of one kind in all source layers and in all target layers, each as wide as the widest."""
        return self.source.n_layers * self.source.width, self.target.n_layers * self.target.width

    @property
    def token_bytes(self) -> int:
        """The bytes of one token in the buffer: both kinds of all layers of both models and the lexical inputs, in float32."""
        return 4 * (2 * sum(self.widths) + len(self.lexical_lags) * self.lexical_width)

    @property
    def split_bytes(self) -> int:
        """The bytes of one split's chunk files. A store has two splits, each in up to two generations while it is written."""
        return sum(array.chunk_bytes * len(array.chunks) for array in self.arrays)

    def block(self, role: Literal["source", "cross"], left: Group, right: Group) -> BlockArray | None:
        """The array of a role and two groups; None where the store has no such array."""
        return next((array for array in self.blocks if array.role == role and array.groups == (left, right)), None)

    def paths(self) -> Iterator[tuple[str, BlockArray | VectorArray]]:
        """Every array of the store, live or not, by its path."""
        for shift in self.shifts:
            yield shift.name, shift
        for split in SPLITS:
            for generation in GENERATIONS:
                for array in self.arrays:
                    yield array_path(split, generation, array), array


def vector_of(model: Literal["source", "target"], group: Group) -> tuple[str, int]:
    """Where the sums and shifts of a group of blocks are: X in the arrays ``X_sum`` and ``shift/X``, and the index there."""
    return ("lexical", 0) if group == "lexical" else (model, KINDS.index(group))


def array_path(split: Part, generation: Generation, array: BlockArray | VectorArray) -> str:
    """The path of an array of one split's generation, relative to the store."""
    return f"{split}/{generation}/{array.name}"


def create_arrays(root: Path, layout: Layout) -> None:
    """Write the Zarr metadata of every array of an empty store. `record` writes the chunk files."""
    import zarr

    group = zarr.create_group(str(root), zarr_format=3, attributes={"format": "kvfit-store"})
    for path, array in layout.paths():
        group.create_array(
            path,
            shape=array.shape,
            chunks=array.chunk_shape,
            dtype=array.dtype,
            compressors=None,
            filters=None,
            fill_value=0.0,
            chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},
            dimension_names=("pair", "row", "column") if isinstance(array, BlockArray) else ("kind", "layer", "feature"),
        )
