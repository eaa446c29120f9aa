"""The inputs of the maps: one matrix per chunk of tokens, with its columns in the order that the spec defines.

    source keys of the layers that are read, un-rotated | source values of the layers that are read | lexical inputs

A map reads one or more runs of adjacent columns. Lexical inputs are the (un-rotated) keys and values of the target's first
layer, for the token itself and for tokens before it; see `MapperSpec.lexical_lags`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.model.rope import angles, frequencies_of, per_feature, turn_into
from kvfit.spec import KINDS, Kind, MapperSpec, RopeTable

Pairs = list[tuple[Tensor, Tensor]]  # per layer keys and values, (B, H, T, D)
Runs = tuple[tuple[int, int], ...]


class Columns:
    """The positions of the inputs in the matrix, and the columns that each map reads.

    Attributes:
        read: per kind, the source layers whose keys or values at least one map reads, ascending.
        blocks: per (kind, source layer), its columns as [start, stop): H * D of them, or D if support is ``head``.
        lexical: first column of the lexical inputs.
        width: number of columns of the matrix.
        runs: per (kind, target layer), the columns that its map reads, as [start, stop) in the order of the weight's rows.
    """

    def __init__(self, spec: MapperSpec, wanted: Sequence[int]) -> None:
        """Lay out the inputs of the maps of some target layers."""
        self.read: dict[Kind, tuple[int, ...]] = {}
        for kind in KINDS:
            readers = KINDS if spec.inputs == "both" else (kind,)
            chosen = {i for layer in wanted for reader in readers for i in spec.layer(reader, layer).source_layers}
            self.read[kind] = tuple(sorted(chosen))
        self.blocks: dict[tuple[Kind, int], tuple[int, int]] = {}
        self.lexical = 0
        for kind in KINDS:
            for layer_index in self.read[kind]:
                heads, size = spec.source.shape(kind, layer_index)
                start, self.lexical = self.lexical, self.lexical + size * (heads if spec.support == "full" else 1)
                self.blocks[kind, layer_index] = (start, self.lexical)
        self.width = self.lexical + len(spec.lexical_lags) * spec.target.first_width
        self.runs: dict[tuple[Kind, int], Runs] = {}
        for layer_index in wanted:
            for kind in KINDS:
                blocks = [
                    self.blocks[read, i]
                    for read in (KINDS if spec.inputs == "both" else (kind,))
                    for i in spec.layer(kind, layer_index).source_layers
                ]
                self.runs[kind, layer_index] = _joined([*blocks, (self.lexical, self.width)])


def _joined(blocks: list[tuple[int, int]]) -> Runs:
    """The blocks with adjacent ones merged and empty ones removed."""
    runs: list[tuple[int, int]] = []
    for start, stop in blocks:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        elif stop > start:
            runs.append((start, stop))
    return tuple(runs)


def moved_to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on another device. The host waits for the copy only if it goes to the CPU."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


class Tables:
    """The distinct rotary tables of a mapper, with their frequencies on every device that has needed them.

    A mapper keeps this object, so that a transfer does not hash specs or wait for a device. Models of one family usually share
    a table; then source and target also share the cosines and sines of a chunk.
    """

    def __init__(self, spec: MapperSpec) -> None:
        """Collect the tables of both models. There are none if the maps work on rotated keys."""
        self.tables: list[RopeTable] = []
        self.source, self.target = (
            [None if spec.keys_rotated else self._number(model.rope.table(i)) for i in range(model.n_layers)]
            for model in (spec.source, spec.target)
        )
        self._kept: dict[tuple[int, torch.device], Tensor] = {}

    def _number(self, table: RopeTable | None) -> int | None:
        if table is None:
            return None
        if table not in self.tables:
            self.tables.append(table)
        return self.tables.index(table)

    def frequencies(self, number: int, device: torch.device) -> Tensor:
        """Inverse frequencies of a table, (R/2,) float32."""
        key = (number, device)
        if key not in self._kept:
            with torch.inference_mode(False):  # the tensor is kept beyond this call
                self._kept[key] = frequencies_of(self.tables[number], device)
        return self._kept[key]


class Angles:
    """Cosines and sines of one chunk's positions, computed once per table and device."""

    def __init__(self, tables: Tables, positions: Tensor) -> None:
        """Take the positions (T,) or (B, T) of the chunk."""
        self._tables = tables
        self._positions = positions
        self._made: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def turn(self, out: Tensor, keys: Tensor, number: int, *, inverse: bool = False) -> None:
        """Rotate keys (B, H, T, D) by a table into `out`, or undo the rotation; see `turn_into`."""
        device = keys.device
        table = self._tables.tables[number]
        if (number, device) not in self._made:
            frequencies = self._tables.frequencies(number, device)
            cos, sin = angles(table, moved_to(self._positions, device), frequencies=frequencies)
            self._made[number, device] = per_feature(cos, table), sin
        turn_into(out, keys, table, self._made[number, device], inverse=inverse)


