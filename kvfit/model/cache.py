"""Build, fill and crop transformers' KV caches. All of kvfit goes through this module; `reading` and `forward` are behind it.

It works with both names of the cache argument (``cache=`` since 5.24, ``past_key_values=`` before; a model ignores the other
name without an error) and with every cache that holds plain keys and values per layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model.decoder import cached_heads, family, layer_devices, number, unwrapped
from kvfit.model.forward import base_model, cache_argument, forward, stops_when_filled, uncompiled
from kvfit.model.reading import (
    LayerState,
    Pair,
    cache_length,
    first_nonfinite,
    layer_states,
    own_layers,
    read_cache,
    refuse_quantised,
)

__all__ = [
    "LayerState",
    "Pair",
    "append",
    "base_model",
    "cache_argument",
    "cache_dtype",
    "cache_length",
    "check_cache",
    "check_finite",
    "crop",
    "drops_tokens",
    "first_nonfinite",
    "forward",
    "full_cache",
    "layer_devices",
    "layer_states",
    "layer_windows",
    "new_cache",
    "own_layers",
    "place",
    "read_cache",
    "recording_cache",
    "stops_when_filled",
    "uncompiled",
    "unwrapped",
]


def new_cache(model: Any = None) -> Any:
    """An empty cache of the kind that `model` needs, whose windowed layers drop old tokens. Without a model, `full_cache`."""
    if model is None:
        return full_cache()
    from transformers import DynamicCache

    return DynamicCache(config=unwrapped(model).config)


def full_cache() -> Any:
    """An empty cache that keeps every token of every layer, also of windowed layers, as capture needs it."""
    from transformers import DynamicCache

    return DynamicCache()


def recording_cache(on_update: Callable[[int, Tensor, Tensor], None], model: Any = None) -> Any:
    """A cache that calls ``on_update(layer_index, keys, values)`` before a layer caches them.

    It keeps every token; with a model, only the tokens that the model needs.
    """
    from transformers import DynamicCache

    class RecordingCache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            on_update(layer_idx, key_states, value_states)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return RecordingCache() if model is None else RecordingCache(config=unwrapped(model).config)


def layer_windows(model: Any, n_layers: int) -> tuple[int | None, ...]:
    """Per layer, the sliding window in tokens, or None. The model's own cache says how much it keeps."""
    layers = own_layers(new_cache(model))
    if not layers:  # older versions create the layers of a cache without windows as they are filled
        return (None,) * n_layers
    windows = (getattr(layer, "sliding_window", None) if layer.is_sliding else None for layer in layers)
    return tuple(None if window is None else int(window) for window in windows)


def append(cache: Any, layer_index: int, keys: Tensor, values: Tensor) -> None:
    """Append full-length keys and values, (B, H, T, D), of one layer; a windowed layer drops what it does not need."""
    layer = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    if layer is not None and "Static" in type(layer).__name__ and "cache_kwargs" in inspect.signature(layer.update).parameters:
        # Before version 5, a static layer had to be told where to write; otherwise it wrote from its first token on.
        held = int(layer.get_seq_length())
        positions = torch.arange(held, held + keys.shape[-2], device=keys.device)
        cache.update(keys, values, layer_index, {"cache_position": positions})
    else:
        cache.update(keys, values, layer_index)


def place(cache: Any, layer_index: int, keys: Tensor, values: Tensor) -> None:
    """As `append`, for tensors that the caller does not need any more: an empty dynamic layer takes them without a copy."""
    known = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    if known is None or not getattr(known, "is_initialized", False):  # a full static window takes no empty update
        append(cache, layer_index, keys[:, :, :0], values[:, :, :0])  # creates the layer if it does not exist yet
    layer = cache.layers[layer_index]
    if type(layer).__name__ == "DynamicLayer" and int(layer.get_seq_length()) == 0 and layer.keys.dtype == keys.dtype:
        layer.keys, layer.values = keys, values
    else:
        append(cache, layer_index, keys, values)


def check_cache(model: Any, cache: Any, name: str = "cache") -> None:
    """Refuse a cache that another model has filled, by its number of layers, heads and features per head.

    Args:
        model: a causal language model.
        cache: a transformers cache; an empty one fits any model.
        name: what the error calls the cache.

    Raises:
        MismatchError: the cache differs from the model's; names in what.
    """
    held = [state for state in layer_states(cache) if state.length]
    if not held:
        return
    # Layers that reuse an earlier layer's keys come last. A cache that grew while it was filled may not contain them.
    least = len(own_layers(new_cache(model))) or number(model, "num_hidden_layers")
    most = max(least, number(model, "num_hidden_layers"))
    found = len(cache.layers)
    advice = "a cache that this model has filled, or that was mapped for it"
    if not least <= found <= most:
        raise MismatchError(f"{name}: found {found} layers, needed {least} as {family(model)} has: {advice}")
    heads = cached_heads(model)
    for layer_index, state in enumerate(layer_states(cache)):
        if state.keys is None or layer_index not in heads:
            continue
        found_heads, needed_heads = (state.keys.shape[1], state.keys.shape[3]), heads[layer_index]
        if found_heads != needed_heads:
            raise MismatchError(
                f"{name}, layer {layer_index}: found heads and head size {found_heads}, needed {needed_heads}: {advice}"
            )


def check_finite(cache: Any, name: str = "cache") -> None:
    """Refuse a cache that holds NaN or infinity. This waits once for every device that holds a layer.

    Args:
        cache: as for `read_cache`.
        name: what the error calls the cache.

    Raises:
        MismatchError: a value is not finite; names the first layer and kind.
    """
    where = first_nonfinite(read_cache(cache))
    if where is not None:
        raise MismatchError(
            f"{name}, {where}: found NaN or infinity, needed finite numbers: fill it again, in bfloat16 or float32 if it was "
            "filled in float16, which overflows"
        )


def cache_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's keys and values, which is the dtype of its floating-point weights."""
    dtype = getattr(unwrapped(model), "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def drops_tokens(cache: Any) -> bool:
    """Whether a layer keeps only its window, so that cropping cannot bring back the tokens that it has dropped."""
    return any(_drops_tokens(layer) for layer in own_layers(cache))


def _drops_tokens(layer: Any) -> bool:
    return hasattr(layer, "cumulative_length")


def crop(cache: Any, length: int) -> None:
    """Shorten a cache to its first `length` tokens.

    Raises:
        MismatchError: the cache is shorter, or a windowed layer has dropped tokens that it would need. The cache is unchanged.
    """
    held = cache_length(cache)
    if length == held:
        return
    if not 0 <= length < held:
        raise MismatchError(f"cache: found {held} tokens, needed at least {length}")
    layers = own_layers(cache)
    for index, layer in enumerate(layers):
        refuse_quantised(layer, index)
        if int(layer.get_seq_length()) != held:
            raise MismatchError(f"cache layer {index}: found {int(layer.get_seq_length())} tokens, needed {held} as in layer 0")
        if held > layer.keys.shape[-2]:
            raise MismatchError(
                f"cache layer {index}: found a sliding window that has dropped tokens, needed all of them to crop: "
                "start from a new cache"
            )
        if "Static" in type(layer).__name__ and not hasattr(layer, "crop"):
            raise MismatchError(
                f"cache layer {index}: found a static layer that this transformers cannot crop, needed a dynamic one"
            )
    for layer in layers:
        if "Static" in type(layer).__name__:
            layer.crop(length - held)
        else:  # the argument of a layer's own crop, and its effect on a window, differ between versions
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            if _drops_tokens(layer):
                layer.cumulative_length = length
