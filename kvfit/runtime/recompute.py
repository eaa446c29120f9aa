"""Guided recompute: choose the tokens of a moved conversation that the target should run again.

A map loses exact content: a code, a name, a number. The source still has the conversation, and its retrieval heads attend to
the tokens that the next answer needs. So the source reads the last few tokens again on its own cache and drafts the first
tokens of the answer, and the attention of these queries tells which tokens the target should run again:

    weights   attention of each query over the prefix without its first token, for every head
    heads     per query, the mean of the 16 heads with the largest single weight
    worth     of a token: its weight for the last query of the question, or a fraction of its largest weight for another query
    windows   16 adjacent tokens each, the largest sum first, until the budget is used

If the answer takes one step, the last token of the question attends to it. If it takes a second step, the draft does.

Source: own measurements; see docs/guides/recompute.md.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device, setting, text_config
from kvfit.model.generate import end_ids
from kvfit.runtime.choice import choose
from kvfit.runtime.features import Pairs
from kvfit.runtime.rewrite import refuse_attention
from kvfit.runtime.same_tokens import check_same_tokens
from kvfit.runtime.watch import Watch

N_HEADS = 16
QUESTION_TOKENS = 8
DRAFT_TOKENS = 6
# Factor on the attention of queries other than the question's last token. It is large enough to add tokens that only a second
# step needs, and too small to displace those that the last token attends to.
OTHERS_WEIGHT = 0.35
# The most tokens per row of the source's cache that are compared with the ids.
CHECKED_TOKENS = 1024


@torch.no_grad()
@caches.uncompiled()
def guided_tokens(
    guide: Any,
    pairs: Pairs,
    input_ids: Tensor,
    *,
    prefix: int,
    among: Tensor,
    fraction: float | Literal["auto"],
    attention_mask: Tensor | None = None,
    excluded: Tensor | None = None,
) -> Tensor:
    """The tokens that the guide attends to while it reads the end of the conversation and begins its answer.

    Args:
        guide: the source model, with attention implementation ``sdpa`` or ``eager``.
        pairs: its keys and values of the first `prefix` tokens, (B, H, prefix, D) per layer; not changed.
        input_ids: (B, S), the conversation, S > prefix.
        prefix: number of tokens that the guide has read.
        among: (B, T) booleans, T <= prefix, the tokens to choose from; no padding.
        fraction: share of each row's tokens to choose, as in `kvfit.runtime.choice.choose`; ``auto`` for as many as the guide's
            attention needs.
        attention_mask: (B, S), 0 on left padding.
        excluded: (B, S) booleans, further tokens to choose last.

    Returns:
        (B, C) indices into the conversation, ascending. A row with fewer than the others repeats one of its own.

    Raises:
        MismatchError: `fraction` is not between 0 and 1, or `pairs` hold other tokens than `input_ids`.
        UnsupportedModelError: the guide's attention cannot be watched.
    """
    if fraction != "auto" and not 0 <= fraction <= 1:
        raise MismatchError(f"recompute: found {fraction}, needed a fraction of 0 to 1")
    refuse_attention(caches.unwrapped(guide), "to watch what it attends to")
    reader = _Reader(guide, pairs, input_ids, prefix, attention_mask)
    check_same_tokens(reader.model, pairs, reader.input_ids, prefix, reader.mask, CHECKED_TOKENS)
    worth, n_tokens = reader.worth()[:, : among.shape[1]], among.shape[1]
    first = first_tokens(input_ids, attention_mask)[:, :n_tokens].to(worth.device)
    excluded = None if excluded is None else excluded[:, :n_tokens].to(worth.device)
    return choose(worth, among.to(worth.device), fraction, first, excluded)


def first_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, S), true on the first token of each sequence."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return (mask != 0) & (mask.cumsum(-1) == 1)


class _Reader:
    """The guide, which reads the last tokens of a conversation on its own cache and drafts an answer."""

    def __init__(self, guide: Any, pairs: Pairs, input_ids: Tensor, prefix: int, attention_mask: Tensor | None) -> None:
        self.model = caches.unwrapped(guide)
        self.pairs, self.prefix = pairs, prefix
        device = input_device(self.model)
        self.input_ids = input_ids.to(device)
        self.mask = None if attention_mask is None else attention_mask.to(device)
        self.eligible = ~first_tokens(self.input_ids, self.mask)[:, :prefix]
        if self.mask is not None:
            self.eligible &= self.mask[:, :prefix] != 0
        # The strongest heads of the current pass so far, and their largest weights.
        self.kept: Tensor | None = None  # (B, queries, heads, prefix)
        self.strength = torch.empty(0, device="cpu")  # (B, queries, heads)
        self.seen: set[int | None] = set()

    def worth(self) -> Tensor:
        """(B, prefix), the queries' attention to each token, averaged over the strongest heads of each query."""
        length = self.input_ids.shape[1]
        question = min(QUESTION_TOKENS, length)
        start = min(self.prefix, length - question)  # tokens of the question that the cache holds are read again
        # Layers that read the keys of earlier ones look up facts too: in some models they are the upper half. Some models run
        # them for those tokens alone whose logits are asked for.
        watch = Watch(self._take, sharing=bool(setting(text_config(self.model), "num_kv_shared_layers")))
        cache = _roomy_cache(self.pairs, start, length - start + DRAFT_TOKENS, watch)
        if length - question > start:
            self._run(cache, self.input_ids[:, start : length - question], length - question)
        with watch:
            keep = question if watch.sharing else 1
            logits = self._run(cache, self.input_ids[:, length - question :], length, watch, keep=keep)
            taken = self._taken()
            others = taken.amax(1)
            alive = torch.ones(len(taken), 1, dtype=torch.bool, device=taken.device)
            for step in range(DRAFT_TOKENS):
                token = logits[:, -1].argmax(-1, keepdim=True)
                alive = alive & ~self._ends(token).to(taken.device)
                logits = self._run(cache, token, length + step + 1, watch, keep=1)
                others = torch.maximum(others, self._taken()[:, 0] * alive)
        return torch.maximum(taken[:, -1], OTHERS_WEIGHT * others)

    def _ends(self, token: Tensor) -> Tensor:
        """(B, 1) whether a drafted token ends the answer."""
        return torch.isin(token, torch.tensor(end_ids(self.model), device=token.device, dtype=token.dtype))

    def _run(self, cache: Any, ids: Tensor, length: int, watch: Watch | None = None, keep: int | None = None) -> Tensor:
        """Run tokens on the cache, which then holds `length` tokens; `watch` records what they attend to."""
        mask = self.mask
        if mask is not None:
            mask = F.pad(mask, (0, max(0, length - mask.shape[1])), value=1)[:, :length]
        if watch is not None:
            watch.rows = ids.shape[1]
            watch.expect(None)
            self.kept, self.seen = None, set()
        return caches.forward(self.model, ids, cache, attention_mask=mask, logits_to_keep=keep, base=keep is None)

    def _taken(self) -> Tensor:
        """(B, queries, prefix), the mean of each query's strongest heads in the last pass."""
        missing = sorted(set(range(len(self.pairs))) - self.seen)  # `pairs` are of the layers with keys of their own
        if missing or self.kept is None:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}, layer {missing[0] if missing else 0}: found no attention weights, needed a "
                "softmax or scaled_dot_product_attention: choose the tokens yourself (exact_tokens=)"
            )
        return self.kept.mean(2)

    def _take(self, layer_index: int | None, weights: Tensor) -> None:
        """Merge a layer's weights, (B, Hq, queries, T), into the strongest so far; all layers would take too much memory."""
        weights = weights[..., : self.prefix].to(self.eligible.device, torch.float32).transpose(1, 2)
        if weights.shape[3] < self.prefix:  # the last tokens of the prefix are read again and are not cached yet
            weights = F.pad(weights, (0, self.prefix - weights.shape[3]))
        weights = weights.masked_fill(~self.eligible[:, None, None], 0.0)  # (B, queries, Hq, prefix)
        strength = weights.amax(-1)
        if self.kept is not None:
            weights, strength = torch.cat([self.kept, weights], 2), torch.cat([self.strength, strength], 2)
        if strength.shape[2] > N_HEADS:
            # Of equally strong heads the first is taken; `topk` does not specify which.
            best = strength.argsort(dim=2, descending=True, stable=True)[:, :, :N_HEADS]
            strength = strength.gather(2, best)
            weights = weights.gather(2, best[..., None].expand(-1, -1, -1, self.prefix))
        self.kept, self.strength = weights, strength
        self.seen.add(layer_index)


def _roomy_cache(pairs: Pairs, length: int, room: int, watch: Watch) -> Any:
    """A cache with a copy of the first `length` tokens and room for more. It tells `watch` which layer has cached its keys."""
    from transformers import DynamicCache

    class RoomyCache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            layer = self.layers[layer_idx]
            start = layer.keys.shape[2]
            stop = start + key_states.shape[2]
            keys, values = memory[layer_idx]
            keys[:, :, start:stop], values[:, :, start:stop] = key_states, value_states
            layer.keys, layer.values = keys[:, :, :stop], values[:, :, :stop]
            watch.expect(layer_idx)
            return layer.keys, layer.values

    memory = []
    filled = caches.full_cache()
    for layer_index, pair in enumerate(pairs):
        halves = [half.new_empty(*half.shape[:2], length + room, half.shape[3]) for half in pair]
        for roomy, half in zip(halves, pair, strict=True):
            roomy[:, :, :length] = half[:, :, :length]
        memory.append(halves)
        caches.place(filled, layer_index, halves[0][:, :, :length], halves[1][:, :, :length])
    cache = RoomyCache()
    cache.layers = filled.layers
    return cache
