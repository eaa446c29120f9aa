"""Transformers' KV caches: reading, building, and running a model on one. No other file knows their API.

Works with both names of the argument (``cache=`` since 5.24, ``past_key_values=`` before: the other name is swallowed
without an error) and with every cache that holds plain keys and values per layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.decoder import cached_heads, family, layer_devices, text_config, unwrapped

__all__ = [
    "append",
    "cache_argument",
    "cache_length",
    "check_cache",
    "check_finite",
    "crop",
    "first_nonfinite",
    "forward",
    "full_cache",
    "layer_devices",
    "layer_windows",
    "new_cache",
    "read_cache",
    "recording_cache",
    "unwrapped",
]

Pair = tuple[Tensor, Tensor]


def cache_argument(model: Any) -> str:
    """Name of the argument (and output field) that takes the cache: ``cache`` or ``past_key_values``.

    Raises:
        UnsupportedModelError: `forward` takes neither.
    """
    parameters = inspect.signature(unwrapped(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{family(model)}: forward takes neither cache= nor past_key_values=, needed a model with a cache"
    )


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


def new_cache(model: Any = None) -> Any:
    """An empty cache of the kind that `model` needs: windowed layers truncate themselves. Without a model, `full_cache`."""
    if model is None:
        return full_cache()
    from transformers import DynamicCache

    return DynamicCache(config=unwrapped(model).config)


def full_cache() -> Any:
    """An empty cache that keeps every token of every layer, windowed layers included; for capture."""
    from transformers import DynamicCache

    return DynamicCache()


def recording_cache(on_update: Callable[[int, Tensor, Tensor], None], model: Any = None) -> Any:
    """A cache that calls ``on_update(layer_index, keys, values)`` with what a layer is about to cache.

    Keeps every token, or only what `model` needs where one is given.
    """
    from transformers import DynamicCache

    class RecordingCache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            on_update(layer_idx, key_states, value_states)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return RecordingCache() if model is None else RecordingCache(config=unwrapped(model).config)


def layer_windows(model: Any, n_layers: int) -> tuple[int | None, ...]:
    """Per layer the sliding window in tokens or None, as the model's own cache truncates."""
    layers = new_cache(model).layers
    if not layers:  # older versions make the layers of a cache without windows as they are filled
        return (None,) * n_layers
    windows = (getattr(layer, "sliding_window", None) if layer.is_sliding else None for layer in layers)
    return tuple(None if window is None else int(window) for window in windows)


def append(cache: Any, layer_index: int, keys: Tensor, values: Tensor) -> None:
    """Append full-length keys and values, (B, H, T, D), of one layer; a windowed layer drops what it does not need."""
    layer = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    if layer is not None and "Static" in type(layer).__name__ and "cache_kwargs" in inspect.signature(layer.update).parameters:
        # Before version 5 a static layer had to be told where to write, and began at its first token when it was not.
        held = int(layer.get_seq_length())
        positions = torch.arange(held, held + keys.shape[-2], device=keys.device)
        cache.update(keys, values, layer_index, {"cache_position": positions})
    else:
        cache.update(keys, values, layer_index)


def place(cache: Any, layer_index: int, keys: Tensor, values: Tensor) -> None:
    """As `append`, for tensors that the caller gives away: an empty dynamic layer takes them without a copy."""
    known = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    if known is None or not getattr(known, "is_initialized", False):  # a full static window takes no empty update
        append(cache, layer_index, keys[:, :, :0], values[:, :, :0])  # makes the layer where it does not exist yet
    layer = cache.layers[layer_index]
    if type(layer).__name__ == "DynamicLayer" and int(layer.get_seq_length()) == 0 and layer.keys.dtype == keys.dtype:
        layer.keys, layer.values = keys, values
    else:
        append(cache, layer_index, keys, values)


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


def check_cache(model: Any, cache: Any, name: str = "cache") -> None:
    """Refuse a cache that another model has filled: by layers, heads and head size, as far as the model itself says them.

    Args:
        model: a causal language model.
        cache: a transformers cache; an empty one fits any model.
        name: what to call it.

    Raises:
        MismatchError: names what differs.
    """
    held = [state for state in layer_states(cache) if state.length]
    if not held:
        return
    # Layers that use an earlier one's keys come last and may have no place in a cache that grew as it was filled.
    own = [index for index, layer in enumerate(new_cache(model).layers) if type(layer).__name__ != "DummyLayer"]
    least = own[-1] + 1 if own else int(text_config(model).num_hidden_layers)
    most = max(least, int(text_config(model).num_hidden_layers))
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
    """Refuse NaN and infinity. Waits once for every device that holds a layer.

    Args:
        cache: as for `read_cache`.
        name: what to call it.

    Raises:
        MismatchError: names the first layer and kind.
    """
    where = first_nonfinite(read_cache(cache))
    if where is not None:
        raise MismatchError(
            f"{name}, {where}: found NaN or infinity, needed finite numbers: fill it again, in bfloat16 or float32 if it was "
            "filled in float16, which overflows"
        )


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


