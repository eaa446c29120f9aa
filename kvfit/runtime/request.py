"""Check the arguments of `handoff` before anything runs, for mistakes that torch would misread or report late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model.decoder import input_device, unwrapped


def checked_ids(model: Any, input_ids: Any) -> Tensor:
    """The ids of a conversation on the model's input device, checked. This reads the smallest and largest id from the device.

    Raises:
        MismatchError: they are not a (B, S) tensor of whole numbers, or lie outside the model's vocabulary.
    """
    if not isinstance(input_ids, Tensor):
        # tokenizer(...) returns a BatchEncoding, which callers pass on by mistake. It is a UserDict, not a dict.
        names = isinstance(input_ids, Mapping) and "input_ids" in input_ids
        advice = 'pass its ["input_ids"]' if names else "make one with tokenizer(text, return_tensors='pt')[\"input_ids\"]"
        raise MismatchError(f"input_ids: found {type(input_ids).__name__}, needed a tensor (B, S) of token ids: {advice}")
    if input_ids.dim() != 2 or input_ids.numel() < 1:
        raise MismatchError(f"input_ids: found shape {tuple(input_ids.shape)}, needed (B, S) with at least one token")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise MismatchError(f"input_ids: found {input_ids.dtype}, needed token ids as torch.int64: convert them with .long()")
    size = _vocabulary(model)
    low, high = torch.stack(torch.aminmax(input_ids)).tolist()
    if low < 0 or (size is not None and high >= size):
        most = "the last" if size is None else size - 1
        raise MismatchError(
            f"input_ids: found ids of {low} to {high}, needed 0 to {most} of the target's vocabulary: use the target's own "
            "tokenizer, and pad with one of its tokens"
        )
    device = getattr(unwrapped(model), "device", None)  # cheap, and nearly always the input device
    return input_ids if input_ids.device == device else input_ids.to(input_device(model))


def _vocabulary(model: Any) -> int | None:
    """Number of rows of the embedding; None if it does not say."""
    size = getattr(unwrapped(model).get_input_embeddings(), "num_embeddings", None)
    return size if isinstance(size, int) else None


def checked_mask(input_ids: Tensor, attention_mask: Any) -> Tensor:
    """The mask (B, S), 1 for tokens and 0 for padding, in the ids' dtype and on their device.

    Raises:
        MismatchError: it has another shape, padding after a token, or a row that is all padding.
    """
    if attention_mask is None:
        return torch.ones_like(input_ids)
    if not isinstance(attention_mask, Tensor):
        raise MismatchError(f"attention_mask: found {type(attention_mask).__name__}, needed a tensor as input_ids is")
    if attention_mask.shape != input_ids.shape:
        raise MismatchError(
            f"attention_mask: found shape {tuple(attention_mask.shape)}, needed {tuple(input_ids.shape)} as input_ids"
        )
    mask = (attention_mask != 0).to(input_ids)
    if bool((mask[:, -1] == 0).any() | (mask.diff(dim=1) < 0).any()):
        empty = (mask == 0).all(1)
        if bool(empty.any()):
            row = int(empty.int().argmax())
            raise MismatchError(
                f"attention_mask: found row {row} without a token, needed one or more in each: leave the row out"
            )
        raise MismatchError(
            "attention_mask: found padding after a token, needed padding on the left only: tokenize with padding_side='left'"
        )
    return mask


@dataclass(frozen=True)
class Wanted:
    """What the target should run itself: arguments of `handoff`.

    Raises:
        MismatchError: an argument has an invalid value; names it.
    """

    exact_head: int
    exact_tail: int
    recompute: float | Literal["auto"]
    guide: Any
    exact_tokens: Tensor | Sequence[int] | None

    def __post_init__(self) -> None:
        for name, count in (("exact_head", self.exact_head), ("exact_tail", self.exact_tail)):
            if not isinstance(count, Integral) or isinstance(count, bool) or count < 0:
                raise MismatchError(f"{name}: found {count!r}, needed a whole number of tokens, 0 or more")
        fraction = isinstance(self.recompute, Real) and not isinstance(self.recompute, bool) and 0 <= self.recompute <= 1
        if self.recompute != "auto" and not fraction:
            raise MismatchError(f"recompute: found {self.recompute!r}, needed a fraction of 0 to 1, such as 0.1, or 'auto'")
        if self.recompute and self.guide is None:
            raise MismatchError(f"recompute={self.recompute}: found no guide, needed the source model, or exact_tokens instead")
        if self.recompute and self.exact_tokens is not None:
            raise MismatchError("recompute, exact_tokens: found both, needed one way to choose tokens")

    def indices(self, batch: int, prefix: int, device: torch.device) -> Tensor:
        """`exact_tokens` as (B, C) indices of the `prefix` moved tokens.

        Raises:
            MismatchError: they are not indices of moved tokens. A mask of booleans or of zeros and ones is refused too, because
                as indices it would mean tokens 0 and 1.
        """
        tokens = _tensor(self.exact_tokens)
        if tokens is None or _booleans(self.exact_tokens) or tokens.dtype == torch.bool:
            kind = "booleans" if tokens is not None else f"{type(self.exact_tokens).__name__} {self.exact_tokens!r}"
            raise MismatchError(
                f"exact_tokens: found {kind[:80]}, needed indices of tokens (C,) or ({batch}, C): for a mask of one row, "
                "mask.nonzero().flatten()"
            )
        tokens = tokens.to(device)
        tokens = tokens.expand(batch, -1) if tokens.dim() == 1 else tokens
        fractions = tokens.is_floating_point() or tokens.is_complex()
        if tokens.dim() != 2 or tokens.shape[0] != batch or (tokens.numel() and fractions):
            raise MismatchError(f"exact_tokens: found shape {tuple(tokens.shape)}, needed whole numbers (C,) or ({batch}, C)")
        tokens = tokens.long()
        if tokens.numel():
            low, high = torch.stack(torch.aminmax(tokens)).tolist()
            if not 0 <= low <= high < prefix:
                raise MismatchError(f"exact_tokens: found {low} to {high}, needed indices of the {prefix} moved tokens")
            # Rows with fewer tokens than the longest are filled up with repeats, so the longest row has none. A 0/1 mask has.
            if bool((tokens.sort(dim=1).values.diff(dim=1) == 0).any(dim=1).all()):
                raise MismatchError(
                    f"exact_tokens: found a token named twice in every row of {tokens.shape[1]}, needed each token once in the "
                    "longest row, as indices: for a mask of one row, mask.nonzero().flatten()"
                )
        return tokens


def _tensor(tokens: Any) -> Tensor | None:
    try:
        return torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):  # text, sets, ragged rows
        return None


def _booleans(tokens: Any) -> bool:
    """Whether a sequence contains a boolean at any depth, which torch would read as 0 or 1 among numbers."""
    if isinstance(tokens, list | tuple):
        return any(_booleans(item) for item in tokens)
    return isinstance(tokens, bool)
