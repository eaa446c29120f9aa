"""Running some tokens of a cached sequence again, their fresh keys and values in the place of the cached ones."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.cache import base_model, cache_argument, cache_dtype, full_cache, place
from kvfit.model.decoder import family, input_device, text_config, unwrapped

# Tokens that are run at a time. A mask has so many rows, and a row is as long as the sequence. A later chunk sees the fresh
# keys of an earlier one, so the result is that of one pass.
CHUNK_TOKENS = 512


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


def full_copy(cache: Any) -> Any:
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


def _rewriting_cache(cache: Any, tokens: Tensor, stop: int) -> Any:
    """The layers of a full-length cache, in which an update overwrites the tokens (B, C) instead of appending.

    The model sees the first `stop` tokens only: those after the last one that is run are in nobody's past.
    """
    from transformers import DynamicCache

    class RewritingCache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            layer = self.layers[layer_idx]
            index = tokens.to(key_states.device)
            for held, fresh in ((layer.keys, key_states), (layer.values, value_states)):
                if len(index) == 1:
                    held.index_copy_(2, index[0], fresh.to(held.dtype))
                else:
                    held.scatter_(2, index[:, None, :, None].expand(fresh.shape), fresh.to(held.dtype))
            return layer.keys[:, :, :stop], layer.values[:, :, :stop]

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
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Run some tokens of a cached sequence again and put their fresh keys and values in the place of the cached ones.

    In each layer a token attends to the earlier tokens' keys and values: fresh ones of those that are run again, cached ones of
    the rest.

    Args:
        model: a causal language model with attention ``sdpa`` or ``eager``.
        input_ids: (B, T) ids of the tokens that the cache holds.
        cache: a `full_cache` of T tokens; its memory is written to.
        tokens: (B, C) which tokens to run, ascending; a token named twice is run twice, to the same end.
        position_ids: (B, T).
        attention_mask: (B, T), 0 on padding.
        windows: per layer the sliding window or None.
        chunk_tokens: tokens of a row that are run at a time; bounds the memory of the masks.

    Raises:
        UnsupportedModelError: the model's attention takes no mask of our own.
    """
    model = unwrapped(model)
    refuse_attention(model, "to run chosen tokens")
    pieces = torch.split(tokens, chunk_tokens, dim=1)
    real = attention_mask.to(tokens.device).bool()
    *ends, padded = torch.stack([*(piece.amax() + 1 for piece in pieces), (~real).any()]).tolist()  # one reading
    for piece, stop in zip(pieces, ends, strict=True):
        base_model(model)(
            input_ids=input_ids.gather(1, piece.to(input_ids.device)),
            attention_mask=_masks(model, piece, real[:, :stop], bool(padded), windows),
            position_ids=position_ids.gather(1, piece.to(position_ids.device)),
            use_cache=True,
            **{cache_argument(model): _rewriting_cache(cache, piece, stop)},
        )


def _masks(model: Any, tokens: Tensor, real: Tensor, padded: bool, windows: Sequence[int | None]) -> Any:
    """Masks (B, 1, C, T) to be added, of the tokens (B, C) over the first T; one per kind of layer where windows differ."""
    dtype = cache_dtype(model)
    rows = tokens[:, :, None].int()  # half the memory of whole numbers of 8 bytes, on the way to (B, C, T)
    columns = torch.arange(real.shape[1], dtype=torch.int32, device=tokens.device)
    unseen = columns > rows
    if padded:  # a token of the padding sees itself, so that its row is not empty
        unseen |= ~real[:, None, :] & (columns != rows)
    none, all_of_it = torch.zeros((), dtype=dtype, device=tokens.device), torch.finfo(dtype).min

    def additive(window: int | None) -> Tensor:  # the one form of mask that every backend adds or takes
        hidden = unseen if window is None else unseen | (columns <= rows - window)
        return torch.where(hidden, all_of_it, none)[:, None]

    if len(set(windows)) == 1:
        return additive(windows[0])
    kinds = text_config(model).layer_types  # models that mix windows take a mask per kind of layer
    return {kind: additive(window) for kind, window in dict(zip(kinds, windows, strict=True)).items()}


@torch.no_grad()
def check_rewrite(model: Any, windows: Sequence[int | None]) -> None:
    """Compare `rewrite` with a plain pass over a few tokens. Costs two passes over 12 tokens.

    Args:
        model: a causal language model.
        windows: per layer the sliding window or None.

    Raises:
        UnsupportedModelError: running chosen tokens gives other keys and values than a plain pass, so the model's attention
            depends on more than the mask and the positions that it is given.
    """
    model = unwrapped(model)
    refuse_attention(model, "to run chosen tokens")
    device, n_tokens = input_device(model), 12
    ids = (torch.arange(n_tokens, device=device) * 5 + int(text_config(model).vocab_size) // 3)[None]
    ids = ids % int(text_config(model).vocab_size)
    positions = torch.arange(n_tokens, device=device)[None]
    native, again = full_cache(), full_cache()
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": True}
    base_model(model)(**arguments, **{cache_argument(model): native})
    for layer_index, layer in enumerate(native.layers):
        spoilt = [half.clone() for half in (layer.keys, layer.values)]
        for half in spoilt:
            half[:, :, 3::2] = half[:, :, :1]
        place(again, layer_index, spoilt[0], spoilt[1])
    chosen = torch.arange(3, n_tokens, 2, device=device)[None]
    try:
        mask = torch.ones_like(ids)
        rewrite(model, ids, again, chosen, position_ids=positions, attention_mask=mask, windows=windows, chunk_tokens=n_tokens)
    except Exception as error:  # whatever the model's own code raises is the reason
        raise _refusal(model, f"a pass over chosen tokens failed: {type(error).__name__}: {str(error)[:120]}") from error
    for layer_index, (found, wanted) in enumerate(zip(again.layers, native.layers, strict=True)):
        for one, other in ((found.keys, wanted.keys), (found.values, wanted.values)):
            largest = float((one.float() - other.float()).abs().max() / other.float().abs().max())
            if not largest < 64 * torch.finfo(other.dtype).eps:
                raise _refusal(model, f"layer {layer_index} gives other keys and values for chosen tokens than for all")


def _refusal(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{family(model)}: found that {reason}, needed attention that follows the mask and the positions: leave recompute and "
        "exact_tokens out"
    )


def refuse_attention(model: Any, purpose: str) -> None:
    """Refuse a model whose attention kernel cannot be given a mask or watched, or that takes no positions (ALiBi).

    Raises:
        UnsupportedModelError: names the kernel.
    """
    found = getattr(model.config, "_attn_implementation", None)
    if found not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{family(model)}: found attention implementation {found}, needed sdpa or eager {purpose}: "
            "load the model with attn_implementation='sdpa'"
        )
    if "position_ids" not in inspect.signature(unwrapped(model).forward).parameters:
        raise UnsupportedModelError(
            f"{family(model)}: found a model that takes no positions, needed position_ids {purpose}: leave recompute and "
            "exact_tokens out"
        )
