"""Whether a source's cache was made from the tokens that a caller says, at the positions that the mask gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.decoder import input_device, unwrapped
from kvfit.model.first_layer import first_layer
from kvfit.runtime.features import Pairs

_OTHER_TOKENS = "needed the cache of these very ids: beam search, returned sequences and edited text leave other ones"
_OTHER_POSITIONS = (
    "needed 0 for the first real token of each row: a forward pass over a left-padded batch needs "
    "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), which generate makes and forward does not"
)


def _first_unlike(held: Tensor, wanted: Tensor, real: Tensor) -> tuple[int, int] | None:
    """Row and token of the first real token whose keys or values (B, H, T, D) differ by more than arithmetic explains."""
    held, wanted = held.float(), wanted.to(held.device, torch.float32)
    error = (held - wanted).abs().amax((1, 3)) / wanted.abs().amax((1, 3)).clamp(min=1e-6)  # (B, T)
    wrong = (error > 0.25) & real.to(error.device)  # other arithmetic differs by a few hundredths at most
    if not bool(wrong.any()):
        return None
    row, token = wrong.nonzero()[0].tolist()
    return row, token


def check_same_tokens(
    model: Any, pairs: Pairs, input_ids: Tensor, prefix: int, attention_mask: Tensor | None, most: int
) -> None:
    """Refuse a cache of other tokens, such as one that beam search has left, or of other positions, as padding makes them.

    Layer 0 knows which token it was made from by its values, and at which position by its keys. Running it for a few tokens
    costs no attention. Where it depends on more than the token, nothing can be told.

    Args:
        model: the source.
        pairs: what its cache holds.
        input_ids: (B, S).
        prefix: how many of its first tokens the cache holds.
        attention_mask: (B, S), None for all ones.
        most: tokens of each row to look at: the last ones, where beams differ, and some of all the others, since an edit moves
            what comes after it.

    Raises:
        MismatchError: names the first token.
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
    except UnsupportedModelError:  # what a token's layer 0 is cannot be told without the tokens before it
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