class Buffers:
    """Working memory that chunks reuse, because new memory costs a page fault for every few thousand bytes."""

    def __init__(self) -> None:
        """Start without any memory."""
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor, valid until the same name is taken the next time."""
        key = (name, dtype, device)
        size = math.prod(shape)
        if key not in self._kept or self._kept[key].numel() < size:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self._kept[key][:size].view(*shape)


@dataclass(frozen=True)
class Part:
    """The sequences and tokens of one chunk."""

    rows: slice
    tokens: slice

    def of(self, states: Tensor) -> Tensor:
        """This part of keys or values, (B, H, T, D)."""
        return states[self.rows, :, self.tokens]

    def of_positions(self, positions: Tensor) -> Tensor:
        """This part of (T,) or (B, T) positions."""
        return positions[self.tokens] if positions.dim() == 1 else positions[self.rows, self.tokens]


def parts(batch: int, total: int, chunk_tokens: int) -> Iterator[Part]:
    """Chunks of at most `chunk_tokens` tokens: several whole sequences if they are short, else a piece of one.

    In both cases a chunk's rows are contiguous in a (B, T, ...) result.
    """
    if 0 < total <= chunk_tokens:
        step = chunk_tokens // total
        for first in range(0, batch, step):
            yield Part(slice(first, min(first + step, batch)), slice(0, total))
        return
    for row in range(batch):
        for start in range(0, total, chunk_tokens):
            yield Part(slice(row, row + 1), slice(start, min(start + chunk_tokens, total)))


def read_inputs(
    out: Tensor,
    spec: MapperSpec,
    columns: Columns,
    tables: Tables,
    pairs: Pairs,
    part: Part,
    turns: Angles,
    buffers: Buffers,
) -> None:
    """Write the source's inputs of one chunk into `out`: (1, n, width), or (H_source, n, width) if support is ``head``."""
    batch, n_tokens = part.of(pairs[0][0]).shape[0:3:2]
    seen = out.view(-1, batch, n_tokens, columns.width)  # (1 or H, B, T, width)
    wide = torch.promote_types(out.dtype, torch.float32)
    for (kind, layer_index), (start, stop) in columns.blocks.items():
        block = seen[..., start:stop]
        if spec.support == "full":
            shape = spec.source.shape(kind, layer_index)
            features = block[0].view(batch, n_tokens, *shape).transpose(1, 2)  # (B, H, T, D)
        else:
            features = block.transpose(0, 1)
        states = part.of(pairs[layer_index][KINDS.index(kind)])
        number = tables.source[layer_index] if kind == "keys" else None
        if number is None:
            features.copy_(states, non_blocking=out.device.type != "cpu")
            continue
        turned = features if out.dtype == wide else buffers.take("unrotated", states.shape, wide, out.device)
        turns.turn(turned, moved_to(states, out.device, wide), number, inverse=True)
        if turned is not features:
            features.copy_(turned)
