"""Read a KV cache of transformers: its keys and values, its length, the state of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError

Pair = tuple[Tensor, Tensor]


def read_cache(cache: Any) -> list[Pair]:
    """Keys and values of every layer at full length, as views of the cache's memory.

    Args:
        cache: a dynamic, sliding, static or offloaded transformers cache, or a sequence of (keys, values).

    Returns:
        Per layer (keys, values), each (B, H, T, D). An offloaded layer stays on its device.

    Raises:
        MismatchError: the cache is empty, or a layer has dropped tokens, has none, or differs in length; names the layer.
    """
    if isinstance(cache, Sequence) and not hasattr(cache, "layers"):
        pairs = [_plain_pair(item, index) for index, item in enumerate(cache)]
    elif hasattr(cache, "layers"):
        pairs = [_layer_pair(layer, index) for index, layer in enumerate(own_layers(cache))]
    else:
        field = next((name for name in ("cache", "past_key_values") if getattr(cache, name, None) is not None), None)
        advice = "" if field is None else f": pass its .{field}"  # it is the output of a model
        raise MismatchError(
            f"cache: found {type(cache).__name__}, needed a transformers Cache with layers or pairs (keys, values){advice}"
        )
    if not pairs or pairs[0][0].shape[2] == 0:
        raise MismatchError("cache: found no tokens, needed a prefilled cache: run the model on the prompt first")
    first = pairs[0][0]
    for index, (keys, values) in enumerate(pairs):
        if keys.dim() != 4 or values.dim() != 4:
            raise MismatchError(
                f"cache layer {index}: found shapes {tuple(keys.shape)}, {tuple(values.shape)}, needed (B, H, T, D)"
            )
        for kind, tensor in (("keys", keys), ("values", values)):
            if (tensor.shape[0], tensor.shape[2]) != (first.shape[0], first.shape[2]):
                raise MismatchError(
                    f"cache layer {index}: found {kind} of {tensor.shape[0]} sequences and {tensor.shape[2]} tokens, "
                    f"needed {first.shape[0]} and {first.shape[2]} as layer 0 has"
                )
    return pairs


def own_layers(cache: Any) -> list[Any]:
    """The layers of a transformers cache, without the places at its end of decoder layers that read an earlier one's."""
    layers = list(cache.layers)
    while layers and type(layers[-1]).__name__ == "DummyLayer":
        layers.pop()
    return layers


def _plain_pair(item: Any, index: int) -> Pair:
    pair = tuple(item)[:2] if isinstance(item, Sequence) else ()
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise MismatchError(f"cache layer {index}: found {type(item).__name__}, needed a pair of tensors (keys, values)")
    # Iterating over a cache gives (keys, values, window) since version 5; a full window may have dropped tokens.
    window = item[2] if len(item) == 3 else None
    if window is not None and pair[0].shape[-2] >= int(window) - 1:
        raise MismatchError(
            f"cache layer {index}: found {pair[0].shape[-2]} tokens of a layer with a window of {int(window)}, needed the "
            "cache itself, or one that keeps all tokens: fill a cache made by kvfit.model.cache.full_cache()"
        )
    return pair[0], pair[1]


def _layer_pair(layer: Any, index: int) -> Pair:
    name = type(layer).__name__
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    refuse_quantised(layer, index)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        what = "nothing stored" if getattr(layer, "is_initialized", None) is False else "no keys and values of its own"
        raise MismatchError(f"cache layer {index}: found {name} with {what}, needed keys and values of every token")
    if keys.dim() < 3:  # dynamic layers start from an empty vector
        raise MismatchError(
            f"cache layer {index}: found no tokens, needed a prefilled cache: run the model on the prompt first"
        )
    seen, stored = int(layer.get_seq_length()), keys.shape[-2]
    if seen > stored:
        kept = (
            f"the last {stored} of {seen} tokens (sliding window)"
            if getattr(layer, "is_sliding", False)
            else (f"{name} with keys and values of {stored} of {seen} tokens")
        )
        raise MismatchError(
            f"cache layer {index}: found {kept}, needed all of them: "
            "fill a cache made by kvfit.model.cache.full_cache() instead"
        )
    # A static layer has memory for all tokens that it may ever hold. What is beyond its current length is padding.
    return keys[:, :, :seen], values[:, :, :seen]


def refuse_quantised(layer: Any, index: int) -> None:
    """Refuse a layer that keeps its tokens quantised, of which its keys and values are only the newest few.

    Raises:
        MismatchError: it is one; names its class.
    """
    if any("Quantized" in base.__name__ for base in type(layer).__mro__):  # a user's own subclass may have any name
        raise MismatchError(
            f"cache layer {index}: found {type(layer).__name__}, which keeps its tokens quantised, needed plain keys and "
            "values of every token: fill a DynamicCache"
        )


def cache_length(cache: Any) -> int:
    """T, the number of tokens that the cache has seen, with those that a sliding layer has dropped."""
    if isinstance(cache, Sequence) and not hasattr(cache, "layers"):
        return int(cache[0][0].shape[2]) if len(cache) else 0
    return int(cache.get_seq_length())


@dataclass(frozen=True)
class LayerState:
    """What one layer of a cache holds.

    Attributes:
        length: number of tokens that it has seen.
        keys: its stored keys, (B, H, T or fewer, D); None while it is empty.
        capacity: the most tokens that it can hold; None for no limit.
    """

    length: int
    keys: Tensor | None
    capacity: int | None


def layer_states(cache: Any) -> list[LayerState]:
    """The state of every layer of a transformers cache. Layers at the end that were never filled may be missing.

    Raises:
        MismatchError: it is not a transformers cache.
    """
    if not hasattr(cache, "layers"):
        raise MismatchError(f"cache: found {type(cache).__name__}, needed a transformers Cache with layers")
    states = []
    for layer in own_layers(cache):
        keys = getattr(layer, "keys", None)
        length = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0  # some layers hold no keys
        capacity = None if getattr(layer, "is_sliding", False) else getattr(layer, "max_cache_len", None)
        states.append(LayerState(length, keys if keys is not None and keys.dim() == 4 else None, capacity))
    return states


def first_nonfinite(pairs: Sequence[Pair]) -> str | None:
    """The first layer and kind that holds NaN or infinity, as ``keys of layer 3``; None if all values are finite."""
    # If a term is not finite, neither is the sum, which takes a single read. A float32 can hold the sum of any float16 cache.
    sums: dict[torch.device, list[Tensor]] = {}
    for pair in pairs:
        for half in pair:
            sums.setdefault(half.device, []).append(half.sum(dtype=torch.promote_types(half.dtype, torch.float32)))
    if all(bool(torch.stack(parts).isfinite().all()) for parts in sums.values()):
        return None
    for layer_index, pair in enumerate(pairs):
        for kind, half in zip(("keys", "values"), pair, strict=True):
            if not bool(half.isfinite().all()):
                return f"{kind} of layer {layer_index}"
    return None  # all values are finite; only their sum overflows
