"""Move one conversation from the source's cache to the target's.

A conversation of S tokens, of which the source's cache covers T, is split into four parts:

    0 .. head              run by the target: the first tokens get far more attention than others, and maps are bad at them
    head .. prefix-tail    mapped from the source's cache
    prefix-tail .. prefix  run by the target, on top of the mapped tokens
    prefix .. S            left to the caller; at least one token, so that the first logits are the target's own

with prefix = min(T, S - 1). With guided recompute the target then runs the most important of the mapped tokens again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.placeholders import Placeholders
from kvfit.runtime.checks import check_source, check_vocabulary, common_tokens
from kvfit.runtime.choice import keep_only
from kvfit.runtime.features import Pairs
from kvfit.runtime.mapper import Mapper
from kvfit.runtime.passes import check_mapped, check_ran, run, timed, undone_on_error
from kvfit.runtime.recompute import guided_tokens
from kvfit.runtime.request import Wanted
from kvfit.runtime.rewrite import full_copy, refuse_static, rewrite
from kvfit.runtime.same_tokens import check_held_tokens


@dataclass(frozen=True)
class Parts:
    """The ends of the parts of a conversation, as token numbers.

    Attributes:
        reused: end of the tokens that the target's cache already holds.
        head: end of the first tokens, which the target runs itself.
        tail: end of the mapped tokens.
        prefix: end of the tokens that are moved.
    """

    reused: int
    head: int
    tail: int
    prefix: int


@dataclass(frozen=True)
class Filled:
    """The target's cache, and how its tokens got there according to its length.

    Attributes:
        cache: the target's cache.
        n_mapped: tokens per sequence that were mapped.
        n_exact: tokens per sequence that the target ran.
        n_reused: tokens per sequence that it held before.
        recomputed: (B, C), the mapped tokens that the target ran again; None if there are none.
    """

    cache: Any
    n_mapped: int
    n_exact: int
    n_reused: int
    recomputed: Tensor | None = None


class Mover:
    """Moves one conversation, or lets the target prefill it."""

    def __init__(self, target_model: Any, input_ids: Tensor, mask: Tensor) -> None:
        """Take a conversation.

        Args:
            target_model: the target.
            input_ids: (B, S), checked.
            mask: (B, S), 0 on left padding, checked.
        """
        self.model = target_model
        self.input_ids = input_ids
        self.mask = mask
        self.positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.padding = int((mask == 0).sum(-1).max())
        self.real = mask if self.padding else None
        self.seconds: dict[str, float] = {}
        # The cache that the caller passed, and how many first tokens it shares with the conversation; None until that is known.
        self.own: tuple[Any, int] | None = None
        self.placeholders = Placeholders(target_model, input_ids)

    def prefill(self) -> Filled:
        """Let the target run every token that its own cache does not hold."""
        cache, reused = self.own or (None, 0)
        if cache is not None:
            try:
                caches.crop(cache, reused)
            except MismatchError:  # a window has dropped tokens; the cache is unchanged
                cache = None
        if cache is None:
            cache, reused = caches.new_cache(self.model), 0
        prefix = self.input_ids.shape[1] - 1
        self.placeholders.refuse(reused, prefix)
        self.seconds = {}
        with undone_on_error(cache, reused):
            n_exact = self._run(cache, reused, prefix, "prefill")
            check_ran(cache, [(reused, prefix)], self.real)
        return Filled(cache, n_mapped=0, n_exact=n_exact, n_reused=caches.cache_length(cache) - n_exact)

    def move(self, mapper: Mapper, source_cache: Any, wanted: Wanted, target_cache: Any, target_ids: Tensor | None) -> Filled:
        """Check everything, map, and only then fill the target's cache."""
        if not isinstance(mapper, Mapper):
            raise MismatchError(f"mapper: found {type(mapper).__name__}, needed a Mapper: load_mapper(...) gives one")
        mapper.check_models(None, self.model)
        check_vocabulary(mapper.spec, self.input_ids, self.mask)
        reused = self._common(mapper, target_cache, target_ids)
        if target_cache is not None and target_cache is source_cache:
            raise MismatchError("target_cache: found source_cache itself, needed a cache that the target may change")
        self.own = target_cache, reused
        mapper.check_models(wanted.guide)
        pairs, parts = self._parts(mapper, source_cache, wanted, reused)
        if not wanted.recompute:  # with a guide, more tokens are compared later
            mapper.check_tokens(pairs, self.input_ids, self.mask)
        if reused and not mapper.spec.lexical_lags:
            self.own = None  # so that a prefill does not reuse what is refused here
            self._check_held(mapper, pairs, target_cache, reused)
            self.own = target_cache, reused
        windowed = any(window is not None for window in mapper.spec.target.windows)
        own = parts.tail <= parts.head and not reused  # the target runs all that is moved
        tokens = None if own else self._chosen(wanted, pairs, parts, reused if windowed else 0)
        if tokens is not None:
            mapper.check_rewrite(self.model)
            if target_cache is not None:
                refuse_static(target_cache)
        self._refuse_what_cannot_run(mapper, parts, tokens)
        mapped = self._mapped(mapper, pairs, parts)

        # Everything has been checked and mapped. From here on the target's cache changes.
        cache = caches.new_cache(self.model) if target_cache is None else target_cache
        if target_cache is not None:
            caches.crop(cache, reused)  # refuses before it changes anything
        rewritten = tokens is not None and reused > 0 and bool((tokens < reused).any())
        with undone_on_error(cache, reused, rewritten=rewritten) if target_cache is not None else nullcontext():
            return self._filled(mapper, cache, mapped, parts, tokens)

    def _parts(self, mapper: Mapper, source_cache: Any, wanted: Wanted, reused: int) -> tuple[Pairs, Parts]:
        """The source's keys and values of the tokens that are moved, and the ends of the parts."""
        pairs = caches.read_cache(source_cache)
        batch, length = self.input_ids.shape
        covered = pairs[0][0].shape[2]
        if pairs[0][0].shape[0] != batch or covered > length:
            raise MismatchError(
                f"source_cache: found {pairs[0][0].shape[0]} sequences of {covered} tokens, needed {batch} of at most {length} "
                "as input_ids has"
            )
        check_source(mapper.spec.source, pairs, self.positions[:, :covered])
        # The target's cache may hold more tokens than the source's. Then nothing is mapped, and its tokens are kept.
        prefix = max(min(covered, length - 1), reused)
        # The first real token of every row must be exact, so in a left-padded batch the head includes the longest padding.
        head = min(max(reused, self.padding + wanted.exact_head if wanted.exact_head else 0), prefix)
        tail = max(head, prefix - wanted.exact_tail)
        return [(keys[:, :, :prefix], values[:, :, :prefix]) for keys, values in pairs], Parts(reused, head, tail, prefix)

    def _mapped(self, mapper: Mapper, pairs: Pairs, parts: Parts) -> Pairs:
        """The mapped keys and values of every target layer, checked; [] if no token is mapped."""
        if parts.tail <= parts.head:
            return []
        with timed(self.seconds, "transfer"):
            cut = [(keys[:, :, : parts.tail], values[:, :, : parts.tail]) for keys, values in pairs]
            # With an empty cache the head is mapped too, and then overwritten by the target's own keys and values, because
            # appending to a cache that already holds the head would copy every layer.
            start = parts.head if parts.reused else 0
            mapped = mapper.transfer_layers(
                cut,
                positions=self.positions[:, : parts.tail],
                start=start,
                target_model=self.model,
                input_ids=self.input_ids[:, : parts.tail],
            )
            # A source's cache may hold NaN on padding, and an additive mask does not remove it.
            if self.padding > parts.head:
                padding = self.mask[:, start : parts.tail] == 0
                for half in (half for pair in mapped for half in pair):
                    half.masked_fill_(padding[:, None, :, None].to(half.device), 0)
            check_mapped(mapped, cut, parts.head - start, parts.head)
        return mapped

    def _filled(self, mapper: Mapper, cache: Any, mapped: Pairs, parts: Parts, tokens: Tensor | None) -> Filled:
        """Fill the target's cache with all parts. This empties `mapped`."""
        windows = mapper.spec.target.windows
        before = caches.cache_length(cache)
        # A windowed layer drops tokens that a token which is run again may need.
        work = full_copy(cache) if tokens is not None and any(window is not None for window in windows) else cache
        if tokens is not None and work is cache and not mapped:  # the caller may share this memory
            for layer in caches.own_layers(work):
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        n_exact = self._fill(work, mapped, parts)
        n_mapped = caches.cache_length(work) - before - n_exact
        if tokens is not None:
            self._run_again(work, tokens, parts.tail, windows)
            check_ran(work, [(0, parts.tail)], self.real)
        if work is not cache:
            cache = caches.new_cache(self.model)
            for layer_index, (keys, values) in enumerate(caches.read_cache(work)):
                caches.append(cache, layer_index, keys, values)
        n_exact += self._run(cache, parts.tail, parts.prefix)
        check_ran(cache, [(parts.reused, parts.head), (parts.tail, parts.prefix)], self.real)
        return Filled(cache, n_mapped=n_mapped, n_exact=n_exact, n_reused=before, recomputed=tokens)

    def _fill(self, cache: Any, mapped: Pairs, parts: Parts) -> int:
        """Append the head, which the target runs, and the mapped tokens. Returns the number of tokens that it ran."""
        if parts.reused or not mapped:
            n_exact = self._run(cache, parts.reused, parts.head)
        else:
            own = caches.full_cache()
            n_exact = self._run(own, 0, parts.head)
            for (keys, values), layer in zip(mapped, own.layers, strict=False):  # there are no layers without a head
                keys[:, :, : parts.head], values[:, :, : parts.head] = layer.keys, layer.values
        for layer_index in range(len(mapped)):
            caches.place(cache, layer_index, *mapped.pop(0))  # may copy; popping keeps only one layer in memory twice
        return n_exact

    def _run(self, cache: Any, start: int, stop: int, part: str = "exact") -> int:
        """Let the target run tokens start to stop - 1 on top of the cache. Returns the number of tokens that it ran."""
        if stop <= start:
            return 0
        with timed(self.seconds, part):
            return run(
                self.model,
                self.input_ids[:, start:stop],
                cache,
                position_ids=self.positions[:, start:stop],
                attention_mask=None if self.real is None else self.real[:, :stop],
            )

    def _run_again(self, cache: Any, tokens: Tensor, tail: int, windows: tuple[int | None, ...]) -> None:
        with timed(self.seconds, "recompute"):
            rewrite(
                self.model,
                self.input_ids[:, :tail],
                cache,
                tokens,
                position_ids=self.positions[:, :tail],
                attention_mask=self.mask[:, :tail],
                windows=windows,
            )

    def _chosen(self, wanted: Wanted, pairs: Pairs, parts: Parts, first: int) -> Tensor | None:
        """(B, C), the tokens from `first` on to run again, ascending; None if there are none."""
        batch, _, covered, _ = pairs[0][0].shape
        numbers = torch.arange(min(parts.tail, covered), device=self.mask.device)
        # What the target runs here is exact. What it held before may have been mapped in an earlier turn.
        among = (numbers >= first) & ((numbers < parts.reused) | (numbers >= parts.head)) & (self.mask[:, : len(numbers)] != 0)
        if wanted.exact_tokens is not None:
            tokens = wanted.indices(batch, covered, self.input_ids.device)
        elif wanted.recompute and bool(among.any()):
            with timed(self.seconds, "guide"):
                tokens = guided_tokens(
                    wanted.guide,
                    pairs,
                    self.input_ids,
                    prefix=covered,
                    among=among,
                    fraction=wanted.recompute,
                    attention_mask=self.real,
                    excluded=self.placeholders.found,
                ).to(self.input_ids.device)
        else:
            return None
        kept = keep_only(tokens, among, first)
        return kept if kept.shape[1] else None

    def _common(self, mapper: Mapper, target_cache: Any, target_ids: Tensor | None) -> int:
        """How many first tokens the target's cache shares with the conversation, not counting the conversation's last token."""
        if target_cache is None:
            return 0
        reused = common_tokens(mapper.spec.target, target_cache, target_ids, self.input_ids)
        if reused and mapper.spec.lexical_lags:  # then layer 0 is exact, mapped or run
            check_held_tokens(self.model, target_cache, self.input_ids, reused, self.mask)
        return reused

    def _check_held(self, mapper: Mapper, pairs: Pairs, target_cache: Any, reused: int) -> None:
        """Refuse held tokens whose layer 0 is neither the target's own nor what the mapper makes of the source's cache."""

        def mapped(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            cut = [(keys[:, :, tokens], values[:, :, tokens]) for keys, values in pairs]
            return caches.read_cache(mapper.transfer(cut, positions=positions, layers=[0]))[0]

        covered = min(reused, pairs[0][0].shape[2])  # a token beyond the source's cache may have been mapped earlier
        check_held_tokens(self.model, target_cache, self.input_ids, covered, self.mask, mapped)

    def _refuse_what_cannot_run(self, mapper: Mapper, parts: Parts, tokens: Tensor | None) -> None:
        """Refuse placeholders among the tokens whose embeddings the target would compute itself."""
        self.placeholders.refuse(parts.reused, parts.tail if mapper.spec.lexical_lags else parts.head)
        self.placeholders.refuse(parts.tail, parts.prefix)
        if tokens is not None:
            chosen = torch.zeros_like(self.input_ids, dtype=torch.bool).scatter_(1, tokens, True)
            self.placeholders.refuse(0, parts.prefix, chosen)
