"""Whether a model takes several positions per token, as multimodal rotary embeddings do: found by giving it three."""

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
    """Refuse a model that mixes several positions of a token into its keys: a map knows one position.

    A model of one axis refuses three positions per token, or takes them for a batch of three, or reads the first alone.

    Args:
        model: a causal language model that rotates its keys.
        first: the position to begin at.

    Raises:
        UnsupportedModelError: names family and reason.
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
    """What each layer caches as keys in a pass from an empty cache; positions are passed on as they are."""
    found: list[Tensor] = []
    cache = caches.recording_cache(lambda _layer_index, keys, _values: found.append(keys.detach()))
    model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **{caches.cache_argument(model): cache})
    return found
