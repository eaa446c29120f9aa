"""Whether decoder layers that own no keys and values read those that the cache holds: found by giving them a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.model import cache as caches
from kvfit.model.decoder import number, owning_layers, some_tokens
from kvfit.model.trace import refusal

_N_TOKENS = 8


@torch.no_grad()
def refuse_private_sharing(model: Any) -> None:
    """Refuse a model whose last layers read an earlier layer's keys and values from elsewhere than the cache.

    Such a model would continue from a mapped cache with something else in these layers. For a model with such layers this
    costs two short passes: one token continues on the cached keys and values of the others, put into a new cache.

    Args:
        model: a causal language model.

    Raises:
        UnsupportedModelError: names family, layer and reason.
    """
    owning = owning_layers(model)
    if owning == number(model, "num_hidden_layers"):
        return
    input_ids = some_tokens(model, _N_TOKENS)[None]
    filled, given = caches.full_cache(), caches.full_cache()
    wanted = caches.forward(model, input_ids, filled)[:, -1]
    for layer_index, pair in enumerate(caches.read_cache(filled)):
        caches.append(given, layer_index, *(half[:, :, :-1].clone() for half in pair))
    try:
        found = caches.forward(model, input_ids[:, -1:], given)[:, -1]
    except Exception as error:  # whatever the model's own code raises is the reason
        raise refusal(model, owning, f"it does not continue on a cache of the layers before it: {error}") from error
    if not _alike(found, wanted):
        raise refusal(model, owning, "it reads the keys and values of an earlier layer from elsewhere than the cache")


def _alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether logits agree to the rounding of a pass in another order."""
    allowed = 64 * torch.finfo(wanted.dtype).eps * wanted.float().abs().max()
    return bool((found.float() - wanted.float()).abs().max() <= allowed)
