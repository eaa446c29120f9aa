"""Reading a KV cache of transformers: its keys and values, its length, the state of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError

Pair = tuple[Tensor, Tensor]


def read_cache(cache: Any) -> list[Pair]:
    """Keys and values of every layer, full length, in the cache's own memory (nothing is copied).

    Args:
        cache: a dynamic, sliding, static or offloaded transformers cache, or a sequence of (keys, values).

    Returns:
        Per layer (keys, values), each (B, H, T, D). An offloaded layer stays on the device where it lies.

    Raises:
        MismatchError: the cache is empty, a layer has dropped tokens, has none, or differs in length; names the layer.
    """
    if isinstance(cache, Sequence) and not hasattr(cache, "layers"):
        pairs = [_plain_pair(item, index) for index, item in enumerate(cache)]
    elif hasattr(cache, "layers"):
        pairs = [_layer_pair(layer, index) for index, layer in enumerate(cache.layers)]
    else:
        field = next((name for name in ("cache", "past_key_values") if getattr(cache, name, None) is not None), None)
        advice = "" if field is None else f": pass its .{field}"  # what a model returns
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
    if "Quantized" in name:
        raise MismatchError(
            f"cache layer {index}: found {name}, needed keys and values that are not quantised: use a DynamicCache"
        )
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        what = "nothing stored" if getattr(layer, "is_initialized", None) is False else "no keys and values of its own"
        raise MismatchError(f"cache layer {index}: found {name} with {what}, needed keys and values of every token")
    if keys.dim() < 3:  # dynamic layers start from an empty vector
        raise MismatchError(
            f"cache layer {index}: found no tokens, needed a prefilled cache: run the model on the prompt first"
        )
    seen, stored = int(layer.get_seq_length()), keys.shape[-2]
    if seen > stored:
        raise MismatchError(
            f"cache layer {index}: found the last {stored} of {seen} tokens (sliding window), needed all of them: "
            "fill a cache made by kvfit.model.cache.full_cache() instead"
        )
    # A static layer is as long as it may ever get; what is beyond its length is padding.
    return keys[:, :, :seen], values[:, :, :seen]


def cache_length(cache: Any) -> int:
    """Tokens that the cache stands for, T; those that a sliding layer has dropped count too."""
    if isinstance(cache, Sequence) and not hasattr(cache, "layers"):
        return int(cache[0][0].shape[2]) if len(cache) else 0
    return int(cache.get_seq_length())


@dataclass(frozen=True)
class LayerState:
    """What one layer of a cache holds.

    Attributes:
        length: tokens that it stands for.
        keys: its stored keys, (B, H, T or fewer, D); None while it is empty.
        capacity: most tokens that it can take, None for no limit.
    """

    length: int
    keys: Tensor | None
    capacity: int | None


def layer_states(cache: Any) -> list[LayerState]:
    """The state of every layer of a transformers cache; layers that were never filled may be missing at the end.

    Raises:
        MismatchError: not a transformers cache.
    """
    if not hasattr(cache, "layers"):
        raise MismatchError(f"cache: found {type(cache).__name__}, needed a transformers Cache with layers")
    states = []
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        length = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0  # a layer that uses another's keys
        capacity = None if getattr(layer, "is_sliding", False) else getattr(layer, "max_cache_len", None)
        states.append(LayerState(length, keys if keys is not None and keys.dim() == 4 else None, capacity))
    return states


def first_nonfinite(pairs: Sequence[Pair]) -> str | None:
    """Where keys and values per layer hold NaN or infinity first, as ``keys of layer 3``; None where they are finite."""
    # A sum is finite only where all its terms are, and takes one reading; float32 holds the sum of any float16 cache.
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
    return None  # finite after all, only so large that their sum is not
