"""`handoff`: a conversation moved from the source to the target.

The tokens of a conversation of S tokens, of which the source's cache covers T, end in one of four parts:

    0 .. head            run by the target itself: the first tokens draw attention out of proportion, and no map gets them right
    head .. prefix-tail  mapped from the source's cache
    prefix-tail .. prefix  run by the target itself, on top of the mapped tokens
    prefix .. S          left to the caller; at least one token, so that the first logits are the target's own

with prefix = min(T, S - 1).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit import cache as caches
from kvfit.errors import KvfitError, MismatchError
from kvfit.mapper import Mapper


@dataclass(frozen=True)
class Handoff:
    """A conversation that the target can continue.

    Attributes:
        cache: the target's cache over all of the conversation but `remaining_ids`.
        input_ids: (B, S), the whole conversation, as given.
        remaining_ids: (B, m), m >= 1, the ids that the target has still to run.
        status: ``applied``, or ``fallback_prefill`` when the target prefilled instead.
        reason: why it fell back, None when it did not.
        n_mapped: tokens per sequence that were mapped.
        n_exact: tokens per sequence that the target ran here.
        n_reused: tokens per sequence that the target's cache held already.
        seconds: wall time of each part (``exact``, ``transfer``, ``prefill``), as seen by the host: a device may still be busy.
    """

    cache: Any
    input_ids: Tensor
    remaining_ids: Tensor
    status: Literal["applied", "fallback_prefill"]
    reason: str | None
    n_mapped: int
    n_exact: int
    n_reused: int
    seconds: dict[str, float] = field(default_factory=dict)


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
    target_cache: Any = None,
    target_ids: Tensor | None = None,
    on_error: Literal["raise", "prefill"] = "raise",
) -> Handoff:
    """Give the target a conversation that the source has read.

    Args:
        mapper: from the source to the target.
        target_model: the loaded target.
        input_ids: (B, S), the whole conversation. The source's cache covers its first T tokens, T <= S.
        source_cache: the source's cache; never changed.
        attention_mask: (B, S), for left-padded batches: 0 on padding. Default all ones.
        exact_head: first tokens that the target runs itself.
        exact_tail: last tokens of the moved prefix that the target runs itself.
        target_cache: a cache of the target from an earlier turn. What it holds beyond the longest common prefix of `target_ids`
            and `input_ids` is cropped off; what is common is kept, and only newer tokens are mapped.
        target_ids: (B, n), the ids that `target_cache` was made from; needed with it.
        on_error: ``raise``, or ``prefill``: let the target prefill and say so in the result.

    Returns:
        The cache, the ids still to run, and what was done. Continue with ``target_model.generate(moved.input_ids,
        cache=moved.cache)``.

    Raises:
        MismatchError: ids, mask and caches do not fit each other or the mapper; nothing has been changed then.
    """
    if on_error not in ("raise", "prefill"):
        raise MismatchError(f"on_error: found {on_error!r}, needed 'raise' or 'prefill'")
    if input_ids.dim() != 2 or input_ids.shape[1] < 1:
        raise MismatchError(f"input_ids: found shape {tuple(input_ids.shape)}, needed (B, S) with at least one token")
    mask = _checked_mask(input_ids, attention_mask)
    mover = _Mover(target_model, input_ids, mask)
    try:
        return mover.move(mapper, source_cache, exact_head, exact_tail, target_cache, target_ids)
    except KvfitError as error:
        if on_error == "raise":
            raise
        return mover.prefill(str(error))


def _checked_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise MismatchError(f"attention_mask: found shape {tuple(attention_mask.shape)}, needed {tuple(input_ids.shape)} as input_ids")
    return attention_mask.to(input_ids.device)


class _Mover:
    """One conversation on its way."""

    def __init__(self, target_model: Any, input_ids: Tensor, mask: Tensor) -> None:
        self.model = target_model
        self.input_ids = input_ids
        self.mask = mask
        self.positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.padded = bool((mask == 0).any())
        self.seconds: dict[str, float] = {}

    def run(self, cache: Any, start: int, stop: int) -> None:
        """The target itself runs tokens start to stop on top of the cache."""
        begun = time.perf_counter()
        if stop > start:
            caches.forward(
                self.model,
                self.input_ids[:, start:stop],
                cache,
                position_ids=self.positions[:, start:stop],
                attention_mask=self.mask[:, :stop] if self.padded else None,
                base=True,
            )
        self.seconds["exact"] = self.seconds.get("exact", 0.0) + time.perf_counter() - begun

    def result(self, cache: Any, prefix: int, reason: str | None, n_mapped: int, n_reused: int) -> Handoff:
        return Handoff(
            cache=cache,
            input_ids=self.input_ids,
            remaining_ids=self.input_ids[:, prefix:],
            status="applied" if reason is None else "fallback_prefill",
            reason=reason,
            n_mapped=n_mapped,
            n_exact=prefix - n_mapped - n_reused,
            n_reused=n_reused,
            seconds=self.seconds,
        )

    def prefill(self, reason: str) -> Handoff:
        cache = caches.new_cache(self.model)
        prefix = self.input_ids.shape[1] - 1
        begun = time.perf_counter()
        self.run(cache, 0, prefix)
        self.seconds = {"prefill": time.perf_counter() - begun}
        return self.result(cache, prefix, reason, 0, 0)

    def move(
        self, mapper: Mapper, source_cache: Any, exact_head: int, exact_tail: int, target_cache: Any, target_ids: Tensor | None
    ) -> Handoff:
        if exact_head < 0 or exact_tail < 0:
            raise MismatchError(f"exact_head, exact_tail: found {exact_head}, {exact_tail}, needed 0 or more")
        pairs = caches.read_cache(source_cache)
        batch, length = self.input_ids.shape
        covered = pairs[0][0].shape[2]
        if pairs[0][0].shape[0] != batch or covered > length:
            raise MismatchError(
                f"source_cache: found {pairs[0][0].shape[0]} sequences of {covered} tokens, needed {batch} of at most {length} as input_ids has"
            )
        prefix = min(covered, length - 1)
        reused = self.common(target_cache, target_ids, prefix)
        # In a left-padded batch the first real token of every row must be exact, so the head reaches over the longest padding.
        padding = int((self.mask == 0).sum(-1).max()) if self.padded else 0
        head = min(max(reused, padding + exact_head if exact_head else 0), prefix)
        tail = max(head, prefix - exact_tail)
        pairs = [(keys[:, :, :tail], values[:, :, :tail]) for keys, values in pairs]
        mapper.check(pairs, self.positions[:, :tail])

        # Everything was checked; from here on the target's cache changes.
        cache = caches.new_cache(self.model) if target_cache is None else target_cache
        if target_cache is not None:
            caches.crop(cache, reused)
        self.run(cache, reused, head)
        begun = time.perf_counter()
        if tail > head:
            mapper.transfer(pairs, positions=self.positions[:, :tail], into=cache)
        self.seconds["transfer"] = time.perf_counter() - begun
        self.run(cache, tail, prefix)
        return self.result(cache, prefix, None, tail - head, reused)

    def common(self, target_cache: Any, target_ids: Tensor | None, prefix: int) -> int:
        """Tokens of the target's cache that are also the conversation's first ones."""
        if target_cache is None:
            return 0
        held = caches.cache_length(target_cache)
        if target_ids is None or target_ids.shape[0] != self.input_ids.shape[0] or target_ids.shape[1] < held:
            found = None if target_ids is None else tuple(target_ids.shape)
            raise MismatchError(f"target_ids: found {found}, needed the ids of all {held} tokens in target_cache")
        most = min(held, prefix)
        differs = (target_ids[:, :most].to(self.input_ids.device) != self.input_ids[:, :most]).any(0)
        return int(differs.int().argmax()) if bool(differs.any()) else most
