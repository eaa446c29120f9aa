"""The keys and values of a model's first layer, for every token, without attention.

In a decoder the first layer's keys and values are a function of the token and its position alone: the embedding, a norm, a
projection, the rotary embedding. So computing them for a whole prompt costs about as much as one projection. The model's own
code computes them: each token runs as a sequence of its own, and the pass stops as soon as the first layer passes its keys and
values to the cache. So fused projections, key norms, learned positions and every other variation of a family are covered.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import KvfitError, MismatchError
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device, setting, some_tokens, text_config, unwrapped
from kvfit.model.trace import refusal

CHUNK_TOKENS = 4096
_N_TOKENS = 8
_FAR_POSITION = 1031


class _FirstLayerDone(BaseException):
    """Ends a pass after the first layer's keys and values. It is not an `Exception`, so that no model code can swallow it."""


@torch.no_grad()
def first_layer(
    model: Any, input_ids: Tensor, position_ids: Tensor | None = None, *, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """The keys and values that a prefill would cache in layer 0.

    Args:
        model: a causal language model of transformers, on any devices, that passes `check_first_layer`.
        input_ids: (B, T) token ids; padding may be any valid id.
        position_ids: (B, T) or (1, T), the position of each token; 0 to T - 1 by default. Left-padded batches need it.
        chunk_tokens: number of tokens computed at a time, which bounds the memory.

    Returns:
        Keys (rotated, if the layer rotates) and values, each (B, H, T, D), on the device and in the dtype of layer 0.

    Raises:
        MismatchError: `input_ids` or `position_ids` have the wrong shape.
        UnsupportedModelError: layer 0 has no keys and values of its own.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise MismatchError(f"input_ids: found shape {tuple(input_ids.shape)}, needed (B, T) with at least one token")
    batch, n_tokens = input_ids.shape
    if position_ids is None:
        position_ids = torch.arange(n_tokens, device=input_ids.device)[None]
    if tuple(position_ids.shape) not in {(batch, n_tokens), (1, n_tokens)}:
        raise MismatchError(f"position_ids: found shape {tuple(position_ids.shape)}, needed ({batch}, {n_tokens}) as input_ids")
    device = input_device(model)
    tokens = input_ids.to(device).reshape(-1, 1)  # (B * T, 1): sequences of one token see no other token
    positions = position_ids.to(device).expand(batch, -1).reshape(-1, 1)
    pieces = zip(torch.split(tokens, chunk_tokens), torch.split(positions, chunk_tokens), strict=True)
    chunks = [_pass(model, *piece) for piece in pieces]  # (B * T, H, 1, D)

    def joined(parts: list[Tensor]) -> Tensor:
        flat = torch.cat(parts)[:, :, 0]  # (B * T, H, D)
        return flat.reshape(batch, n_tokens, *flat.shape[1:]).transpose(1, 2).contiguous()

    return joined([keys for keys, _ in chunks]), joined([values for _, values in chunks])


@torch.no_grad()
def check_first_layer(model: Any) -> None:
    """Compare `first_layer` with a full pass over a few tokens, far from position 0. This costs one pass over 16 tokens.

    Args:
        model: a causal language model of transformers.

    Raises:
        UnsupportedModelError: layer 0 has no keys and values of its own, or they depend on more than the token and its
            position.
    """
    config = text_config(model)
    longest = setting(config, "max_position_embeddings")
    first = _FAR_POSITION if not isinstance(longest, int) else max(0, min(_FAR_POSITION, longest - _N_TOKENS))
    row = some_tokens(model, _N_TOKENS)
    input_ids = torch.stack((row, row.flip(0)))
    positions = torch.arange(first, first + _N_TOKENS, device=row.device).expand(2, -1)
    cached: list[tuple[Tensor, Tensor]] = []

    def on_update(layer_index: int, keys: Tensor, values: Tensor) -> None:
        if layer_index == 0:
            cached.append((keys, values))

    try:
        found = first_layer(model, input_ids, positions)
        accepted = positions if _takes_positions(model) else None
        caches.forward(model, input_ids, caches.recording_cache(on_update, model), position_ids=accepted, logits_to_keep=1)
    except KvfitError:
        raise
    except Exception as error:  # the model's own code failed, which is why the model does not qualify
        raise refusal(model, 0, f"a pass over {_N_TOKENS} tokens failed: {type(error).__name__}: {error}") from error
    if len(cached) != 1:
        raise refusal(model, 0, f"the layer cached {len(cached)} times in one pass")
    for kind, one, other in zip(("keys", "values"), found, cached[0], strict=True):
        if one.shape != other.shape or not _equal_to_rounding(one, other.to(one.device)):
            raise refusal(model, 0, f"its {kind} depend on more than the token and its position")


def _pass(model: Any, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of layer 0 for tokens (N, 1), each (N, H, 1, D)."""
    updates: list[tuple[int, Tensor, Tensor]] = []

    def on_update(layer_index: int, keys: Tensor, values: Tensor) -> None:
        updates.append((layer_index, keys.detach(), values.detach()))
        raise _FirstLayerDone

    try:
        accepted = positions if _takes_positions(model) else None
        caches.forward(model, tokens, caches.recording_cache(on_update, model), position_ids=accepted, logits_to_keep=1)
    except _FirstLayerDone:
        pass
    if not updates:
        raise refusal(model, 0, "a pass cached nothing (is gradient checkpointing on while the model trains?)")
    layer_index, keys, values = updates[0]
    if layer_index != 0:
        raise refusal(model, 0, f"the layer owns no keys and values, layer {layer_index} is the first that does")
    if keys.dim() != 4 or keys.shape[0] != len(tokens) or keys.shape[2] != 1 or values.shape[:3] != keys.shape[:3]:
        shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
        raise refusal(model, 0, f"found keys and values of shapes {shapes}, needed ({len(tokens)}, H, 1, D)")
    return keys, values


def _takes_positions(model: Any) -> bool:
    """Whether the model's `forward` takes positions. Families with ALiBi do not, because their keys do not depend on them."""
    return "position_ids" in inspect.signature(unwrapped(model).forward).parameters


def _equal_to_rounding(found: Tensor, wanted: Tensor) -> bool:
    """Whether two results of the same arithmetic in different orders agree, relative to each token's largest feature."""
    allowed = 16 * torch.finfo(wanted.dtype).eps * wanted.float().abs().amax((1, 3), keepdim=True)
    return bool(((found.float() - wanted.float()).abs() <= allowed).all())
