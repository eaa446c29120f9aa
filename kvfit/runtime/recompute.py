"""Guided recompute: which tokens of a moved conversation the target should run itself.

A map loses exact content: a code, a name, a number. The source still has the conversation, and its retrieval heads look
straight at the tokens that the next answer needs. So it runs the new tokens on its own cache, and what the last one attends to
says which tokens are worth the target's time:

    weights   attention of the last new token over the prefix without its first token, for every layer and head
    heads     the 16 with the largest single weight, averaged
    windows   16 neighbouring tokens each, best sum first, until the budget is used

Source: own measurements; see docs/guides/recompute.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.runtime.rewrite import refuse_attention

N_HEADS = 16
WINDOW_TOKENS = 16

Pairs = list[tuple[Tensor, Tensor]]

_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)


@torch.no_grad()
def guided_tokens(
    guide: Any,
    pairs: Pairs,
    input_ids: Tensor,
    *,
    prefix: int,
    n_tokens: int,
    fraction: float,
    first: int = 0,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The tokens that the guide's last new token looks at.

    Args:
        guide: the source model, with attention ``sdpa`` or ``eager``.
        pairs: its keys and values of the first `prefix` tokens, (B, H, prefix, D) per layer; not changed.
        input_ids: (B, S) the conversation, S > prefix.
        prefix: tokens that the guide has read.
        n_tokens: choose among tokens `first` to `n_tokens` - 1.
        fraction: of `n_tokens`, rounded up: how many to choose.
        first: see `n_tokens`; the first token of each sequence and padding come last in any case.
        attention_mask: (B, S), 0 on left padding.

    Returns:
        (B, C) indices into the conversation, ascending; C = ceil(fraction * n_tokens).

    Raises:
        MismatchError: `fraction` is not between 0 and 1.
        UnsupportedModelError: the guide's attention cannot be watched.
    """
    if not 0 <= fraction <= 1:
        raise MismatchError(f"recompute: found {fraction}, needed a fraction of 0 to 1")
    weights = _Heads(guide, pairs, input_ids, prefix, attention_mask).strongest()[..., :n_tokens]
    # Less a rounding error of the product, so that 0.1 of 30 is 3.
    count = min(n_tokens, math.ceil(fraction * n_tokens - 1e-9))
    eligible = candidates(input_ids, attention_mask)[:, :n_tokens].to(weights.device)
    eligible &= torch.arange(n_tokens, device=weights.device) >= first
    return choose_tokens(weights, eligible, count)


def candidates(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, S) true for all but padding and the first token of each sequence."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return (mask != 0) & (mask.cumsum(-1) > 1)


def choose_tokens(weights: Tensor, eligible: Tensor, count: int, window: int = WINDOW_TOKENS) -> Tensor:
    """The tokens of the best windows.

    A token is worth the sum of the best window that holds it, so that the best windows come first and whole; within one window
    the token with the larger weight.

    Args:
        weights: (B, heads, T) attention.
        eligible: (B, T) tokens to choose from; others only when these run out.
        count: C, tokens to choose.
        window: tokens of a window.

    Returns:
        (B, C) ascending.
    """
    mean = weights.double().mean(1).masked_fill(~eligible, 0.0)  # (B, T)
    window = max(1, min(window, mean.shape[1]))
    sums = mean.unfold(1, window, 1).sum(-1)  # (B, T - window + 1)
    around = F.pad(sums, (window - 1, window - 1), value=-math.inf).unfold(1, window, 1)
    worth = around.amax(-1).masked_fill(~eligible, -math.inf)  # (B, T)
    # Sort by the lesser criterion first; the second sort keeps its order among equals.
    order = mean.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, worth.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return order[:, :count].sort(dim=1).values


class _Heads:
    """The guide's strongest heads for the last token of a conversation."""

    def __init__(self, guide: Any, pairs: Pairs, input_ids: Tensor, prefix: int, attention_mask: Tensor | None) -> None:
        self.model = caches.unwrapped(guide)
        self.pairs = pairs
        device = input_device(self.model)
        self.input_ids = input_ids.to(device)
        self.mask = None if attention_mask is None else attention_mask.to(device)
        self.prefix = prefix
        self.eligible = candidates(self.input_ids, self.mask)[:, :prefix]
        self.kept: Tensor | None = None
        self.seen: set[int] = set()

    def strongest(self) -> Tensor:
        """(B, heads, prefix) attention of the `N_HEADS` heads with the largest single weight on an eligible token."""
        refuse_attention(self.model, "to watch what it attends to")
        watch = _Watch(self._take)
        cache = caches.recording_cache(watch.expect)
        for layer_index, (keys, values) in enumerate(self.pairs):
            caches.place(cache, layer_index, keys, values)  # appending makes new tensors, so these stay as they are
        last = self.input_ids.shape[1] - 1
        if last > self.prefix:
            self._run(cache, self.prefix, last)
        with watch:
            watch.expect(None)
            self._run(cache, last, last + 1)
        missing = sorted(set(range(len(self.pairs))) - self.seen)
        if missing or self.kept is None:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}, layer {missing[0] if missing else 0}: found no attention of it, needed a "
                "softmax or scaled_dot_product_attention: choose the tokens yourself (exact_tokens=)"
            )
        return self.kept

    def _run(self, cache: Any, start: int, stop: int) -> None:
        mask = None if self.mask is None else self.mask[:, :stop]
        caches.forward(self.model, self.input_ids[:, start:stop], cache, attention_mask=mask, base=True)

    def _take(self, layer_index: int, weights: Tensor) -> None:
        """Merge one layer's weights, (B, Hq, tokens), into the strongest so far: all layers together would be large."""
        weights = weights[..., : self.prefix].to(self.eligible.device, torch.float32)
        weights = weights.masked_fill(~self.eligible[:, None], 0.0)
        if self.kept is not None:
            weights = torch.cat([self.kept, weights], 1)
        best = weights.amax(-1).argsort(dim=1, descending=True, stable=True)[:, :N_HEADS]
        self.kept = weights.gather(1, best[..., None].expand(-1, -1, self.prefix))
        self.seen.add(layer_index)


class _Watch(TorchFunctionMode):
    """Reads one query token's attention weights off a running model, whichever backend it uses.

    A function mode belongs to the thread that entered it, so nothing that other threads see is changed: neither the model nor
    its configuration nor a registry of attention functions.
    """

    def __init__(self, take: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self.take = take
        self.layer_index: int | None = None
        self.n_keys = 0

    def expect(self, layer_index: int | None, keys: Tensor | None = None, values: Tensor | None = None) -> None:  # noqa: ARG002
        """A layer has cached its keys: its attention comes next."""
        self.layer_index = layer_index

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.layer_index is None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._seen(_single_query_weights(*args, **kwargs))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAXES and isinstance(result, Tensor) and result.dim() == 4 and result.shape[2] == 1:
            self._seen(result[:, :, 0])
        return result

    def _seen(self, weights: Tensor) -> None:
        layer_index, self.layer_index = self.layer_index, None
        if layer_index is not None:
            self.take(layer_index, weights)


def _single_query_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,  # noqa: ARG001
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
) -> Tensor:
    """(B, Hq, T) attention weights of one query token, from the arguments of `scaled_dot_product_attention`.

    The query may come as (B, Hq, 1, D) with as many or fewer key heads, or packed by groups as (B, H, Hq / H, D).
    """
    batch, heads, rows, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = grouped @ key.transpose(2, 3) * (head_dim**-0.5 if scale is None else scale)
    scores = scores.view(batch, heads, rows, -1).float()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1).flatten(1, 2)
