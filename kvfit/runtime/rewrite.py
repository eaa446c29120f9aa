"""Running some tokens of a cached sequence again: with `kvfit.model.cache`, all that knows transformers' API.

A cache that writes fresh keys and values over cached ones, and the masks that make a pass over any choice of tokens causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.cache import base_model, cache_argument, cache_dtype, full_cache, place, unwrapped


def refuse_static(cache: Any) -> None:
    """Refuse a cache whose memory is of a fixed length: a token cannot be run again in it.

    Raises:
        MismatchError: names the layer.
    """
    for layer_index, layer in enumerate(cache.layers):
        if "Static" in type(layer).__name__:
            raise MismatchError(
                f"cache layer {layer_index}: found {type(layer).__name__}, needed a dynamic cache to run chosen tokens again"
            )


def whole(cache: Any) -> Any:
    """A `full_cache` with the same tokens; those that a windowed layer has dropped are zeros and must not be attended to."""
    full = full_cache()
    for layer_index, layer in enumerate(cache.layers):
        if (seen := int(layer.get_seq_length())) == 0:
            continue
        halves = [
            torch.zeros(*half.shape[:2], seen, half.shape[3], dtype=half.dtype, device=half.device)
            for half in (layer.keys, layer.values)
        ]
        for zeros, half in zip(halves, (layer.keys, layer.values), strict=True):
            zeros[:, :, seen - half.shape[2] :] = half
        place(full, layer_index, halves[0], halves[1])
    return full


def _rewriting_cache(cache: Any, tokens: Tensor) -> Any:
    """The layers of a full-length cache, in which an update replaces the tokens (B, C) instead of appending."""
    from transformers import DynamicCache

    class RewritingCache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            layer = self.layers[layer_idx]
            index = tokens.to(key_states.device)[:, None, :, None]
            # Not in place: the memory may be shared with a cache that the caller still holds.
            layer.keys = layer.keys.scatter(2, index.expand(key_states.shape), key_states.to(layer.keys.dtype))
            layer.values = layer.values.scatter(2, index.expand(value_states.shape), value_states.to(layer.values.dtype))
            return layer.keys, layer.values

    rewriting = RewritingCache()
    rewriting.layers = cache.layers
    return rewriting


@torch.no_grad()
def rewrite(
    model: Any,
    input_ids: Tensor,
    cache: Any,
    tokens: Tensor,
    *,
    position_ids: Tensor,
    attention_mask: Tensor,
    windows: Sequence[int | None],
) -> None:
    """Run some tokens of a cached sequence again and put their fresh keys and values in the place of the cached ones.

    In each layer a token attends to the earlier tokens' keys and values: fresh ones of those that are run again, cached ones of
    the rest.

    Args:
        model: a causal language model with attention ``sdpa`` or ``eager``.
        input_ids: (B, T) ids of the tokens that the cache holds.
        cache: a `full_cache` of T tokens; changed.
        tokens: (B, C) which tokens to run, ascending; a token named twice is run twice, to the same end.
        position_ids: (B, T).
        attention_mask: (B, T), 0 on padding.
        windows: per layer the sliding window or None.

    Raises:
        UnsupportedModelError: the model's attention takes no mask of our own.
    """
    model = unwrapped(model)
    refuse_attention(model, "to run chosen tokens")
    columns = torch.arange(input_ids.shape[1], device=tokens.device)
    distance = tokens[:, :, None] - columns  # (B, C, T)
    allowed = (distance > 0) & attention_mask.to(tokens.device).bool()[:, None, :] | (distance == 0)
    dtype = cache_dtype(model)

    def additive(window: int | None) -> Tensor:  # (B, 1, C, T): the one form of mask that every backend adds or takes
        seen = allowed if window is None else allowed & (distance < window)
        return torch.zeros(seen.shape, dtype=dtype, device=tokens.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    masks: Any
    if len(set(windows)) == 1:
        masks = additive(windows[0])
    else:  # models that mix windows take a mask per kind of layer
        kinds = model.config.get_text_config(decoder=True).layer_types
        masks = {kind: additive(window) for kind, window in dict(zip(kinds, windows, strict=True)).items()}
    base_model(model)(
        input_ids=input_ids.gather(1, tokens),
        attention_mask=masks,
        position_ids=position_ids.gather(1, tokens),
        use_cache=True,
        **{cache_argument(model): _rewriting_cache(cache, tokens)},
    )


def refuse_attention(model: Any, purpose: str) -> None:
    """Refuse a model whose attention kernel cannot be given a mask or watched.

    Raises:
        UnsupportedModelError: names the kernel.
    """
    found = getattr(model.config, "_attn_implementation", None)
    if found not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{model.config.model_type}: found attention implementation {found}, needed sdpa or eager {purpose}: "
            "load the model with attn_implementation='sdpa'"
        )
