"""`Mapper`: a cache of the source in, a cache of the target out.

    keys:   target = rotate(unrotate(source, source angles) @ weight + bias, target angles)
    values: target = source @ weight + bias

Source: Heo et al., arXiv:2608.03893, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvfit import cache as caches
from kvfit.errors import MismatchError
from kvfit.identity import check_model
from kvfit.rope import angles, rotate, unrotate
from kvfit.spec import KINDS, Kind, MapperSpec

if TYPE_CHECKING:
    from kvfit.bundle import Bundle

# Tokens mapped at a time. Enough for the matrix products to run at full speed, few enough that what is held beside the
# result stays small: source features of one chunk and one layer's outputs.
CHUNK_TOKENS = 2048

Weights = Mapping[tuple[Kind, int], tuple[Tensor, Tensor]]


class Mapper:
    """A fitted map from one model's KV cache to another's. Frozen: no call changes it, so threads may share one.

    Attributes:
        spec: what it maps and how.
        verdict: of the bundle's evaluation: ``pass``, ``fail`` or ``unknown``.
    """

    def __init__(self, spec: MapperSpec, weights: Weights, *, verdict: Literal["pass", "fail", "unknown"] = "unknown") -> None:
        """Wrap weights.

        Args:
            spec: the mapper's spec.
            weights: per (kind, target layer), weight of `spec.weight_shape` and bias (G,); any device and floating dtype.
            verdict: what the evaluation said.

        Raises:
            MismatchError: a weight is missing or has another shape.
        """
        for layer in spec.layers:
            found = weights.get((layer.kind, layer.layer_index))
            shapes = None if found is None else (tuple(found[0].shape), tuple(found[1].shape))
            needed = (spec.weight_shape(layer.kind, layer.layer_index), (spec.target.width,))
            if shapes != needed:
                raise MismatchError(f"{layer.kind} of target layer {layer.layer_index}: found weight and bias {shapes}, needed {needed}")
        self.spec = spec
        self.verdict = verdict
        self._weights = dict(weights)

    @classmethod
    def from_bundle(cls, bundle: Bundle, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Mapper:
        """The mapper of an opened bundle, its layers read straight to `device` in `dtype` (default: as stored, on the CPU)."""
        weights = {
            (layer.kind, layer.layer_index): bundle.layer(layer.kind, layer.layer_index, device=device, dtype=dtype)
            for layer in bundle.spec.layers
        }
        return cls(bundle.spec, weights, verdict=bundle.verdict)

    def __repr__(self) -> str:
        source, target = self.spec.source, self.spec.target
        return f"Mapper({source.ref} -> {target.ref}, {source.n_layers} to {target.n_layers} layers, verdict {self.verdict})"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and biases in memory."""
        return sum(tensor.nbytes for pair in self._weights.values() for tensor in pair)

    def to(self, device: torch.device | str | Sequence[torch.device] | None = None, dtype: torch.dtype | None = None) -> Mapper:
        """A mapper with its weights elsewhere; a sequence of devices gives one per target layer."""
        devices = [device] * self.spec.target.n_layers if device is None or isinstance(device, str | torch.device) else list(device)
        weights = {
            key: (weight.to(device=devices[key[1]], dtype=dtype), bias.to(device=devices[key[1]], dtype=dtype))
            for key, (weight, bias) in self._weights.items()
        }
        return Mapper(self.spec, weights, verdict=self.verdict)

    def bind(self, source_model: Any = None, target_model: Any = None, *, tokenizer: Any = None) -> Mapper:
        """Check that these are the models the mapper was fitted on, and put each layer's weights where that layer lives.

        Args:
            source_model: the loaded source, or None when it runs elsewhere.
            target_model: the loaded target, or None.
            tokenizer: the tokenizer in use, checked too when given.

        Returns:
            This mapper, with weights on the target's devices.

        Raises:
            MismatchError: names the model and the field that differs.
        """
        for spec, model in ((self.spec.source, source_model), (self.spec.target, target_model)):
            if model is not None:
                check_model(spec, model, tokenizer)
        return self if target_model is None else self.to(caches.layer_devices(target_model, self.spec.target.n_layers))

    @torch.no_grad()
    def transfer(
        self,
        source_cache: Any,
        *,
        positions: Tensor | None = None,
        into: Any = None,
        layers: Iterable[int] | None = None,
        target_model: Any = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Any:
        """The target's cache for the tokens of a source cache.

        Args:
            source_cache: the source's cache, T tokens, per layer keys and values (B, H_source, T, D_source); never changed.
            positions: rotary positions of its tokens, (T,) or (B, T); default 0 to T - 1. Left-padded batches need them:
                ``(mask.cumsum(-1) - 1).clamp(min=0)``.
            into: a cache of the target that holds the first n tokens; only tokens n to T - 1 are mapped and appended to it.
            layers: target layers to make; the others stay empty. For callers that take some layers from elsewhere.
            target_model: the target, so that windowed layers get the cache type that they need; needed for those.
            chunk_tokens: tokens mapped at a time.

        Returns:
            A cache of the target (`into` itself when given), in the source cache's dtype, each layer on its weight's device.

        Raises:
            MismatchError: the cache does not have the source's geometry, or `positions` or `into` do not fit it. Nothing has been
                changed then.
        """
        pairs = caches.read_cache(source_cache)
        held = self.check(pairs, positions, into)
        chosen = range(self.spec.target.n_layers) if layers is None else sorted(set(layers))
        batch, _, total, _ = pairs[0][0].shape
        n_tokens = total - held
        if positions is None:
            positions = torch.arange(total, device=pairs[0][0].device)
        mapped = self._map([(keys[:, :, held:], values[:, :, held:]) for keys, values in pairs], positions[..., held:], chosen, chunk_tokens)
        result = caches.new_cache(target_model) if into is None else into
        for layer_index, (keys, values) in mapped.items():
            if n_tokens:
                caches.append(result, layer_index, keys, values)
        return result

    def transfer_layers(self, source_cache: Any, *, positions: Tensor | None = None, chunk_tokens: int = CHUNK_TOKENS) -> list[tuple[Tensor, Tensor]]:
        """As `transfer`, but plain tensors: per target layer keys and values, (B, H_target, T, D_target)."""
        pairs = caches.read_cache(source_cache)
        self.check(pairs, positions, None)
        if positions is None:
            positions = torch.arange(pairs[0][0].shape[2], device=pairs[0][0].device)
        with torch.no_grad():
            return list(self._map(pairs, positions, range(self.spec.target.n_layers), chunk_tokens).values())

    def check(self, pairs: list[tuple[Tensor, Tensor]], positions: Tensor | None, into: Any = None) -> int:
        """Refuse what does not fit the source's geometry; the number of tokens that `into` holds.

        Raises:
            MismatchError: names the layer, kind and shape.
        """
        source = self.spec.source
        if len(pairs) != source.n_layers:
            raise MismatchError(f"source cache: found {len(pairs)} layers, needed {source.n_layers} as {source.ref} has")
        batch, _, total, _ = pairs[0][0].shape
        needed = (batch, source.n_heads, total, source.head_dim)
        for layer_index, pair in enumerate(pairs):
            for kind, tensor in zip(KINDS, pair, strict=True):
                if tuple(tensor.shape) != needed:
                    raise MismatchError(f"source cache, {kind} of layer {layer_index}: found shape {tuple(tensor.shape)}, needed {needed}")
        if positions is not None and tuple(positions.shape) not in {(total,), (batch, total)}:
            raise MismatchError(f"positions: found shape {tuple(positions.shape)}, needed ({total},) or ({batch}, {total}) as the cache has")
        held = 0 if into is None else caches.cache_length(into)
        if held > total:
            raise MismatchError(f"into: found {held} tokens, needed at most the {total} of the source cache: crop it first")
        return held

    def _map(
        self, pairs: list[tuple[Tensor, Tensor]], positions: Tensor, chosen: Sequence[int], chunk_tokens: int
    ) -> dict[int, tuple[Tensor, Tensor]]:
        target = self.spec.target
        batch, _, total, _ = pairs[0][0].shape
        dtype = pairs[0][0].dtype
        out = {}
        for layer_index in chosen:
            device = self._weights["keys", layer_index][0].device
            shape = (batch, target.n_heads, total, target.head_dim)
            out[layer_index] = (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for start in range(0, total, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, total))
            self._map_chunk([(k[:, :, part], v[:, :, part]) for k, v in pairs], positions[..., part], {i: (k[:, :, part], v[:, :, part]) for i, (k, v) in out.items()})
        return out

    def _map_chunk(
        self, pairs: list[tuple[Tensor, Tensor]], positions: Tensor, out: dict[int, tuple[Tensor, Tensor]]
    ) -> None:
        """Map one chunk into views of the result."""
        spec = self.spec
        features = _Features(self, pairs, positions)
        # Cosines and sines depend on the table and the device only, not on the layer.
        target_angles: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        for layer_index, views in out.items():
            for kind, view in zip(KINDS, views, strict=True):
                weight, bias = self._weights[kind, layer_index]
                mapped = features.apply(kind, spec.layer(kind, layer_index).source_layers, weight, bias)
                # (B, T, H, D) -> (B, H, T, D)
                mapped = mapped.view(view.shape[0], view.shape[2], view.shape[1], view.shape[3]).transpose(1, 2)
                table = spec.target.rope.table(layer_index) if kind == "keys" else None
                if table is not None and not spec.keys_rotated:
                    key = (spec.target.rope.assignment[layer_index] or 0, mapped.device)
                    if key not in target_angles:
                        target_angles[key] = angles(table, positions.to(mapped.device))
                    mapped = rotate(mapped, table, target_angles[key])
                view.copy_(mapped)


class _Features:
    """The input features of one chunk: each source layer is un-rotated once, whatever number of target layers read it."""

    def __init__(self, mapper: Mapper, pairs: list[tuple[Tensor, Tensor]], positions: Tensor) -> None:
        self.mapper = mapper
        self.pairs = pairs
        self.positions = positions
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: dict[tuple[Kind, int, torch.dtype], Tensor] = {}
        self._joined: dict[tuple[object, ...], Tensor] = {}

    def layer(self, kind: Kind, layer_index: int, dtype: torch.dtype) -> Tensor:
        """(B * T, H * D) features of one source layer in the weights' dtype."""
        key = (kind, layer_index, dtype)
        if key not in self._layers:
            spec = self.mapper.spec
            tensor = self.pairs[layer_index][KINDS.index(kind)]
            table = spec.source.rope.table(layer_index) if kind == "keys" else None
            if table is not None and not spec.keys_rotated:
                index = spec.source.rope.assignment[layer_index] or 0
                if index not in self._angles:
                    self._angles[index] = angles(table, self.positions.to(tensor.device))
                tensor = unrotate(tensor, table, self._angles[index])
            batch, heads, n_tokens, head_dim = tensor.shape
            self._layers[key] = tensor.to(dtype).transpose(1, 2).reshape(batch * n_tokens, heads * head_dim)
        return self._layers[key]

    def apply(self, kind: Kind, source_layers: tuple[int, ...], weight: Tensor, bias: Tensor) -> Tensor:
        """(B * T, G) outputs of one map."""
        inputs = self.joined(kind, source_layers, weight.dtype, weight.device)
        if weight.dim() == 2:
            return torch.addmm(bias, inputs, weight)
        # support "head": (H_target, B * T, F) @ (H_target, F, D) -> (B * T, H_target, D)
        by_head = torch.bmm(inputs, weight).transpose(0, 1)
        return by_head.reshape(by_head.shape[0], -1) + bias

    def joined(self, kind: Kind, source_layers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The chosen layers side by side; kept, because neighbouring target layers often read the same set."""
        key = (kind, source_layers, dtype, device)
        if key not in self._joined:
            spec = self.mapper.spec
            kinds = (kind,) if spec.inputs == "same" else KINDS
            parts = [self.layer(k, i, dtype) for k in kinds for i in source_layers]
            if spec.support == "head":
                count, source = spec.target.n_heads, spec.source
                # (B * T, layers, H, D) -> the matched head of each layer -> (H_target, B * T, layers * D)
                stacked = torch.stack(parts, 1).view(-1, len(parts), source.n_heads, source.head_dim)
                heads = torch.arange(count, device=stacked.device) * source.n_heads // count
                whole = stacked[:, :, heads].permute(2, 0, 1, 3).reshape(count, -1, len(parts) * source.head_dim)
            else:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            self._joined = {old: tensor for old, tensor in self._joined.items() if old[0] != kind} | {key: whole.to(device)}
        return self._joined[key]
