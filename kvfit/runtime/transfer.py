"""The arithmetic of a transfer: from chunks of source features to rows of the target's keys and values.

Each chunk's inputs are one matrix (`kvfit.runtime.features`). With a shared basis it is projected once, and every target layer
maps from the projection. Without one, every target layer reads its columns of the matrix. In both cases the map writes directly
into the result if dtype and device allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.runtime.features import Angles, Buffers, Pairs, Part, Runs, moved_to, parts, read_inputs
from kvfit.runtime.lexical import Lexical
from kvfit.runtime.maps import Maps, Place
from kvfit.spec import KINDS

# Tokens mapped at a time. On a CPU they are enough for matrix products at full speed, and few enough for a layer's outputs to
# stay in the processor's cache until they are rotated. On a GPU there are more, because every kernel takes time to start.
CHUNK_TOKENS = 1024
CHUNK_TOKENS_CUDA = 8192


def chunk_length(device: torch.device) -> int:
    """The default number of tokens to map at a time on a device."""
    return CHUNK_TOKENS if device.type == "cpu" else CHUNK_TOKENS_CUDA


class LayerOptions(TypedDict, total=False):
    """Options of `Mapper.transfer_layers` and `stream_layers`: `start`, the first token to map, and those of `transfer`."""

    start: int
    positions: Tensor | None
    target_model: Any
    input_ids: Tensor | None
    first_layer: tuple[Tensor, Tensor] | None
    chunk_tokens: int | None


@dataclass(frozen=True)
class Moved:
    """The tokens to map.

    Attributes:
        pairs: per source layer, keys and values, (B, H, T, D), of the tokens from `start` on, checked.
        positions: (start + T,) or (B, start + T), positions of all tokens.
        start: the first token that is mapped.
        first_layer: keys and values of the target's first layer, exact, (B, H, T', D), if lexical inputs are read. T' is
            start + T, or fewer if the first tokens are not needed.
    """

    pairs: Pairs
    positions: Tensor
    start: int
    first_layer: tuple[Tensor, Tensor] | None = None


@dataclass
class _Chunk:
    """One chunk of tokens and its inputs.

    Attributes:
        number: the chunk's number.
        part: its sequences and tokens.
        angles: its cosines and sines.
        inputs: inputs of its n tokens, (1 or H_source, n, width); with a basis, their projection (1, n, r).
        copies: the inputs on other devices, for a target that is spread over several.
    """

    number: int
    part: Part
    angles: Angles
    inputs: Tensor
    copies: dict[torch.device, Tensor] = field(default_factory=dict)

    def inputs_on(self, device: torch.device) -> Tensor:
        """The inputs on a weight's device."""
        if self.inputs.device == device:
            return self.inputs
        if device not in self.copies:
            self.copies[device] = moved_to(self.inputs, device)
        return self.copies[device]


