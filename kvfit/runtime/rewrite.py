"""Run some tokens of a cached sequence again and replace their cached keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.cache import (
    base_model,
    cache_argument,
    cache_dtype,
    full_cache,
    own_layers,
    place,
    stops_when_filled,
    uncompiled,
)
from kvfit.model.decoder import family, input_device, text_config, unwrapped

# Tokens that are run at a time, to bound the memory of the mask, which has a row as long as the sequence for each of them. A
# later chunk sees the new keys of an earlier one, so the result is that of a single pass.
CHUNK_TOKENS = 512
# On a CPU, tokens whose attention is computed at a time, each over the keys up to its own last token. Half of all pairs are
# hidden by the mask; a kernel computes those too. On a GPU, more and smaller kernels would cost more than they save.
BLOCK_TOKENS = 64


def refuse_static(cache: Any) -> None:
    """Refuse a cache of fixed length, in which a token cannot be run again.

    Raises:
        MismatchError: a layer is static; names it.
    """
    for layer_index, layer in enumerate(cache.layers):
        if "Static" in type(layer).__name__:
            raise MismatchError(
                f"cache layer {layer_index}: found {type(layer).__name__}, needed a dynamic cache to run chosen tokens again"
            )


def full_copy(cache: Any) -> Any:
    """A `full_cache` of the same tokens. Those that a windowed layer has dropped are zeros and must not be attended to."""
    full = full_cache()
    for layer_index, layer in enumerate(own_layers(cache)):
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
    """A cache with the layers of a full-length cache, whose updates overwrite the tokens (B, C) instead of appending.

    The model sees only the first `stop` tokens, because no token that is run may attend to later ones.
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
@uncompiled()
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
    """Run some tokens of a cached sequence again and replace their cached keys and values.

    In each layer a token attends to the keys and values of the tokens before it: new ones for tokens that are run again, cached
    ones for the others.

    Args:
        model: a causal language model with attention implementation ``sdpa`` or ``eager``.
        input_ids: (B, T), ids of the tokens that the cache holds.
        cache: a `full_cache` of T tokens; changed in place.
        tokens: (B, C), the tokens to run, ascending; a repeated token gives the same result.
        position_ids: (B, T), their rotary positions.
        attention_mask: (B, T), 0 on padding.
        windows: per layer, the sliding window or None.
        chunk_tokens: number of tokens of a row that are run at a time, which bounds the memory of the masks.

    Raises:
        UnsupportedModelError: the model's attention does not take a custom mask.
    """
    model = unwrapped(model)
    refuse_attention(model, "to run chosen tokens")
    pieces = torch.split(tokens, chunk_tokens, dim=1)
    block_tokens = BLOCK_TOKENS if tokens.device.type == "cpu" else chunk_tokens
    blocks = [torch.split(piece, block_tokens, dim=1) for piece in pieces]
    real = attention_mask.to(tokens.device).bool()
    lasts = [block.amax() + 1 for parts in blocks for block in parts]
    *stops, padded = torch.stack([*lasts, (~real).any()]).tolist()  # one read from the device
    for piece, parts in zip(pieces, blocks, strict=True):
        ends, stops = stops[: len(parts)], stops[len(parts) :]
        stop = ends[-1]
        rewriting = _rewriting_cache(cache, piece, stop)
        with stops_when_filled(model, rewriting), _Blocks([part.shape[1] for part in parts], ends):
            base_model(model)(
                input_ids=input_ids.gather(1, piece.to(input_ids.device)),
                attention_mask=_masks(model, piece, real[:, :stop], bool(padded), windows),
                position_ids=position_ids.gather(1, piece.to(position_ids.device)),
                use_cache=True,
                **{cache_argument(model): rewriting},
            )


