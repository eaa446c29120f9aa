"""Choose which tokens of a moved conversation the target runs again, by how much each is attended to.

Neighbours belong together, so tokens are chosen in windows of 16, the window with the largest sum first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW_TOKENS = 16
# `auto` covers this share of the queries' attention, with a number of tokens between these shares of a row.
AUTO_COVERED = 0.9
AUTO_LEAST, AUTO_MOST = 0.02, 0.2


def choose(
    worth: Tensor, among: Tensor, fraction: float | Literal["auto"], first: Tensor, excluded: Tensor | None = None
) -> Tensor:
    """The tokens of each row that are worth most.

    Args:
        worth: (B, T), attention to each token.
        among: (B, T) booleans, the tokens to choose from.
        fraction: share of them to choose in each row, rounded up; ``auto`` for as many as the attention needs. The share is of
            the row's tokens in `among` and its first token, and there are never more than `among` has.
        first: (B, T) booleans, the first token of each sequence. It draws attention whatever it is, so it is chosen last.
        excluded: (B, T) booleans, further tokens to choose last.

    Returns:
        (B, C) ascending, C of the row with most tokens. A row with fewer repeats its best; one with none has any token.
    """
    eligible = among & ~first if excluded is None else among & ~first & ~excluded
    sizes, most = torch.stack([(among | first).sum(1), among.sum(1)]).tolist()
    counts = auto_counts(worth, eligible, sizes) if fraction == "auto" else [share_of(size, fraction) for size in sizes]
    return choose_tokens(worth[:, None], eligible, [min(pair) for pair in zip(counts, most, strict=True)], among)


def share_of(n_tokens: int, fraction: float) -> int:
    """A share of a number of tokens, rounded up."""
    # The product is rounded, so a little is subtracted; 0.1 of 30 is 3.
    return min(n_tokens, math.ceil(fraction * n_tokens - 1e-9))


def auto_counts(worth: Tensor, eligible: Tensor, sizes: Sequence[int], window: int = WINDOW_TOKENS) -> list[int]:
    """The numbers of tokens to choose so that they get most of the queries' attention, in the row that needs most tokens.

    Args:
        worth: (B, T), attention to each token.
        eligible: (B, T), the tokens to choose from.
        sizes: (B,), the number of tokens of each row.
        window: number of tokens that are chosen together.

    Returns:
        (B,) the size of the fewest windows that get `AUTO_COVERED` of the attention in every row, within `AUTO_LEAST` and
        `AUTO_MOST` of each row's own tokens.
    """
    mean = worth.double().masked_fill(~eligible, 0.0)
    blocks = F.pad(mean, (0, -worth.shape[1] % window)).view(len(mean), -1, window).sum(-1).sort(1, descending=True).values
    missing = blocks.cumsum(1) < AUTO_COVERED * blocks.sum(1, keepdim=True)
    needed = int((missing.sum(1) + 1).amax()) * window
    return [max(share_of(size, AUTO_LEAST), min(needed, share_of(size, AUTO_MOST))) for size in sizes]


def choose_tokens(
    weights: Tensor, eligible: Tensor, counts: Sequence[int], among: Tensor | None = None, window: int = WINDOW_TOKENS
) -> Tensor:
    """The tokens of the best windows.

    A token counts as much as the best window that contains it, so the best windows are chosen first and complete. Within a
    window, tokens with larger weights are chosen first.

    Args:
        weights: (B, heads, T), attention; its mean over the heads is used.
        eligible: (B, T), the tokens to choose from; others are chosen only if there are too few.
        counts: (B,), the number of tokens to choose in each row.
        among: (B, T), the tokens that may be chosen then; all by default.
        window: number of tokens in a window.

    Returns:
        (B, C) ascending, C the largest count. A row with a smaller one repeats its best token.
    """
    mean = weights.double().mean(1).masked_fill(~eligible, 0.0)  # (B, T)
    window = max(1, min(window, mean.shape[1]))
    sums = mean.unfold(1, window, 1).sum(-1)  # (B, T - window + 1)
    around = F.pad(sums, (window - 1, window - 1), value=-math.inf).unfold(1, window, 1)
    worth = around.amax(-1).masked_fill(~eligible, -1.0)  # (B, T)
    worth = worth if among is None else worth.masked_fill(~among, -math.inf)
    # The minor criterion is sorted first; the second sort is stable and keeps its order among equals.
    order = mean.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, worth.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, : max(counts)]
    further = torch.arange(order.shape[1], device=order.device) >= torch.tensor(counts, device=order.device)[:, None]
    return torch.where(further, order[:, :1], order).sort(dim=1).values


def keep_only(tokens: Tensor, among: Tensor, filler: int) -> Tensor:
    """Each row's tokens that are among some, each once, in as few columns as hold them.

    Args:
        tokens: (B, C), tokens in any order.
        among: (B, T) booleans, the tokens to keep; none from T on.
        filler: the token of a row that keeps none while another does.

    Returns:
        (B, at most C) ascending. A row with fewer tokens than the longest repeats its first.
    """
    none = among.shape[1]
    kept = (tokens < none) & among.gather(1, tokens.clamp(max=none - 1))
    tokens = tokens.masked_fill(~kept, none).sort(dim=1).values
    twice = tokens.diff(dim=1, prepend=tokens.new_full((len(tokens), 1), -1)) == 0
    tokens = tokens.masked_fill(twice, none).sort(dim=1).values
    tokens = tokens[:, : int((tokens < none).sum(1).amax())]
    own = tokens[:, :1].masked_fill(tokens[:, :1] == none, filler)
    return torch.where(tokens == none, own, tokens).sort(dim=1).values
