"""The arms of an evaluation: ways to give the target a prefix, and what it then makes of the continuation.

`native` prefills; `transfer` maps the source's cache; `handoff` maps it and runs the first tokens itself; `source` is the
source model alone; `no_context` gives nothing. The controls say what a gain in likelihood is worth: `mean` gives keys and values
of the right mean and no content, `shuffled` gives another document's mapped cache, `raw` the source's cache unmapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfit import cache as caches
from kvfit.handoff import handoff
from kvfit.mapper import Mapper
from kvfit.rope import angles, rotate, unrotate

Arm = Literal["native", "transfer", "handoff", "source", "no_context", "mean", "shuffled", "raw"]
ARMS: tuple[Arm, ...] = ("native", "transfer", "handoff", "source", "no_context", "mean", "shuffled", "raw")

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Pair:
    """Both models and the mapper between them."""

    source: Any
    target: Any
    mapper: Mapper
    exact_head: int = 1
    exact_tail: int = 0


@torch.no_grad()
def source_pairs(pair: Pair, prefix_ids: Tensor) -> Pairs:
    """The source's keys and values of a prefix (B, P)."""
    cache = caches.full_cache()
    caches.forward(pair.source, prefix_ids, cache, base=True)
    return caches.read_cache(cache)


def raw_allowed(mapper: Mapper) -> bool:
    """Whether the source's cache has the target's shape."""
    source, target = mapper.spec.source, mapper.spec.target
    return (source.n_layers, source.n_heads, source.head_dim) == (target.n_layers, target.n_heads, target.head_dim)


@torch.no_grad()
def prefix_cache(pair: Pair, arm: Arm, prefix_ids: Tensor, sources: Pairs | None, other: Pairs | None = None) -> Any:
    """The target's (or source's) cache over a prefix (B, P), made as the arm says; None for `no_context`.

    Args:
        pair: models and mapper.
        arm: which arm.
        prefix_ids: (B, P).
        sources: the source's keys and values of the prefix.
        other: those of other documents of the same length, for `shuffled`.
    """
    if arm == "no_context":
        return None
    if arm in ("native", "source"):
        model = pair.target if arm == "native" else pair.source
        cache = caches.new_cache(model)
        caches.forward(model, prefix_ids, cache, base=True)
        return cache
    assert sources is not None
    if arm == "handoff":
        # The handoff leaves at least one token to the target; the dummy last id is never run.
        ids = torch.cat([prefix_ids, prefix_ids[:, -1:]], 1)
        return handoff(pair.mapper, pair.target, ids, sources, exact_head=pair.exact_head, exact_tail=pair.exact_tail).cache
    if arm == "raw":
        return _filled(pair.target, sources)
    if arm == "shuffled":
        assert other is not None
        return pair.mapper.transfer(other, into=caches.new_cache(pair.target))
    if arm == "mean":
        return _filled(pair.target, _mean(pair.mapper, pair.mapper.transfer_layers(sources)))
    return pair.mapper.transfer(sources, into=caches.new_cache(pair.target))


def _filled(model: Any, pairs: Pairs) -> Any:
    cache = caches.new_cache(model)
    for layer_index, (keys, values) in enumerate(pairs):
        caches.append(cache, layer_index, keys, values)
    return cache


def _mean(mapper: Mapper, pairs: Pairs) -> Pairs:
    """Every token's keys and values replaced by their mean over all tokens given, un-rotated for keys."""
    out = []
    for layer_index, (keys, values) in enumerate(pairs):
        table = mapper.spec.target.rope.table(layer_index)
        if table is not None:
            turned = angles(table, torch.arange(keys.shape[2], device=keys.device))
            plain = unrotate(keys, table, turned)
            keys = rotate(plain.mean((0, 2), keepdim=True).expand_as(plain).contiguous(), table, turned)
        else:
            keys = keys.mean((0, 2), keepdim=True).expand_as(keys).contiguous()
        out.append((keys, values.mean((0, 2), keepdim=True).expand_as(values).contiguous()))
    return out


@torch.no_grad()
def continuation_log_probabilities(pair: Pair, arm: Arm, cache: Any, ids: Tensor, prefix: int) -> Tensor:
    """(B, C, vocabulary) float32 log-probabilities of each continuation token, teacher-forced.

    The cache covers the first `prefix` - 1 tokens of ids (B, prefix + C); the last prefix token is always the model's own, so
    that every arm predicts the first continuation token from a token that it ran itself.
    """
    model = pair.source if arm == "source" else pair.target
    run = ids[:, prefix - 1 : -1]
    logits = caches.forward(model, run, caches.new_cache(model) if cache is None else cache)
    return F.log_softmax(logits.float(), -1)


@torch.no_grad()
def answer(model: Any, cache: Any, question_ids: Tensor, n_tokens: int) -> list[int]:
    """Greedy continuation of one question (1, Q) on top of a cache."""
    said: list[int] = []
    ids = question_ids
    for _ in range(n_tokens):
        logits = caches.forward(model, ids, cache, logits_to_keep=1)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        said.append(int(ids))
    return said