class _Blocks(TorchFunctionMode):
    """Computes fused attention in blocks of queries, each over the keys up to its last token. The mask hides the others.

    A function mode belongs to the thread that entered it, so nothing changes for other threads.
    """

    def __init__(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Take, per block, its number of queries and the end of the keys that they see, ascending."""
        super().__init__()
        self.rows, self.ends = list(rows), list(ends)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call every function, attention under a mask of this pass block by block."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and len(args) == 3 and len(self.rows) > 1:
            query, key, value = args
            mask, more = kwargs.get("attn_mask"), {name: given for name, given in kwargs.items() if name != "attn_mask"}
            shape = (sum(self.rows), self.ends[-1])
            if isinstance(mask, Tensor) and tuple(mask.shape[2:]) == shape == (query.shape[2], key.shape[2]):
                masks = [part[..., :end] for part, end in zip(torch.split(mask, self.rows, 2), self.ends, strict=True)]
                blocks = [
                    func(part, key[:, :, : hidden.shape[3]], value[:, :, : hidden.shape[3]], attn_mask=hidden, **more)
                    for part, hidden in zip(torch.split(query, self.rows, 2), masks, strict=True)
                ]
                return torch.cat(blocks, 2)
        return func(*args, **kwargs)


def _masks(model: Any, tokens: Tensor, real: Tensor, padded: bool, windows: Sequence[int | None]) -> Any:
    """Additive masks (B, 1, C, T) of the tokens (B, C) over the first T tokens; one per layer type if windows differ."""
    dtype = cache_dtype(model)
    rows = tokens[:, :, None].int()  # int32 halves the memory of the comparison (B, C, T)
    columns = torch.arange(real.shape[1], dtype=torch.int32, device=tokens.device)
    unseen = columns > rows
    if padded:  # a padding token sees itself, so that its row is not empty
        unseen |= ~real[:, None, :] & (columns != rows)
    zero, lowest = torch.zeros((), dtype=dtype, device=tokens.device), torch.finfo(dtype).min

    def additive(window: int | None) -> Tensor:  # every backend accepts an additive mask
        hidden = unseen if window is None else unseen | (columns <= rows - window)
        return torch.where(hidden, lowest, zero)[:, None]

    if len(set(windows)) == 1:
        return additive(windows[0])
    kinds = text_config(model).layer_types[: len(windows)]  # models that mix windows take a mask per layer type
    return {kind: additive(window) for kind, window in dict(zip(kinds, windows, strict=True)).items()}


@torch.no_grad()
@uncompiled()
def check_rewrite(model: Any, windows: Sequence[int | None]) -> None:
    """Compare `rewrite` with a plain pass over a few tokens. This costs two passes over 12 tokens.

    Args:
        model: a causal language model.
        windows: per layer, the sliding window or None.

    Raises:
        UnsupportedModelError: running chosen tokens gives other keys and values than a plain pass, so the model's attention
            depends on more than its mask and positions.
    """
    model = unwrapped(model)
    refuse_attention(model, "to run chosen tokens")
    device, n_tokens = input_device(model), 12
    ids = (torch.arange(n_tokens, device=device) * 5 + int(text_config(model).vocab_size) // 3)[None]
    ids = ids % int(text_config(model).vocab_size)
    positions = torch.arange(n_tokens, device=device)[None]
    native, rewritten = full_cache(), full_cache()
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": True}
    base_model(model)(**arguments, **{cache_argument(model): native})
    for layer_index, layer in enumerate(native.layers):
        spoilt = [half.clone() for half in (layer.keys, layer.values)]
        for half in spoilt:
            half[:, :, 3::2] = half[:, :, :1]
        place(rewritten, layer_index, spoilt[0], spoilt[1])
    chosen = torch.arange(3, n_tokens, 2, device=device)[None]
    try:
        mask = torch.ones_like(ids)
        rewrite(
            model, ids, rewritten, chosen, position_ids=positions, attention_mask=mask, windows=windows, chunk_tokens=n_tokens
        )
    except Exception as error:  # the model's own code failed
        raise _refusal(model, f"a pass over chosen tokens failed: {type(error).__name__}: {str(error)[:120]}") from error
    for layer_index, (found, wanted) in enumerate(zip(rewritten.layers, native.layers, strict=True)):
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
    """Refuse a model whose attention kernel takes no mask or cannot be watched, or that takes no positions (ALiBi).

    Raises:
        UnsupportedModelError: the kernel is another one, which it names, or the model takes no positions.
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