class Transfer:
    """One transfer: the maps, the tokens, and the memory that chunks share."""

    def __init__(self, maps: Maps, moved: Moved, places: Mapping[int, Place], chunk_tokens: int | None) -> None:
        """Prepare the transfer. Only the lexical inputs are computed here.

        Args:
            maps: the mapper's weights.
            moved: the tokens to map.
            places: per requested target layer, in order, device and dtype of the result.
            chunk_tokens: number of tokens, over all sequences, mapped at a time; None for the device's default.

        Raises:
            MismatchError: `chunk_tokens` is below 1.
        """
        if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
            raise MismatchError(f"chunk_tokens: found {chunk_tokens!r}, needed a whole number, 1 or more")
        self.maps, self.spec, self.moved = maps, maps.spec, moved
        self.places = {layer_index: place for layer_index, place in places.items() if layer_index in self.spec.mapped_layers}
        self.exact = [(layer_index, place) for layer_index, place in places.items() if layer_index not in self.places]
        self.columns = maps.columns(self.places)
        self.batch, _, self.total, _ = moved.pairs[0][0].shape
        self.heads = self.spec.source.n_heads if self.spec.support == "head" else 1
        self.buffers = Buffers()
        self._gathered: tuple[object, Tensor] | None = None
        self.inputs_at = maps.inputs_place(next(iter(self.places), self.spec.mapped_layers[0]))
        self.chunk_tokens = chunk_length(self.inputs_at.device) if chunk_tokens is None else chunk_tokens
        self.lexical: Lexical | None = None
        if moved.first_layer is not None:
            dtype, device = self.inputs_at.dtype, self.inputs_at.device
            self.lexical = Lexical(self.spec, maps.tables, moved.first_layer, moved.positions, moved.start, dtype, device)

    def all_layers(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values (B, H, T, D) of every requested layer, computed chunk by chunk with one chunk's inputs in memory."""
        exact = dict(self._exact_layers())
        out = {layer_index: self._empty(layer_index, place) for layer_index, place in self.places.items()}
        for chunk in self._chunks(None) if out else ():
            for layer_index, halves in out.items():
                self._write_layer(chunk, layer_index, halves)
        return exact | {layer_index: _heads_first(halves) for layer_index, halves in out.items()}

    @torch.no_grad()
    def layer_by_layer(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The requested layers in order, each as soon as it is mapped. The inputs of all tokens stay in memory."""
        width = self.columns.width if self.maps.basis is None else self.maps.basis.shape[1]
        shape = (self.heads, self.batch * self.total, width)
        # Before anything is given away: what a caller does with its source's cache afterwards makes no difference.
        chunks = list(self._chunks(torch.empty(shape, dtype=self.inputs_at.dtype, device=self.inputs_at.device)))
        for _, pair in self._exact_layers():
            yield pair
        for layer_index, place in self.places.items():
            halves = self._empty(layer_index, place)
            for chunk in chunks:
                self._write_layer(chunk, layer_index, halves)
            yield _heads_first(halves)

    def _exact_layers(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Copies of the layers that need no map, so that the caller's tensors are not shared."""
        for layer_index, place in self.exact:
            assert self.moved.first_layer is not None
            keys, values = (
                half[:, :, half.shape[2] - self.total :].to(
                    place.device, place.dtype, non_blocking=place.device.type != "cpu", copy=True
                )
                for half in self.moved.first_layer
            )
            yield layer_index, (keys, values)

    def _empty(self, layer_index: int, place: Place) -> tuple[Tensor, Tensor]:
        # (B, T, H, D) is the layout of a matrix product's rows, so the product can be written in place.
        shapes = [(self.batch, self.total, *self.spec.target.shape(kind, layer_index)) for kind in KINDS]
        keys, values = (torch.empty(shape, dtype=place.dtype, device=place.device) for shape in shapes)
        return keys, values

    def _chunks(self, out: Tensor | None) -> Iterator[_Chunk]:
        """Chunks with their inputs, in `out`, (heads, B * T, width), or each in the memory of the previous chunk."""
        mapped_positions = self.moved.positions[..., self.moved.start :]
        done = 0
        for number, part in enumerate(parts(self.batch, self.total, self.chunk_tokens)):
            turns = Angles(self.maps.tables, part.of_positions(mapped_positions))
            rows = part.of(self.moved.pairs[0][0]).shape[0:3:2].numel()
            yield _Chunk(
                number, part, turns, self._inputs(part, turns, rows, None if out is None else out[:, done : done + rows])
            )
            done += rows

    def _inputs(self, part: Part, turns: Angles, rows: int, out: Tensor | None) -> Tensor:
        dtype, device, basis = self.inputs_at.dtype, self.inputs_at.device, self.maps.basis
        features = out
        if out is None or basis is not None or self.heads > 1:  # part of several heads' inputs is not contiguous
            features = self.buffers.take("features", (self.heads, rows, self.columns.width), dtype, device)
        assert features is not None
        read_inputs(features, self.spec, self.columns, self.maps.tables, self.moved.pairs, part, turns, self.buffers)
        if self.lexical is not None:
            self.lexical.write(features[0, :, self.columns.lexical :], part, self.buffers)
        if basis is not None:
            out = self.buffers.take("projection", (1, rows, basis.shape[1]), dtype, device) if out is None else out
            torch.mm(features[0], basis, out=out[0])
            return out
        return features if out is None or out is features else out.copy_(features)

    def _write_layer(self, chunk: _Chunk, layer_index: int, halves: tuple[Tensor, Tensor]) -> None:
        """Map one chunk of one target layer into its keys and values, (B, T, H, D)."""
        for kind, half in zip(KINDS, halves, strict=True):
            weight, bias = self.maps.weights[kind, layer_index]
            result = half[chunk.part.rows, chunk.part.tokens]
            table = self.maps.tables.target[layer_index] if kind == "keys" else None
            direct = (result.dtype, result.device) == (weight.dtype, weight.device)
            take, shape, device = self.buffers.take, tuple(result.shape), weight.device
            product = result if direct and table is None else take("product", shape, weight.dtype, device)
            runs = ((0, weight.shape[-2]),) if self.maps.basis is not None else self.columns.runs[kind, layer_index]
            self._product(chunk, runs, weight, bias, product.view(-1, self.spec.target.width_of(kind, layer_index)))
            if table is not None:
                wide = torch.promote_types(weight.dtype, torch.float32)
                if wide != weight.dtype:
                    product = take("wide", shape, wide, device).copy_(product)
                turned = result if direct and wide == result.dtype else take("turned", shape, wide, device)
                chunk.angles.turn(turned.transpose(1, 2), product.transpose(1, 2), table)
                product = turned
            if product is not result:
                result.copy_(product, non_blocking=result.device.type != "cpu")

    def _product(self, chunk: _Chunk, runs: Runs, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """``out = inputs[:, runs] @ weight + bias``, out (n, G)."""
        if self.spec.support == "full":
            _accumulate(self._segments(chunk, 0, runs, weight.device), weight, bias, out)
            return
        # A target head reads one source head, and its columns of the result are written in place.
        source, target = self.spec.source, self.spec.target
        for head in range(target.n_heads):
            columns = slice(head * target.head_dim, (head + 1) * target.head_dim)
            segments = self._segments(chunk, head * source.n_heads // target.n_heads, runs, weight.device)
            _accumulate(segments, weight[head], bias[columns], out[:, columns])

    def _segments(self, chunk: _Chunk, head: int, runs: Runs, device: torch.device) -> list[Tensor]:
        """The columns that a map reads, as matrices of n rows, in the order of the weight's rows."""
        inputs = chunk.inputs_on(device)[head]
        segments = [inputs[:, start:stop] for start, stop in runs]
        # In a 16-bit dtype, adding several products rounds more often than one product, and on a GPU several small products are
        # slow. Adjacent target layers, and keys and values of one layer, often read the same columns, which are gathered once.
        if len(segments) > 1 and (inputs.dtype not in (torch.float32, torch.float64) or device.type != "cpu"):
            key = (chunk.number, head, runs, device)
            if self._gathered is None or self._gathered[0] != key:
                n_columns = sum(segment.shape[1] for segment in segments)
                memory = self.buffers.take("gathered", (len(inputs), n_columns), inputs.dtype, device)
                self._gathered = (key, torch.cat(segments, 1, out=memory))
            return [self._gathered[1]]
        return segments


def _heads_first(halves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(B, T, H, D) as (B, H, T, D), in the same memory."""
    return halves[0].transpose(1, 2), halves[1].transpose(1, 2)


def _accumulate(segments: Sequence[Tensor], weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """``out = cat(segments) @ weight + bias``, one product per segment."""
    row = 0
    for segment in segments:
        rows = weight[row : row + segment.shape[1]]
        if row == 0:
            torch.addmm(bias, segment, rows, out=out)
        else:
            out.addmm_(segment, rows)
        row += segment.shape[1]
