"""`Mapper`: a cache of the source in, a cache of the target out.

    keys:   target = rotate(unrotate(source, source angles) @ weight + bias, target angles)
    values: target = source @ weight + bias

Source: Heo et al., arXiv:2608.03893, section 3.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.identity import WeightStamp, check_model, check_tokenizer, require_model
from kvfit.runtime.transfer import CHUNK_TOKENS, Frequencies, Place, map_layers
from kvfit.spec import KINDS, Kind, MapperSpec

if TYPE_CHECKING:
    from kvfit.bundle.bundle import Bundle

Weights = Mapping[tuple[Kind, int], tuple[Tensor, Tensor]]
Verdict = Literal["pass", "fail", "unknown"]
Pairs = list[tuple[Tensor, Tensor]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Mapper:
    """A fitted map from one model's KV cache to another's. Frozen: no call changes it, so threads may share one.

    Copies and pickles carry spec, weights and verdict; a copy checks the models that it meets anew.

    Attributes:
        spec: what it maps and how.
        verdict: of the bundle's evaluation: ``pass``, ``fail`` or ``unknown``.
        judged_recompute: share of the prefix that the target recomputed where the verdict was found. `handoff` warns where it
            is to recompute less.
    """

    def __init__(
        self, spec: MapperSpec, weights: Weights, *, verdict: Verdict = "unknown", judged_recompute: float = 0.0
    ) -> None:
        """Wrap weights.

        Args:
            spec: the mapper's spec.
            weights: per (kind, target layer), weight of `spec.weight_shape` and bias (G,); any device and floating dtype.
            verdict: what the evaluation said.
            judged_recompute: of which share recomputed it said so.

        Raises:
            MismatchError: a weight is missing or has another shape, or a bias lies elsewhere than its weight.
        """
        for layer in spec.layers:
            where = f"{layer.kind} of target layer {layer.layer_index}"
            found = weights.get((layer.kind, layer.layer_index))
            shapes = None if found is None else (tuple(found[0].shape), tuple(found[1].shape))
            needed = (spec.weight_shape(layer.kind, layer.layer_index), (spec.target.width,))
            if found is None or shapes != needed:
                raise MismatchError(f"{where}: found weight and bias {shapes}, needed {needed}")
            kinds = {(part.dtype, part.device) for part in found}
            if len(kinds) > 1 or found[0].dtype not in _DTYPES:
                raise MismatchError(
                    f"{where}: found weight and bias as {sorted(map(str, kinds))}, needed one floating dtype and device"
                )
        self.spec = spec
        self.verdict = verdict
        self.judged_recompute = judged_recompute
        self._weights = dict(weights)
        # Models that were checked, by role; weak, because a mapper must not keep a model alive.
        self._known: weakref.WeakKeyDictionary[Any, dict[str, WeightStamp]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._frequencies = Frequencies()

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Mapper:
        """The mapper of an opened bundle, its layers read straight to `device` in `dtype` (default: as stored, on the CPU).

        Raises:
            MismatchError: `device` or `dtype` cannot be had.
        """
        _require_place(device, dtype)
        weights = {
            (layer.kind, layer.layer_index): bundle.layer(layer.kind, layer.layer_index, device=device, dtype=dtype)
            for layer in bundle.spec.layers
        }
        return cls(bundle.spec, weights, verdict=bundle.verdict, judged_recompute=bundle.judged_recompute)

    def __repr__(self) -> str:
        source, target = self.spec.source, self.spec.target
        return f"Mapper({source.ref} -> {target.ref}, {source.n_layers} to {target.n_layers} layers, verdict {self.verdict})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.spec, self._weights, self.verdict, self.judged_recompute)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and biases in memory."""
        return sum(tensor.nbytes for pair in self._weights.values() for tensor in pair)

    def to(self, device: torch.device | str | Sequence[torch.device] | None = None, dtype: torch.dtype | None = None) -> Mapper:
        """A mapper with its weights elsewhere; a sequence of devices gives one per target layer.

        Raises:
            MismatchError: a device that cannot be had here, or a dtype that is not floating.
        """
        n_layers = self.spec.target.n_layers
        devices = list(device) if isinstance(device, Sequence) and not isinstance(device, str) else [device] * n_layers
        if len(devices) != n_layers:
            raise MismatchError(f"device: found {len(devices)} devices, needed one, or {n_layers}: one per target layer")
        for each in devices:
            _require_place(each, dtype)
        weights = {
            key: (weight.to(device=devices[key[1]], dtype=dtype), bias.to(device=devices[key[1]], dtype=dtype))
            for key, (weight, bias) in self._weights.items()
        }
        moved = Mapper(self.spec, weights, verdict=self.verdict, judged_recompute=self.judged_recompute)
        with self._lock:
            moved._known.update((model, dict(roles)) for model, roles in self._known.items())
        return moved

    def bind(self, source_model: Any = None, target_model: Any = None, *, tokenizer: Any = None) -> Mapper:
        """Check that these are the models the mapper was fitted on, and put each layer's weights where that layer lives.

        Args:
            source_model: the loaded source, or None when it runs elsewhere.
            target_model: the loaded target, or None.
            tokenizer: the tokenizer in use, checked too when given, against the models that are given or else both.

        Returns:
            This mapper, with weights on the target's devices.

        Raises:
            MismatchError: names the model and the field that differs.
        """
        for role, spec, model in (("source", self.spec.source, source_model), ("target", self.spec.target, target_model)):
            if model is not None:
                require_model(model, f"{role}_model")
                check_model(spec, model, tokenizer)
                self._remember(role, model)
            elif tokenizer is not None and source_model is None and target_model is None:
                check_tokenizer(spec, tokenizer)
        return self if target_model is None else self.to(caches.layer_devices(target_model, self.spec.target.n_layers))

    def check_models(self, source_model: Any = None, target_model: Any = None) -> None:
        """Check models at first use, and again once their weights were written or replaced or an adapter was put on.

        Milliseconds, then a fraction of one. Models that passed are remembered for as long as they live.

        Raises:
            MismatchError: names the model and the field that differs.
        """
        for role, spec, model in (("source", self.spec.source, source_model), ("target", self.spec.target, target_model)):
            if model is None:
                continue
            require_model(model, f"{role}_model")
            with self._lock:
                stamp = self._known.get(caches.unwrapped(model), {}).get(role)
            if stamp is None or not stamp.holds(model):
                check_model(spec, model)
                self._remember(role, model)

    def _remember(self, role: str, model: Any) -> None:
        stamp = WeightStamp(model)
        with self._lock:
            self._known.setdefault(caches.unwrapped(model), {})[role] = stamp

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

        NaN and infinity in the source's cache go through unnoticed, because looking for them would wait for the device.
        `handoff` looks; ``kvfit.model.cache.check_finite(cache)`` does for who calls this.

        Args:
            source_cache: the source's cache, T tokens, per layer keys and values (B, H_source, T, D_source); never changed.
            positions: rotary positions of its tokens, whole numbers, (T,) or (B, T); default 0 to T - 1. Left-padded batches
                need them: ``(mask.cumsum(-1) - 1).clamp(min=0)``.
            into: a cache of the target that holds the first n tokens; only tokens n to T - 1 are mapped and appended to it.
            layers: target layers to make; the others stay empty. For callers that take some layers from elsewhere.
            target_model: the target, so that windowed layers get the cache type that drops what they do not need.
            chunk_tokens: tokens (over all sequences) mapped at a time.

        Returns:
            A cache of the target (`into` itself when given). Dtype and device of each layer are those of `into` where it holds
            tokens, else of the target model, else the source cache's dtype and the weight's device.

        Raises:
            MismatchError: the cache does not have the source's geometry, or `positions` or `into` do not fit it. Nothing has
                been changed then.
        """
        pairs = caches.read_cache(source_cache)
        chosen = self._chosen(layers)
        held = self.check(pairs, positions, into, layers=chosen)
        mapped = self._map(pairs, positions, chosen, held, self._places(pairs, into, target_model), chunk_tokens)
        result = caches.new_cache(target_model) if into is None else into
        if pairs[0][0].shape[2] > held:
            for layer_index in chosen:
                caches.place(result, layer_index, *mapped.pop(layer_index))
        return result

    @torch.no_grad()
    def transfer_layers(
        self,
        source_cache: Any,
        *,
        positions: Tensor | None = None,
        start: int = 0,
        target_model: Any = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Pairs:
        """As `transfer`, but plain tensors of tokens `start` to T - 1.

        Returns:
            Per target layer keys and values, (B, H_target, T - start, D).
        """
        pairs = caches.read_cache(source_cache)
        self.check(pairs, positions)
        if not 0 <= start <= pairs[0][0].shape[2]:
            raise MismatchError(f"start: found {start}, needed 0 to the {pairs[0][0].shape[2]} tokens of the source cache")
        chosen = self._chosen(None)
        mapped = self._map(pairs, positions, chosen, start, self._places(pairs, None, target_model), chunk_tokens)
        return [mapped[layer_index] for layer_index in chosen]

    def check(
        self, pairs: Pairs, positions: Tensor | None = None, into: Any = None, *, layers: Sequence[int] | None = None
    ) -> int:
        """Refuse what does not fit; the number of tokens that `into` holds.

        Args:
            pairs: keys and values per source layer.
            positions: as for `transfer`.
            into: as for `transfer`.
            layers: the target layers that `into` is asked for; default all.

        Raises:
            MismatchError: names the layer, kind and shape.
        """
        source = self.spec.source
        if len(pairs) != source.n_layers:
            raise MismatchError(f"source cache: found {len(pairs)} layers, needed {source.n_layers} as {source.ref} has")
        batch, _, total, _ = pairs[0][0].shape
        dtype = pairs[0][0].dtype
        needed = (batch, source.n_heads, total, source.head_dim)
        for layer_index, pair in enumerate(pairs):
            for kind, tensor in zip(KINDS, pair, strict=True):
                where = f"source cache, {kind} of layer {layer_index}"
                if tuple(tensor.shape) != needed:
                    raise MismatchError(f"{where}: found shape {tuple(tensor.shape)}, needed {needed}")
                if tensor.dtype != dtype or dtype not in _DTYPES:
                    raise MismatchError(
                        f"{where}: found {tensor.dtype}, needed one of {', '.join(map(str, _DTYPES))}, the same for all layers"
                    )
        if positions is not None:
            if tuple(positions.shape) not in {(total,), (batch, total)}:
                raise MismatchError(
                    f"positions: found shape {tuple(positions.shape)}, needed ({total},) or ({batch}, {total}) as the cache has"
                )
            if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
                raise MismatchError(f"positions: found {positions.dtype}, needed whole numbers")
        held = 0 if into is None else self.check_into(into, batch, total, layers=layers)
        if held > total:
            raise MismatchError(f"into: found {held} tokens, needed at most the {total} of the source cache: crop it first")
        return held

    def check_into(self, into: Any, batch: int, total: int, *, layers: Sequence[int] | None = None, name: str = "into") -> int:
        """Refuse a cache that is not the target's or has no room for `total` tokens; the number of tokens that it holds.

        Args:
            into: the cache.
            batch: sequences that it must have.
            total: tokens that it must have room for.
            layers: the target layers that it is asked for; default all.
            name: what to call it.

        Raises:
            MismatchError: names the layer and what differs.
        """
        target = self.spec.target
        states = caches.layer_states(into)
        n_filled = sum(state.length > 0 for state in states)
        if len(states) > target.n_layers or (layers is None and 0 < n_filled < target.n_layers):
            n_found = f"{len(states)} layers" if len(states) > target.n_layers else f"{n_filled} layers with tokens"
            raise MismatchError(
                f"{name}: found {n_found}, needed {target.n_layers} as {target.ref} has: pass a cache of the target's own, "
                "not the source's"
            )
        lengths = set()
        for layer_index in range(target.n_layers) if layers is None else layers:
            state = states[layer_index] if layer_index < len(states) else None
            lengths.add(0 if state is None else state.length)
            if state is None:
                continue
            where = f"{name}, layer {layer_index}"
            if state.keys is not None:
                found, needed = (*state.keys.shape[:2], state.keys.shape[3]), (batch, target.n_heads, target.head_dim)
                if found != needed:
                    raise MismatchError(f"{where}: found batch, heads and head size {found}, needed {needed}")
            if state.capacity is not None and total > state.capacity:
                raise MismatchError(f"{where}: found room for {state.capacity} tokens, needed {total}")
        if len(lengths) > 1:
            raise MismatchError(f"{name}: found layers of {sorted(lengths)} tokens, needed one length")
        return lengths.pop() if lengths else 0

    def _chosen(self, layers: Iterable[int] | None) -> list[int]:
        n_layers = self.spec.target.n_layers
        chosen = list(range(n_layers)) if layers is None else sorted(set(layers))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < n_layers:
            raise MismatchError(f"layers: found {chosen}, needed target layers of 0 to {n_layers - 1}")
        return chosen

    def _places(self, pairs: Pairs, into: Any, target_model: Any) -> list[Place]:
        """Where each target layer's result goes, and in which dtype."""
        n_layers = self.spec.target.n_layers
        if target_model is not None:
            dtype = caches.cache_dtype(target_model)
            places = [Place(device, dtype) for device in caches.layer_devices(target_model, n_layers)]
        else:
            places = [Place(self._weights["keys", i][0].device, pairs[0][0].dtype) for i in range(n_layers)]
        for layer_index, state in enumerate([] if into is None else caches.layer_states(into)):
            if state.keys is not None:
                places[layer_index] = Place(state.keys.device, state.keys.dtype)
        return places

    def _map(
        self, pairs: Pairs, positions: Tensor | None, chosen: list[int], start: int, places: list[Place], chunk_tokens: int
    ) -> dict[int, tuple[Tensor, Tensor]]:
        if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise MismatchError(f"chunk_tokens: found {chunk_tokens!r}, needed a whole number, 1 or more")
        total = pairs[0][0].shape[2]
        positions = torch.arange(total, device=pairs[0][0].device) if positions is None else positions
        cut = [(keys[:, :, start:], values[:, :, start:]) for keys, values in pairs]
        return map_layers(
            self.spec,
            self._weights,
            self._frequencies,
            cut,
            positions[..., start:],
            {i: places[i] for i in chosen},
            chunk_tokens,
        )


def _require_place(device: Any, dtype: Any) -> None:
    """Refuse a device that cannot be had, before any weight is moved."""
    if dtype is not None and dtype not in _DTYPES:
        raise MismatchError(f"dtype: found {dtype!r}, needed one of {', '.join(map(str, _DTYPES))}")
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        reason = " ".join(str(error).split()).partition(". ")[0][:120]
        raise MismatchError(f"device: found {device!r}, needed one that torch has here, such as 'cpu' ({reason})") from None


def _rebuilt(spec: MapperSpec, weights: Weights, verdict: Verdict, judged_recompute: float) -> Mapper:
    return Mapper(spec, weights, verdict=verdict, judged_recompute=judged_recompute)
