"""Check that a source's cache was made from the tokens that the caller passes, at the positions that follow from the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.decoder import input_device, unwrapped
from kvfit.model.first_layer import first_layer
from kvfit.runtime.features import Pairs

_OTHER_TOKENS = "needed the cache of exactly these ids: beam search, several sequences and edited text leave other tokens"
_OTHER_POSITIONS = (
    "needed 0 for the first real token of each row: a forward pass over a left-padded batch needs "
    "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), which generate computes and forward does not"
)


def _first_unlike(held: Tensor, wanted: Tensor, real: Tensor) -> tuple[int, int] | None:
    """Row and number of the first real token whose keys or values (B, H, T, D) differ by more than rounding can explain."""
    held, wanted = held.float(), wanted.to(held.device, torch.float32)
    error = (held - wanted).abs().amax((1, 3)) / wanted.abs().amax((1, 3)).clamp(min=1e-6)  # (B, T)
    wrong = (error > 0.25) & real.to(error.device)  # different arithmetic changes the result by a few hundredths at most
    if not bool(wrong.any()):
        return None
    row, token = wrong.nonzero()[0].tolist()
    return row, token


def check_same_tokens(
    model: Any, pairs: Pairs, input_ids: Tensor, prefix: int, attention_mask: Tensor | None, most: int
) -> None:
    """Refuse a cache of other tokens, as beam search leaves it, or of other positions, as padding causes them.

    The values of layer 0 show which token they were made from, and the keys show the position. Computing them for a few tokens
    needs no attention. If a model's layer 0 depends on more than the token, this check does nothing.

    Args:
        model: the source.
        pairs: keys and values in its cache.
        input_ids: (B, S), the conversation.
        prefix: number of first tokens that the cache holds.
        attention_mask: (B, S); None for all ones.
        most: number of tokens to compare per row: the last ones, where beams differ, and a sample of the others, because an
            edit shifts everything after it.

    Raises:
        MismatchError: a token or its position differs; names the first.
    """
    model = unwrapped(model)
    input_ids = input_ids.to(input_device(model))
    near = min(prefix, most // 2)
    far = torch.arange(0, prefix - near, max(1, -(-2 * (prefix - near) // most)))
    tokens = torch.cat([far, torch.arange(prefix - near, prefix)]).to(input_ids.device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, tokens]
    try:
        keys, values = first_layer(model, input_ids[:, tokens], positions)
    except UnsupportedModelError:  # layer 0 cannot be computed from single tokens
        return
    real = mask[:, tokens] != 0
    for wanted, held, what, advice in (
        (values, pairs[0][1], "of another token than input_ids has", _OTHER_TOKENS),
        (keys, pairs[0][0], "at another position than attention_mask gives", _OTHER_POSITIONS),
    ):
        place = _first_unlike(held[:, :, tokens.to(held.device)], wanted, real)
        if place is not None:
            raise MismatchError(
                f"source_cache: found keys and values {what} at row {place[0]}, token {int(tokens[place[1]])}, {advice}"
            )
