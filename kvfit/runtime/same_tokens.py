"""Check that a cache was made from the tokens that the caller passes, at the positions that follow from the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.decoder import input_device, unwrapped
from kvfit.model.first_layer import check_first_layer, first_layer
from kvfit.model.placeholders import Placeholders
from kvfit.model.reading import layer_states
from kvfit.runtime.features import Pairs

Mapped = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_OTHER_TOKENS = "needed the cache of exactly these ids: beam search, several sequences and edited text leave other tokens"
_OTHER_POSITIONS = (
    "needed 0 for the first real token of each row: a forward pass over a left-padded batch needs "
    "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), which generate computes and forward does not"
)


def _unlike(held: Tensor, wanted: Tensor) -> Tensor:
    """(B, T), the tokens whose keys or values (B, H, T, D) differ by more than rounding can explain."""
    held, wanted = held.float(), wanted.to(held.device, torch.float32)
    error = (held - wanted).abs().amax((1, 3)) / wanted.abs().amax((1, 3)).clamp(min=1e-6)
    return error > 0.25  # different arithmetic changes the result by a few hundredths at most


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
    _check(model, pairs[0], input_ids, range(prefix), attention_mask, "source_cache", most)


def check_held_tokens(
    model: Any, cache: Any, input_ids: Tensor, reused: int, attention_mask: Tensor, mapped: Mapped | None = None
) -> None:
    """Refuse a cache of the target that holds other tokens or positions than the conversation. Up to 32 are compared per row.

    Args:
        model: the target.
        cache: its cache. Tokens that a window has dropped from layer 0 are not compared.
        input_ids: (B, S), the conversation.
        reused: number of first tokens to keep.
        attention_mask: (B, S).
        mapped: layer 0 of tokens (n,) at positions (B, n) as the mapper makes it; None if layer 0 of the cache is always exact.

    Raises:
        MismatchError: names the first token.
    """
    layer, state = cache.layers[0], layer_states(cache)[0]
    dropped = 0 if state.keys is None else max(0, state.length - state.keys.shape[2])
    if state.keys is None or reused <= dropped:
        return
    held = layer.keys, layer.values
    _check(model, held, input_ids, range(dropped, reused), attention_mask, "target_cache", mapped=mapped)


def _check(
    model: Any,
    held: tuple[Tensor, Tensor],
    input_ids: Tensor,
    held_tokens: range,
    mask: Tensor | None,
    name: str,
    most: int = 32,
    mapped: Mapped | None = None,
) -> None:
    """Compare layer 0 of a cache with layer 0 of the model for some tokens, and with that of the mapper where they differ.

    The values of layer 0 show which token they were made from, and the keys show the position. Computing them for a few tokens
    needs no attention. If a model's layer 0 depends on more than the token, this check does nothing. It compares the last
    tokens, where beams differ, and a sample of the others, because an edit shifts everything after it.
    """
    model = unwrapped(model)
    input_ids = input_ids.to(input_device(model))
    count = len(held_tokens)
    near = min(count, most // 2)
    device = input_ids.device
    far = torch.arange(0, count - near, max(1, -(-2 * (count - near) // most)), device=device)
    places = torch.cat([far, torch.arange(count - near, count, device=device)])
    tokens = places + held_tokens.start
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, tokens]
    try:
        exact = first_layer(model, input_ids[:, tokens], positions)
    except UnsupportedModelError:  # layer 0 cannot be computed from single tokens
        return
    real = mask[:, tokens] != 0
    seen = Placeholders(model, input_ids[:, tokens]).found
    if seen is not None:  # their embeddings were made of pixels or sound
        real &= ~seen
    made: tuple[Tensor, Tensor] | None = None
    for half, what, advice in (
        (1, "of another token than input_ids has", _OTHER_TOKENS),
        (0, "at another position than attention_mask gives", _OTHER_POSITIONS),
    ):
        found = held[half][:, :, places.to(held[half].device)]
        wrong = _unlike(found, exact[half]) & real.to(found.device)
        if mapped is not None and bool(wrong.any()):
            made = made or mapped(tokens.cpu(), positions)
            wrong &= _unlike(found, made[half])
        if bool(wrong.any()):
            try:
                check_first_layer(model)
            except UnsupportedModelError:  # the token alone does not give layer 0, so that nothing was shown
                return
            row, token = wrong.nonzero()[0].tolist()
            raise MismatchError(f"{name}: found keys and values {what} at row {row}, token {int(tokens[token])}, {advice}")
