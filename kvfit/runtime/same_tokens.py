"""Check that a cache was made from the tokens that the caller passes, at the positions that follow from the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.decoder import input_device, unwrapped
from kvfit.model.first_layer import first_layer
from kvfit.model.placeholders import Placeholders
from kvfit.model.reading import layer_states
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
    """Refuse a source's cache of other tokens, as beam search leaves it, or of other positions, as padding causes them.

    Args:
        model: the source.
        pairs: keys and values in its cache.
        input_ids: (B, S), the conversation.
        prefix: number of first tokens that the cache holds.
        attention_mask: (B, S); None for all ones.
        most: number of tokens to compare per row.

    Raises:
        MismatchError: a token or its position differs; names the first.
    """
    _check(model, pairs[0], input_ids, range(prefix), attention_mask, most, "source_cache")


def check_held_tokens(model: Any, cache: Any, input_ids: Tensor, reused: int, attention_mask: Tensor, most: int = 32) -> None:
    """Refuse a cache of the target that is exact in layer 0 and holds other tokens or positions than the conversation.

    Args:
        model: the target.
        cache: its cache. Tokens that a window has dropped from layer 0 are not compared.
        input_ids: (B, S), the conversation.
        reused: number of first tokens to keep.
        attention_mask: (B, S).
        most: number of tokens to compare per row.

    Raises:
        MismatchError: names the first token.
    """
    layer, state = cache.layers[0], layer_states(cache)[0]
    dropped = 0 if state.keys is None else max(0, state.length - state.keys.shape[2])
    if state.keys is None or reused <= dropped:
        return
    _check(model, (layer.keys, layer.values), input_ids, range(dropped, reused), attention_mask, most, "target_cache")


def _check(
    model: Any, held: tuple[Tensor, Tensor], input_ids: Tensor, held_tokens: range, mask: Tensor | None, most: int, name: str
) -> None:
    """Compare layer 0 of a cache with layer 0 of the model for some tokens.

    The values of layer 0 show which token they were made from, and the keys show the position. Computing them for a few tokens
    needs no attention. If a model's layer 0 depends on more than the token, this check does nothing. It compares the last
    tokens, where beams differ, and a sample of the others, because an edit shifts everything after it.
    """
    model = unwrapped(model)
    input_ids = input_ids.to(input_device(model))
    count = len(held_tokens)
    near = min(count, most // 2)
    far = torch.arange(0, count - near, max(1, -(-2 * (count - near) // most)))
    places = torch.cat([far, torch.arange(count - near, count)]).to(input_ids.device)
    tokens = places + held_tokens.start
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, tokens]
    try:
        keys, values = first_layer(model, input_ids[:, tokens], positions)
    except UnsupportedModelError:  # layer 0 cannot be computed from single tokens
        return
    real = mask[:, tokens] != 0
    seen = Placeholders(model, input_ids[:, tokens]).found
    if seen is not None:  # their embeddings were made of pixels or sound
        real &= ~seen
    for wanted, found, what, advice in (
        (values, held[1], "of another token than input_ids has", _OTHER_TOKENS),
        (keys, held[0], "at another position than attention_mask gives", _OTHER_POSITIONS),
    ):
        place = _first_unlike(found[:, :, places.to(found.device)], wanted, real)
        if place is not None:
            raise MismatchError(
                f"{name}: found keys and values {what} at row {place[0]}, token {int(tokens[place[1]])}, {advice}"
            )
