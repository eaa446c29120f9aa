"""The arms of an evaluation: ways to give the target a prefix that it then continues from.

native      the target prefills
transfer    the source's cache is mapped
handoff     the source's cache is mapped and the target runs chosen tokens itself, as in production; the verdict is about it
auto        a handoff that decides itself how many tokens to recompute
source      the source model continues by itself
no_context  the target gets no prefix
mean        control: keys and values with the right mean and no content
shuffled    control: another document's mapped cache
raw         control: the source's cache without a map, if the shapes allow it
"""

from __future__ import annotations

import copy
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.fit.evaluate.pair import Pair as Pair
from kvfit.fit.evaluate.pair import load_pair as load_pair
from kvfit.fit.evaluate.pair import shared_vocabulary as shared_vocabulary
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.model.generate import end_ids
from kvfit.model.rope import angles, rotate, unrotate
from kvfit.runtime.features import Pairs as Pairs
from kvfit.runtime.handoff import Handoff, handoff
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS

Arm = Literal["native", "transfer", "handoff", "auto", "source", "no_context", "mean", "shuffled", "raw"]
ARMS: tuple[Arm, ...] = get_args(Arm)


@torch.no_grad()
def source_pairs(pair: Pair, prefix_ids: Tensor) -> Pairs:
    """The source's keys and values of a prefix (B, P)."""
    cache = caches.full_cache()
    caches.forward(pair.source, prefix_ids.to(input_device(pair.source)), cache, base=True)
    return caches.read_cache(cache)


@torch.no_grad()
def target_pairs(pair: Pair, prefix_ids: Tensor) -> Pairs:
    """The target's own keys and values of a prefix (B, P), at full length in every layer."""
    cache = caches.full_cache()
    caches.forward(pair.target, prefix_ids.to(input_device(pair.target)), cache, base=True)
    return caches.read_cache(cache)


@torch.no_grad()
def mapped_pairs(pair: Pair, prefix_ids: Tensor, sources: Pairs) -> Pairs:
    """The mapped keys and values of a prefix (B, P), per target layer."""
    return pair.mapper.transfer_layers(sources, input_ids=prefix_ids, target_model=pair.target)


def raw_allowed(mapper: Mapper) -> bool:
    """Whether the source's cache has the target's shape."""
    source, target = mapper.spec.source, mapper.spec.target
    shapes = [[[model.shape(kind, i) for kind in KINDS] for i in range(model.n_layers)] for model in (source, target)]
    return shapes[0] == shapes[1]