def cache_dtype(model: Any) -> torch.dtype:
    """The dtype that a model's keys and values have: that of its floating-point weights."""
    dtype = getattr(unwrapped(model), "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def drops_tokens(cache: Any) -> bool:
    """Whether a layer keeps only its window, so that cropping cannot give back what it has dropped."""
    return any(_drops_tokens(layer) for layer in cache.layers)


def _drops_tokens(layer: Any) -> bool:
    return hasattr(layer, "cumulative_length")


def crop(cache: Any, length: int) -> None:
    """Shorten a cache to its first `length` tokens.

    Raises:
        MismatchError: it is shorter, or a windowed layer has dropped tokens that it would need again; nothing has changed.
    """
    held = cache_length(cache)
    if length == held:
        return
    if not 0 <= length < held:
        raise MismatchError(f"cache: found {held} tokens, needed at least {length}")
    for index, layer in enumerate(cache.layers):
        if int(layer.get_seq_length()) > layer.keys.shape[-2]:
            raise MismatchError(
                f"cache layer {index}: found a sliding window that has dropped tokens, needed all of them to crop: "
                "start from a new cache"
            )
        if "Static" in type(layer).__name__ and not hasattr(layer, "crop"):
            raise MismatchError(
                f"cache layer {index}: found a static layer that this transformers cannot crop, needed a dynamic one"
            )
    for layer in cache.layers:
        if "Static" in type(layer).__name__:
            layer.crop(length - held)
        else:  # what a layer's own crop takes, and what it does to a window, differs between versions
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            if _drops_tokens(layer):
                layer.cumulative_length = length


@torch.no_grad()
def forward(
    model: Any,
    input_ids: Tensor,
    cache: Any,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_to_keep: int | None = None,
    base: bool = False,
) -> Tensor:
    """Run a model on new tokens on top of a cache, which grows by them.

    Args:
        model: a causal language model.
        input_ids: (B, T_new), the tokens that the cache does not hold.
        cache: a transformers cache; changed in place.
        position_ids: (B, T_new). Needed by left-padded batches, where it is derived from the mask when it is not given,
            because `forward` of transformers does not.
        attention_mask: (B, T_cache + T_new), ones for real tokens; None for all ones.
        logits_to_keep: logits of this many last tokens only; None for all.
        base: leave out the language-model head.

    Returns:
        (B, T_new or `logits_to_keep`, vocabulary) logits, or with `base` the (B, T_new, hidden) last hidden state.

    Raises:
        MismatchError: the mask or the positions do not fit; transformers would give wrong numbers without an error.
    """
    batch, n_new = input_ids.shape
    total = cache_length(cache) + n_new
    arguments: dict[str, Any] = {}
    if attention_mask is not None:
        if tuple(attention_mask.shape) != (batch, total):
            raise MismatchError(
                f"attention_mask: found shape {tuple(attention_mask.shape)}, needed ({batch}, {total}): "
                "cached and new tokens together"
            )
        if position_ids is None and bool((attention_mask == 0).any()):
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -n_new:]
        arguments["attention_mask"] = attention_mask
    if position_ids is not None:
        if tuple(position_ids.shape) not in {(batch, n_new), (1, n_new)}:
            raise MismatchError(
                f"position_ids: found shape {tuple(position_ids.shape)}, needed ({batch}, {n_new}) as input_ids"
            )
        arguments["position_ids"] = position_ids
    arguments[cache_argument(model)] = cache
    if base:
        return base_model(model)(input_ids=input_ids, use_cache=True, **arguments)[0]  # type: ignore[no-any-return]
    if logits_to_keep is not None and "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters:
        arguments["logits_to_keep"] = logits_to_keep
    logits: Tensor = model(input_ids=input_ids, use_cache=True, **arguments).logits
    return logits if logits_to_keep is None else logits[:, -logits_to_keep:]


def base_model(model: Any) -> Any:
    """The model without its language-model head; some versions give the whole model as its own `base_model`."""
    inner = unwrapped(model)
    for name in ("base_model", "model", "transformer", "language_model"):
        base = getattr(inner, name, None)
        if base is not None and base is not inner and "logits_to_keep" not in inspect.signature(base.forward).parameters:
            return base
    raise UnsupportedModelError(f"{family(model)}: found no base model without a language-model head")
