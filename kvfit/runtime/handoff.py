"""`handoff`: a conversation moved from the source to the target.

The tokens of a conversation of S tokens, of which the source's cache covers T, end in one of four parts:

    0 .. head            run by the target itself: the first tokens draw attention out of proportion, and no map gets them right
    head .. prefix-tail  mapped from the source's cache
    prefix-tail .. prefix  run by the target itself, on top of the mapped tokens
    prefix .. S          left to the caller; at least one token, so that the first logits are the target's own

with prefix = min(T, S - 1). Guided recompute then lets the target run the mapped tokens that matter most once more.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import KvfitError, MismatchError
from kvfit.model import cache as caches
from kvfit.model.identity import require_model
from kvfit.runtime.checks import check_source, check_target
from kvfit.runtime.mapper import Mapper
from kvfit.runtime.recompute import guided_tokens
from kvfit.runtime.request import Wanted, checked_ids, checked_mask
from kvfit.runtime.rewrite import refuse_static, rewrite, whole

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, repr=False)
class Handoff:
    """A conversation that the target can continue.

    Attributes:
        cache: the target's cache over all of the conversation but `remaining_ids`.
        input_ids: (B, S), the whole conversation, as given.
        remaining_ids: (B, m), m >= 1, the ids that the target has still to run.
        status: ``applied``, or ``fallback_prefill`` when the target prefilled instead.
        reason: why it fell back, None when it did not.
        n_mapped: tokens per sequence that were mapped.
        n_exact: tokens per sequence that the target ran here, head and tail.
        n_reused: tokens per sequence that the target's cache held already.
        recomputed: (B, C), indices of the tokens that the target ran once more in the mapped context; None for none.
        seconds: wall time of each part (``guide``, ``transfer``, ``exact``, ``recompute``, ``prefill``), as seen by the host: a
            device may still be busy.
    """

    cache: Any
    input_ids: Tensor
    remaining_ids: Tensor
    status: Literal["applied", "fallback_prefill"]
    reason: str | None
    n_mapped: int
    n_exact: int
    n_reused: int
    recomputed: Tensor | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        batch, length = self.input_ids.shape
        again = "" if self.recomputed is None else f", {self.recomputed.shape[1]} of them run once more"
        reason = "" if self.reason is None else f", reason: {self.reason}"
        return (
            f"Handoff({self.status}: {batch} x {length} tokens: {self.n_reused} reused, {self.n_mapped} mapped{again}, "
            f"{self.n_exact} exact, {self.remaining_ids.shape[1]} left to run{reason})"
        )


@torch.no_grad()
def handoff(
    mapper: Mapper,
    target_model: Any,
    input_ids: Tensor,
    source_cache: Any,
    *,
    attention_mask: Tensor | None = None,
    exact_head: int = 1,
    exact_tail: int = 0,
    recompute: float = 0.0,
    guide: Any = None,
    exact_tokens: Tensor | Sequence[int] | None = None,
    target_cache: Any = None,
    target_ids: Tensor | None = None,
    on_error: Literal["raise", "prefill"] = "raise",
) -> Handoff:
    """Give the target a conversation that the source has read.

    What was mapped is looked at once for NaN and infinity, which a broken source cache would spread over every logit; it waits
    for the device, and took 0.3 to 0.8 of 14 ms for 1,024 tokens of the demo pair on a CPU.

    Args:
        mapper: from the source to the target.
        target_model: the loaded target; that it is the one the mapper was fitted on is checked at first use.
        input_ids: (B, S), the whole conversation in ids of the target. The source's cache covers its first T tokens, T <= S.
        source_cache: the source's cache; never changed.
        attention_mask: (B, S), for left-padded batches: 0 on padding. Default all ones.
        exact_head: first tokens that the target runs itself.
        exact_tail: last tokens of the moved prefix that the target runs itself.
        recompute: share of the moved prefix, 0 to 1, that the target runs once more: the tokens that `guide` looks at (see
            `kvfit.runtime.recompute`). It costs this share of a prefill and gives back exact content where the question
            looks. Less than the mapper was judged with warns, once.
        guide: the loaded source, needed with `recompute`.
        exact_tokens: instead of `recompute`: which tokens to run once more, indices into the conversation, (C,) or (B, C); no
            mask. A token may be named twice, to fill up a row. Tokens beyond the mapped part are exact anyway.
        target_cache: a cache of the target from an earlier turn. What it holds beyond the longest common prefix of `target_ids`
            and `input_ids` is cropped off; what is common is kept, and only newer tokens are mapped. It is changed and becomes
            the result's cache, unless tokens are run once more in a target with windows: that makes a new one.
        target_ids: (B, n), the ids that `target_cache` was made from; needed with it.
        on_error: ``raise``, or ``prefill``: whatever goes wrong, let the target prefill and say so in the result. What
            `target_cache` holds of the conversation is kept then too, mapped tokens included, unless target or cache were what
            went wrong. Ids, mask and a target that no prefill could use are refused all the same.

    Returns:
        The cache, the ids still to run, and what was done. Continue with ``target_model.generate(moved.input_ids,
        cache=moved.cache)``.

    Raises:
        MismatchError: the target or the guide is not the mapper's, or ids, mask and caches do not fit each other; nothing has
            been changed then.
        UnsupportedModelError: a model's attention kernel cannot do what `recompute` or `exact_tokens` needs.
    """
    if on_error not in ("raise", "prefill"):
        raise MismatchError(f"on_error: found {on_error!r}, needed 'raise' or 'prefill'")
    require_model(target_model, "target_model")
    input_ids = checked_ids(target_model, input_ids)
    mover = _Mover(target_model, input_ids, checked_mask(input_ids, attention_mask))
    if isinstance(mapper, Mapper) and isinstance(recompute, int | float) and exact_tokens is None:
        _warn_of_less(mapper, recompute)
    try:
        wanted = Wanted(exact_head, exact_tail, recompute, guide, exact_tokens)
        return mover.move(mapper, source_cache, wanted, target_cache, target_ids)
    except Exception as error:
        if on_error == "raise":
            raise
        reason = str(error) if isinstance(error, KvfitError) else f"{type(error).__name__}: {error}"
    # Outside the handler, whose error would keep all that the attempt has allocated alive.
    return mover.prefill(reason)


def _warn_of_less(mapper: Mapper, recompute: float) -> None:
    """A verdict speaks of the handoff that was judged: with less recomputed, recall may be gone and nothing else show it."""
    if recompute < mapper.judged_recompute:
        warnings.warn(
            f"mapper {mapper.spec.source.ref} -> {mapper.spec.target.ref}: found recompute={recompute:g}, needed "
            f"{mapper.judged_recompute:g} as its verdict {mapper.verdict} was found with: pass recompute="
            f"{mapper.judged_recompute:g} and guide=, or evaluate without",
            stacklevel=4,  # handoff and torch's no_grad are between this and the caller
        )


class _Mover:
    """One conversation on its way."""

    def __init__(self, target_model: Any, input_ids: Tensor, mask: Tensor) -> None:
        self.model = target_model
        self.input_ids = input_ids
        self.mask = mask
        self.positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.padding = int((mask == 0).sum(-1).max())
        self.seconds: dict[str, float] = {}
        # The target's cache and how many of its tokens hold good, as long as it is known to be right and unchanged.
        self.own: tuple[Any, int] | None = None

    def run(self, cache: Any, start: int, stop: int) -> None:
        """The target itself runs tokens start to stop on top of the cache."""
        if stop > start:
            with _timed(self.seconds, "exact"):
                caches.forward(
                    self.model,
                    self.input_ids[:, start:stop],
                    cache,
                    position_ids=self.positions[:, start:stop],
                    attention_mask=self.mask[:, :stop] if self.padding else None,
                    base=True,
                )

    def prefill(self, reason: str) -> Handoff:
        """The target runs everything itself that its own cache does not hold already."""
        cache, reused = self.own or (None, 0)
        if cache is not None:
            try:
                caches.crop(cache, reused)
            except MismatchError:  # a window has dropped tokens; the cache is as it was
                cache, reused = None, 0
        if cache is None:
            cache = caches.new_cache(self.model)
        prefix = self.input_ids.shape[1] - 1
        self.seconds = {}
        self.run(cache, reused, prefix)
        self.seconds = {"prefill": self.seconds.get("exact", 0.0)}
        return Handoff(
            cache=cache,
            input_ids=self.input_ids,
            remaining_ids=self.input_ids[:, prefix:],
            status="fallback_prefill",
            reason=reason,
            n_mapped=0,
            n_exact=prefix - reused,
            n_reused=reused,
            seconds=self.seconds,
        )

    def move(self, mapper: Mapper, source_cache: Any, wanted: Wanted, target_cache: Any, target_ids: Tensor | None) -> Handoff:
        if not isinstance(mapper, Mapper):
            raise MismatchError(f"mapper: found {type(mapper).__name__}, needed a Mapper: load_mapper(...) gives one")
        mapper.check_models(None, self.model)
        common = self.common(mapper, target_cache, target_ids)
        if target_cache is not None:
            self.own = target_cache, common
        mapper.check_models(wanted.guide)
        pairs = caches.read_cache(source_cache)
        batch, length = self.input_ids.shape
        covered = pairs[0][0].shape[2]
        if pairs[0][0].shape[0] != batch or covered > length:
            raise MismatchError(
                f"source_cache: found {pairs[0][0].shape[0]} sequences of {covered} tokens, needed {batch} of at most {length} "
                "as input_ids has"
            )
        # The target's cache may be ahead of the source's: then there is nothing to map, and nothing to give up.
        prefix = max(min(covered, length - 1), common)
        check_source(mapper.spec.source, pairs, self.positions[:, :covered])
        reused = common
        # In a left-padded batch the first real token of every row must be exact, so the head reaches over the longest padding.
        head = min(max(reused, self.padding + wanted.exact_head if wanted.exact_head else 0), prefix)
        tail = max(head, prefix - wanted.exact_tail)
        pairs = [(keys[:, :, :prefix], values[:, :, :prefix]) for keys, values in pairs]
        windowed = any(window is not None for window in mapper.spec.target.windows)
        tokens = self.chosen(wanted, pairs, min(tail, pairs[0][0].shape[2]), reused if windowed else 0)
        if tokens is not None and target_cache is not None:
            refuse_static(target_cache)
        mapped: Pairs = []
        with _timed(self.seconds, "transfer"):
            if tail > head:
                cut = [(keys[:, :, :tail], values[:, :, :tail]) for keys, values in pairs]
                # Into an empty cache the head goes as well, so that its own keys and values can be written over it: appending
                # to a cache that holds a head already would copy every layer.
                start = head if reused else 0
                mapped = mapper.transfer_layers(
                    cut,
                    positions=self.positions[:, :tail],
                    start=start,
                    target_model=self.model,
                    input_ids=self.input_ids[:, :tail],
                )
                # Padding may be anything in a source's cache, and a mask that is added does not keep NaN out.
                if self.padding > head:
                    _blank(mapped, self.mask[:, start:tail] == 0)
                _refuse_nonfinite(mapped, cut, head - start, head)

        # Everything was checked and mapped; from here on the target's cache changes.
        cache = caches.new_cache(self.model) if target_cache is None else target_cache
        if target_cache is not None:
            caches.crop(cache, reused)  # refuses before it changes anything
        self.own = None
        # A windowed layer drops tokens that those run once more may need to see.
        work = whole(cache) if tokens is not None and windowed else cache
        self.fill(work, mapped, reused, head)
        if tokens is not None:
            self.run_again(work, tokens, tail, mapper.spec.target.windows)
        if work is not cache:
            cache = caches.new_cache(self.model)
            for layer_index, (keys, values) in enumerate(caches.read_cache(work)):
                caches.append(cache, layer_index, keys, values)
        self.run(cache, tail, prefix)
        return Handoff(
            cache=cache,
            input_ids=self.input_ids,
            remaining_ids=self.input_ids[:, prefix:],
            status="applied",
            reason=None,
            n_mapped=tail - head,
            n_exact=prefix - tail + head - reused,
            n_reused=reused,
            recomputed=tokens,
            seconds=self.seconds,
        )

    def fill(self, cache: Any, mapped: Pairs, reused: int, head: int) -> None:
        """Append the tokens that the target runs first, and those that were mapped; `mapped` is used up."""
        if reused or not mapped:
            self.run(cache, reused, head)
        else:
            own = caches.full_cache()
            self.run(own, 0, head)
            for (keys, values), layer in zip(mapped, own.layers, strict=False):  # no layers where there is no head
                keys[:, :, :head], values[:, :, :head] = layer.keys, layer.values
        for layer_index in range(len(mapped)):
            caches.place(cache, layer_index, *mapped.pop(0))  # appending may copy; one layer at a time is held twice

    def chosen(self, wanted: Wanted, pairs: Pairs, tail: int, first: int) -> Tensor | None:
        """(B, C) tokens of first to tail - 1 to run once more, ascending; None for none."""
        batch, prefix = self.input_ids.shape[0], pairs[0][0].shape[2]
        if wanted.exact_tokens is None:
            if not wanted.recompute or tail <= first:
                return None
            with _timed(self.seconds, "guide"):
                tokens = guided_tokens(
                    wanted.guide,
                    pairs,
                    self.input_ids,
                    prefix=prefix,
                    n_tokens=tail,
                    fraction=wanted.recompute,
                    first=first,
                    attention_mask=self.mask if self.padding else None,
                ).to(self.input_ids.device)
        else:
            tokens = wanted.indices(batch, prefix, self.input_ids.device)
        # What the tail runs needs no second run, and what a windowed layer may have dropped cannot have one: such a place in a
        # row is filled by running one of the allowed tokens, the same for all, once more.
        outside = (tokens >= tail) | (tokens < first)
        tokens = tokens.masked_fill(outside, first).sort(dim=1).values
        return tokens if tokens.shape[1] and tail > first and not bool(outside.all()) else None

    def run_again(self, cache: Any, tokens: Tensor, tail: int, windows: tuple[int | None, ...]) -> None:
        with _timed(self.seconds, "recompute"):
            rewrite(
                self.model,
                self.input_ids[:, :tail],
                cache,
                tokens,
                position_ids=self.positions[:, :tail],
                attention_mask=self.mask[:, :tail],
                windows=windows,
            )

    def common(self, mapper: Mapper, target_cache: Any, target_ids: Tensor | None) -> int:
        """Tokens of the target's cache that are also the conversation's first ones, without its last."""
        if target_cache is None:
            return 0
        batch, length = self.input_ids.shape
        held = check_target(mapper.spec.target, target_cache, batch, length - 1, name="target_cache")
        shape = tuple(target_ids.shape) if isinstance(target_ids, Tensor) else None
        if target_ids is None or shape is None or len(shape) != 2 or shape[0] != batch or shape[1] < held:
            found = type(target_ids).__name__ if shape is None else shape
            raise MismatchError(f"target_ids: found {found}, needed ({batch}, n) ids of all {held} tokens in target_cache")
        most = min(held, length - 1)
        differs = (target_ids[:, :most].to(self.input_ids.device) != self.input_ids[:, :most]).any(0)
        return int(differs.int().argmax()) if bool(differs.any()) else most


def _blank(mapped: Pairs, padding: Tensor) -> None:
    """Zeros where `padding` (B, T) is set."""
    for halves in mapped:
        for half in halves:
            half.masked_fill_(padding[:, None, :, None].to(half.device), 0)


def _refuse_nonfinite(mapped: Pairs, source: Pairs, start: int, head: int) -> None:
    """Refuse NaN and infinity in what was mapped, from token `start` of it and `head` of the source on."""
    where = caches.first_nonfinite([(keys[:, :, start:], values[:, :, start:]) for keys, values in mapped])
    if where is not None:
        caches.check_finite([(keys[:, :, head:], values[:, :, head:]) for keys, values in source], "source_cache")
        raise MismatchError(
            f"mapped cache, {where}: found NaN or infinity made of finite numbers, needed a dtype that holds them: "
            "load the target in bfloat16 or float32"
        )


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begun
