"""Find out whether a model takes several positions per token, as multimodal rotary embeddings do, by giving it three."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.model import cache as caches
from kvfit.model.decoder import some_tokens
from kvfit.model.trace import refusal

_N_TOKENS = 8


@torch.no_grad()
def refuse_several_axes(model: Any, first: int) -> None:
    """Refuse a model whose keys depend on several positions per token, because a map knows only one.

    A model with one position per token rejects three, or treats them as a batch of three, or reads only the first.

    Args:
        model: a causal language model that rotates its keys.
        first: position of the first token.

    Raises:
        UnsupportedModelError: the keys depend on more than one position; names the family.
    """
    input_ids = some_tokens(model, _N_TOKENS)[None]
    positions = torch.arange(first, first + _N_TOKENS, device=input_ids.device)
    axes = torch.stack((positions, positions + 7, positions + 29))[:, None]  # (3, 1, T)
    try:
        mixed = _keys(model, input_ids, axes)
    except Exception:
        return
    plain = _keys(model, input_ids, positions[None])
    one_sequence = [keys for keys in mixed if keys.shape[0] == 1]
    if len(one_sequence) == len(plain) and any(not torch.equal(a, b) for a, b in zip(mixed, plain, strict=True)):
        raise refusal(model, None, "multimodal rotary embedding: a token has several positions")


def _keys(model: Any, input_ids: Tensor, position_ids: Tensor) -> list[Tensor]:
    """The keys that each layer caches in a pass from an empty cache. The positions are passed to the model unchanged."""
    found: list[Tensor] = []
    cache = caches.recording_cache(lambda _layer_index, keys, _values: found.append(keys.detach()))
    model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **{caches.cache_argument(model): cache})
    return found