class Prefixes:
    """A batch of prefixes. The arms share the source's cache and the mapped cache, which are computed when first needed."""

    def __init__(
        self,
        pair: Pair,
        ids: Tensor,
        *,
        other: Prefixes | None = None,
        mean: Pairs | None = None,
        sources: Pairs | None = None,
    ) -> None:
        """Store the arguments without running a model.

        Args:
            pair: models and mapper.
            ids: (B, P) token ids.
            other: other documents of the same length, for `shuffled`; by default each row gets the row before it.
            mean: the result of `mean_pairs`, for `mean`; by default the mean over this batch.
            sources: the source's keys and values of the prefixes, if they are already known.
        """
        self.pair, self.ids, self.other, self.mean = pair, ids, other, mean
        self.recomputed: list[float] = []  # share of each prefix that the last handoff recomputed
        if sources is not None:
            self.sources = sources

    @cached_property
    def sources(self) -> Pairs:
        """The source's keys and values."""
        known = self.pair.prefilled
        if known is None:
            return source_pairs(self.pair, self.ids)
        name = self.ids.numpy().tobytes()
        if name not in known:
            known[name] = source_pairs(self.pair, self.ids)
        return known[name]

    @cached_property
    def mapped(self) -> Pairs:
        """The mapped keys and values."""
        return mapped_pairs(self.pair, self.ids, self.sources)

    @torch.no_grad()
    def cache(self, arm: Arm, *, next_ids: Tensor | None = None, rows: Tensor | None = None) -> Any:
        """A new cache of the prefixes for an arm, of the target or the source; None for `no_context`.

        Args:
            arm: the arm.
            next_ids: (R, Q), the tokens after each prefix, which guide the recompute of `handoff`; they are not cached.
            rows: (R,), the prefixes to use, in this order and possibly repeated; by default each once.

        Raises:
            MismatchError: `shuffled` has only one prefix and no other document.
        """
        pair = self.pair
        rows = torch.arange(len(self.ids)) if rows is None else rows
        if arm == "no_context":
            return None
        if arm == "native":
            cache = caches.new_cache(pair.target)
            caches.forward(pair.target, self.ids.to(input_device(pair.target)), cache, base=True)
            return selected(cache, rows)
        if arm == "source":
            return filled(pair.source, _rows(self.sources, rows))
        if arm == "raw":
            return filled(pair.target, _rows(self.sources, rows))
        if arm in ("handoff", "auto"):
            return self._moved(arm, rows, next_ids)
        if arm == "mean":
            return _spread(pair, self.mean or mean_pairs(pair, self.mapped), len(rows), self.ids.shape[1])
        if arm == "shuffled":
            if self.other is None and len(self.ids) < 2:
                raise MismatchError("arm shuffled: found one document, needed another whose cache can be given instead")
            wrong = [(k.roll(1, 0), v.roll(1, 0)) for k, v in self.mapped] if self.other is None else self.other.mapped
            return filled(pair.target, _rows(wrong, rows))
        return filled(pair.target, _rows(self.mapped, rows))

    def _moved(self, arm: Arm, rows: Tensor, next_ids: Tensor | None) -> Any:
        pair = self.pair
        ids = self.ids[rows].to(input_device(pair.target))
        # A handoff leaves at least one token to the target. These tokens are not run here, but a guide reads them.
        ids = torch.cat([ids, ids[:, -1:] if next_ids is None else next_ids.to(ids.device)], 1)
        sources = _rows(self.sources, rows)
        recompute: float | Literal["auto"] = "auto" if arm == "auto" else pair.recompute

        def moved(part: slice) -> Handoff:
            return handoff(
                pair.mapper,
                pair.target,
                ids[part],
                [(keys[part], values[part]) for keys, values in sources],
                exact_head=pair.exact_head,
                exact_tail=pair.exact_tail,
                recompute=recompute,
                guide=pair.source if recompute else None,
            )

        windowed = any(window is not None for window in pair.mapper.spec.target.windows)
        # In a batch, the conversation that needs most tokens decides for all, so auto is measured one conversation at a time.
        parts = [slice(i, i + 1) for i in range(len(rows))] if arm == "auto" and not windowed else [slice(None)]
        found = [moved(part) for part in parts]
        self.recomputed = [
            0.0 if one.recomputed is None else one.recomputed.shape[1] / self.ids.shape[1]
            for one in found
            for _ in range(len(rows) // len(found))
        ]
        if len(found) == 1:
            return found[0].cache
        layers = zip(*(caches.read_cache(one.cache) for one in found), strict=True)
        joined = [tuple(torch.cat([pair[half] for pair in layer]) for half in (0, 1)) for layer in layers]
        return filled(pair.target, joined)  # type: ignore[arg-type]


def _rows(pairs: Pairs, rows: Tensor) -> Pairs:
    return [(keys[rows.to(keys.device)], values[rows.to(values.device)]) for keys, values in pairs]


def selected(cache: Any, rows: Tensor) -> Any:
    """A cache with the given sequences of another cache, which is changed in place."""
    if not torch.equal(rows, torch.arange(len(cache.layers[0].keys))):
        for layer in caches.own_layers(cache):
            layer.keys, layer.values = layer.keys[rows.to(layer.keys.device)], layer.values[rows.to(layer.values.device)]
    return cache


def filled(model: Any, pairs: Pairs) -> Any:
    """A cache of `model` that holds the given keys and values in its dtype, each layer on the device that runs it."""
    cache, dtype = caches.new_cache(model), caches.cache_dtype(model)
    devices = caches.layer_devices(model, len(pairs))
    for layer_index, (keys, values) in enumerate(pairs):
        caches.append(cache, layer_index, *(half.to(devices[layer_index], dtype) for half in (keys, values)))
    return cache


@torch.no_grad()
def mean_pairs(pair: Pair, mapped: Pairs) -> Pairs:
    """Per layer, the mean of the mapped (un-rotated) keys and values over all tokens of all sequences, each (1, H, 1, D).

    Over several documents this approximates the map's output at the mean of its inputs: the right mean, and no content.
    """
    out = []
    for layer_index, (keys, values) in enumerate(mapped):
        table = pair.mapper.spec.target.rope.table(layer_index)
        if table is not None:
            keys = unrotate(keys, table, angles(table, torch.arange(keys.shape[2], device=keys.device)))
        out.append((keys.mean((0, 2), keepdim=True), values.mean((0, 2), keepdim=True)))
    return out


def _spread(pair: Pair, mean: Pairs, batch: int, n_tokens: int) -> Any:
    """A cache in which every token has the mean keys, rotated to its position, and the mean values."""
    out = []
    for layer_index, (keys, values) in enumerate(mean):
        table = pair.mapper.spec.target.rope.table(layer_index)
        keys, values = (part.expand(batch, -1, n_tokens, -1).contiguous() for part in (keys, values))
        if table is not None:
            keys = rotate(keys, table, angles(table, torch.arange(n_tokens, device=keys.device)))
        out.append((keys, values))
    return filled(pair.target, out)


class Rewindable:
    """A cache that can be used several times, because `fresh` restores its original length.

    Cropping costs nothing, but a windowed layer may have dropped tokens that it would need. Such a cache is copied.
    """

    def __init__(self, cache: Any) -> None:
        windowed = cache is not None and caches.drops_tokens(cache)
        self._cache = cache
        self._length = 0 if cache is None else caches.cache_length(cache)
        self._kept = copy.deepcopy(cache) if windowed else None

    def fresh(self, model: Any) -> Any:
        """The restored cache, valid until the next call; an empty cache of `model` if there was none."""
        if self._cache is None:
            return caches.new_cache(model)
        if self._kept is not None:
            return copy.deepcopy(self._kept)
        caches.crop(self._cache, self._length)
        return self._cache


def model_of(pair: Pair, arm: Arm) -> Any:
    """The model that continues in an arm."""
    return pair.source if arm == "source" else pair.target


@torch.no_grad()
def continuation_logits(model: Any, cache: Any, ids: Tensor, prefix: int, vocabulary: int) -> Tensor:
    """(B, C, vocabulary), teacher-forced logits for each token after the prefix.

    The cache covers the first `prefix` - 1 tokens of ids (B, prefix + C). The model always runs the last prefix token itself,
    so that every arm predicts the first continuation token from its own pass.
    """
    return caches.forward(model, ids[:, prefix - 1 : -1].to(input_device(model)), cache)[..., :vocabulary]


@torch.no_grad()
def greedy(model: Any, cache: Any, ids: Tensor, n_tokens: int, vocabulary: int | None = None) -> Tensor:
    """(B, n_tokens), greedily decoded tokens after ids (B, Q) on top of a cache, which grows in place."""
    decoded = []
    ids = ids.to(input_device(model))
    for _ in range(n_tokens):
        ids = caches.forward(model, ids, cache, logits_to_keep=1)[:, -1, :vocabulary].argmax(-1, keepdim=True)
        decoded.append(ids)
    return torch.cat(decoded, 1) if decoded else ids[:, :0]


def answer(model: Any, cache: Any, question_ids: Tensor, n_tokens: int) -> list[int]:
    """The greedy continuation of one question (1, Q) on top of a cache, up to the model's end token."""
    return up_to_end(model, greedy(model, cache, question_ids, n_tokens)[0])


def up_to_end(model: Any, tokens: Tensor) -> list[int]:
    """The tokens of a continuation (T,) before the first one that ends an answer; what follows that was never said."""
    ends = set(end_ids(model))
    return list(takewhile(lambda token: token not in ends, tokens.tolist()))
