"""The arithmetic of a transfer: chunks of source features in, rows of the target's keys and values out.

A chunk holds the un-rotated features of every source layer that is read, side by side, in the dtype of the weights. A target
layer's map then reads its source layers as slices of that one matrix, without gathering them first, and writes into the result
itself wherever dtype and device allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.model.rope import angles, frequencies_of, turn_into
from kvfit.spec import KINDS, Kind, MapperSpec, ModelSpec, RopeTable

# Tokens mapped at a time: enough for the matrix products to run at full speed, few enough that a layer's outputs are still in
# the processor's cache when they are rotated, and that what is held beside the result stays small.
CHUNK_TOKENS = 1024

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Place:
    """Where a target layer's keys and values go."""

    device: torch.device
    dtype: torch.dtype


class Frequencies:
    """Inverse frequencies on every device that asked for them. A mapper keeps them, so that a transfer waits for no device."""

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}

    def of(self, table: RopeTable, device: torch.device) -> Tensor:
        """(R/2,) float32."""
        key = (table.inverse_frequencies, device)
        if key not in self._kept:
            with torch.inference_mode(False):  # it outlives the call that made it
                self._kept[key] = frequencies_of(table, device)
        return self._kept[key]


def map_layers(
    spec: MapperSpec,
    weights: Mapping[tuple[Kind, int], tuple[Tensor, Tensor]],
    frequencies: Frequencies,
    pairs: Pairs,
    positions: Tensor,
    places: Mapping[int, Place],
    chunk_tokens: int,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of the target layers in `places`.

    Args:
        spec: the mapper's.
        weights: per (kind, target layer), weight and bias.
        frequencies: kept from call to call.
        pairs: per source layer keys and values, (B, H, T, D), checked.
        positions: (T,) or (B, T).
        places: per wanted target layer, device and dtype of its result.
        chunk_tokens: tokens, over all sequences, mapped at a time.

    Returns:
        Per target layer keys and values, (B, H, T, D); in memory the tokens come before the heads.
    """
    target = spec.target
    batch, _, total, _ = pairs[0][0].shape
    out: dict[int, tuple[Tensor, Tensor]] = {}
    for layer_index, place in places.items():
        # (B, T, H, D): the order in which a matrix product makes its rows, so that it can write them in place.
        shape = (batch, total, target.n_heads, target.head_dim)
        keys, values = (torch.empty(shape, dtype=place.dtype, device=place.device) for _ in KINDS)
        out[layer_index] = (keys, values)
    reads = {kind: _layers_read(spec, kind, places) for kind in KINDS}
    buffers = _Buffers()
    for rows, part in _chunks(batch, total, chunk_tokens):
        chunk = _Chunk(
            spec,
            [(keys[rows, :, part], values[rows, :, part]) for keys, values in pairs],
            positions[..., part] if positions.dim() == 1 else positions[rows, part],
            reads,
            buffers,
            frequencies,
        )
        for layer_index, halves in out.items():
            for kind, half in zip(KINDS, halves, strict=True):
                chunk.write(kind, layer_index, *weights[kind, layer_index], half[rows, part])
    return {layer_index: (keys.transpose(1, 2), values.transpose(1, 2)) for layer_index, (keys, values) in out.items()}


def _chunks(batch: int, total: int, chunk_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Slices of sequences and tokens: whole sequences together while they are short, else pieces of one.

    Either way a chunk's rows lie one after another in a (B, T, ...) result.
    """
    if 0 < total <= chunk_tokens:
        step = chunk_tokens // total
        for first in range(0, batch, step):
            yield slice(first, min(first + step, batch)), slice(0, total)
        return
    for row in range(batch):
        for start in range(0, total, chunk_tokens):
            yield slice(row, row + 1), slice(start, min(start + chunk_tokens, total))


def _layers_read(spec: MapperSpec, kind: Kind, places: Mapping[int, Place]) -> tuple[int, ...]:
    """Source layers whose `kind` any wanted map reads, ascending."""
    kinds = KINDS if spec.inputs == "both" else (kind,)
    return tuple(sorted({i for layer in places for wanted in kinds for i in spec.layer(wanted, layer).source_layers}))


class _Buffers:
    """Working memory that one chunk after the other uses: fresh memory costs a page fault for every few thousand bytes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor; valid until the same name is taken again."""
        key = (name, dtype, device)
        size = math.prod(shape)
        if key not in self._kept or self._kept[key].numel() < size:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self._kept[key][:size].view(shape)


class _Chunk:
    """One chunk's features and the maps that read them; each source layer is un-rotated once, however many read it."""

    def __init__(
        self,
        spec: MapperSpec,
        pairs: Pairs,
        positions: Tensor,
        reads: Mapping[Kind, tuple[int, ...]],
        buffers: _Buffers,
        frequencies: Frequencies,
    ) -> None:
        self.spec = spec
        self.buffers = buffers
        self.frequencies = frequencies
        self.pairs = pairs
        self.positions = positions
        self.reads = reads
        self.batch, _, self.n_tokens, _ = pairs[0][0].shape
        self._features: dict[tuple[Kind, torch.dtype, torch.device], Tensor] = {}
        self._gathered: dict[Kind, tuple[object, Tensor]] = {}
        self._angles: dict[tuple[ModelSpec, int | None, torch.device], tuple[Tensor, Tensor]] = {}

    def write(self, kind: Kind, layer_index: int, weight: Tensor, bias: Tensor, result: Tensor) -> None:
        """Map one kind of one target layer into `result`, (B, T, H, D) with its rows one after another."""
        target = self.spec.target
        table = target.rope.table(layer_index) if kind == "keys" and not self.spec.keys_rotated else None
        shape, device = tuple(result.shape), weight.device
        direct = (result.dtype, result.device) == (weight.dtype, device)
        product = result if direct and table is None else self.buffers.take("product", shape, weight.dtype, device)
        self._product(kind, layer_index, weight, bias, product.view(-1, target.width))
        if table is not None:
            wide = _wide(weight.dtype)
            turned = result if direct and wide == weight.dtype else self.buffers.take("turned", shape, wide, device)
            turn_into(turned.transpose(1, 2), product.to(wide).transpose(1, 2), table, self._turns(target, layer_index, device))
            product = turned
        if product is not result:
            result.copy_(product)

    def _turns(self, model: ModelSpec, layer_index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer's table; they are the same for every layer that shares it."""
        key = (model, model.rope.assignment[layer_index], device)
        table = model.rope.table(layer_index)
        if key not in self._angles and table is not None:
            self._angles[key] = angles(table, self.positions.to(device), frequencies=self.frequencies.of(table, device))
        return self._angles[key]

    def _product(self, kind: Kind, layer_index: int, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """``out = features @ weight + bias``, out (B * T, G)."""
        if self.spec.support == "full":
            _accumulate(self._segments(kind, layer_index, weight, 0), weight, bias, out)
            return
        # A target head reads one source head; its columns of the result are written in place.
        source, target = self.spec.source, self.spec.target
        for head in range(target.n_heads):
            columns = slice(head * target.head_dim, (head + 1) * target.head_dim)
            read = head * source.n_heads // target.n_heads
            _accumulate(self._segments(kind, layer_index, weight, read), weight[head], bias[columns], out[:, columns])

    def _segments(self, kind: Kind, layer_index: int, weight: Tensor, head: int) -> list[Tensor]:
        """The map's inputs as matrices (B * T, any width) whose widths add up to F, in the order of the weight's rows."""
        chosen = self.spec.layer(kind, layer_index).source_layers
        segments: list[Tensor] = []
        for read in KINDS if self.spec.inputs == "both" else (kind,):
            features = self._matrix(read, weight.dtype, weight.device)[head]  # (B * T, layers read, width of a layer)
            for start, stop in _runs(chosen, self.reads[read]):
                segments.append(features[:, start:stop].flatten(1))
        # Sums of products are rounded once only if they are one product; and many small products are slow on a GPU.
        if len(segments) > 1 and (weight.dtype not in (torch.float32, torch.float64) or weight.device.type != "cpu"):
            key = (chosen, head, weight.dtype, weight.device)
            if kind not in self._gathered or self._gathered[kind][0] != key:  # neighbouring layers often read the same set
                self._gathered[kind] = (key, torch.cat(segments, 1))
            return [self._gathered[kind][1]]
        return segments

    def _matrix(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Features of all source layers read: (1, B * T, layers, H * D), or (H, B * T, layers, D) where support is ``head``."""
        key = (kind, dtype, device)
        if key not in self._features:
            self._features[key] = self._read(kind, dtype, device)
        return self._features[key]

    def _read(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> Tensor:
        source = self.spec.source
        shape = (self.batch, self.n_tokens, len(self.reads[kind]), source.n_heads, source.head_dim)
        if self.spec.support == "head":
            # (H, B, T, layers, D) in memory, seen as (B, T, layers, H, D)
            matrix = self.buffers.take(("features", kind), (shape[3], *shape[:3], shape[4]), dtype, device)
            seen = matrix.permute(1, 2, 3, 0, 4)
        else:
            matrix = self.buffers.take(("features", kind), shape, dtype, device)
            seen = matrix
        wide = _wide(dtype)
        for index, layer_index in enumerate(self.reads[kind]):
            states = self.pairs[layer_index][KINDS.index(kind)]  # (B, H, T, D)
            features = seen[:, :, index].transpose(1, 2)  # the same shape, in the chunk's matrix
            table = source.rope.table(layer_index) if kind == "keys" and not self.spec.keys_rotated else None
            if table is None:
                features.copy_(states)
                continue
            turned = features if dtype == wide else self.buffers.take("unrotated", tuple(states.shape), wide, device)
            turn_into(turned, states.to(device, wide), table, self._turns(source, layer_index, device), inverse=True)
            if turned is not features:
                features.copy_(turned)
        rows = self.batch * self.n_tokens
        if self.spec.support == "head":
            return matrix.view(source.n_heads, rows, shape[2], source.head_dim)
        return matrix.view(1, rows, shape[2], source.width)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to rotate in."""
    return torch.promote_types(dtype, torch.float32)


def _runs(chosen: tuple[int, ...], read: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where `chosen` layers stand among those `read`, as runs of neighbours: [start, stop)."""
    places = [read.index(layer_index) for layer_index in chosen]
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _accumulate(segments: list[Tensor], weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """``out = cat(segments) @ weight + bias``, one product per segment."""
    row = 0
    for segment in segments:
        rows = weight[row : row + segment.shape[1]]
        if row == 0:
            torch.addmm(bias, segment, rows, out=out)
        else:
            out.addmm_(segment, rows)
        row += segment.shape[1]
