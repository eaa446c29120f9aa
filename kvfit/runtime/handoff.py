"""`handoff`: a conversation moved from the source to the target; `kvfit.runtime.mover` does the work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import KvfitError, MismatchError
from kvfit.model.generate import generate
from kvfit.model.identity import require_model
from kvfit.runtime.mapper import Mapper
from kvfit.runtime.mover import Filled, Mover
from kvfit.runtime.request import Wanted, checked_ids, checked_mask


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
        target_model: the target that `generate` runs.
        attention_mask: (B, S), 0 on padding, as given or all ones.
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
    target_model: Any = None
    attention_mask: Tensor | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        batch, length = self.input_ids.shape
        recomputed = "" if self.recomputed is None else f", {self.recomputed.shape[1]} of them run once more"
        reason = "" if self.reason is None else f", reason: {self.reason}"
        return (
            f"Handoff({self.status}: {batch} x {length} tokens: {self.n_reused} reused, {self.n_mapped} mapped{recomputed}, "
            f"{self.n_exact} exact, {self.remaining_ids.shape[1]} left to run{reason})"
        )

    def generate(self, **kwargs: Any) -> Any:
        """Continue the conversation with the target: what its own ``generate`` gives, on the moved cache.

        It works on every version of transformers, for greedy search, sampling, beams, several sequences and assisted decoding;
        see `kvfit.model.generate.generate`. The cache grows as it is used, so this can be called once.

        Args:
            **kwargs: for ``target_model.generate``: ``max_new_tokens``, ``do_sample``, ``num_beams``, ...

        Returns:
            What ``generate`` returns: the conversation and the new tokens, (B, S + new), or its output object.

        Raises:
            MismatchError: the cache holds the whole conversation, because it was used already, or an argument asks for another
                cache.
        """
        if "attention_mask" in kwargs:
            raise MismatchError("attention_mask: found a value, needed none, because the handoff keeps its own: drop it")
        return generate(self.target_model, self.input_ids, self.cache, attention_mask=self.attention_mask, **kwargs)


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
    recompute: float | Literal["auto"] = 0.0,
    guide: Any = None,
    exact_tokens: Tensor | Sequence[int] | None = None,
    target_cache: Any = None,
    target_ids: Tensor | None = None,
    on_error: Literal["raise", "prefill"] = "raise",
) -> Handoff:
    """Give the target a conversation that the source has read.

    Every part of the target's cache is looked at once: its length, and NaN and infinity, which would spread over every logit.
    This waits for the device a few times, and took 0.3 to 0.8 of 14 ms for 1,024 tokens of the demo pair on a CPU.

    The source's cache must be of these very ids. A cache that beam search has left, or one of an edited text, holds other
    tokens in some rows. Its positions must be those of the mask, 0 for the first real token of each row: a forward pass of
    transformers over a left-padded batch needs ``position_ids``, which only its ``generate`` makes by itself. Both are refused
    where the source is at hand: up to 32 tokens of each row are compared where it was bound (``mapper.bind(source, target)``),
    up to 1,024 where it is the `guide`. Without it they cannot be told.

    Args:
        mapper: from the source to the target.
        target_model: the loaded target; that it is the one the mapper was fitted on is checked at first use.
        input_ids: (B, S), the whole conversation in ids of the target, on any device. The source's cache covers its first T
            tokens, T <= S.
        source_cache: the source's cache; never changed.
        attention_mask: (B, S), for left-padded batches: 0 on padding. Default all ones.
        exact_head: first tokens that the target runs itself.
        exact_tail: last tokens of the moved prefix that the target runs itself.
        recompute: share of the moved prefix, 0 to 1, that the target runs once more: the tokens that `guide` looks at (see
            `kvfit.runtime.recompute`). It costs this share of a prefill and gives back exact content where the question
            looks. ``auto`` takes as many as the guide's attention asks for. Less than the mapper was judged with warns, once.
        guide: the loaded source, needed with `recompute`.
        exact_tokens: instead of `recompute`: which tokens to run once more, indices into the conversation, (C,) or (B, C); no
            mask. A row that names fewer tokens than the longest repeats some. Tokens beyond the mapped part are exact anyway.
        target_cache: a cache of the target from an earlier turn. What it holds beyond the longest common prefix of `target_ids`
            and `input_ids` is cropped off; what is common is kept, and only newer tokens are mapped. It is changed and becomes
            the result's cache, unless tokens are run once more in a target with windows: that makes a new one.
        target_ids: (B, n), the ids that `target_cache` was made from; needed with it.
        on_error: ``raise``, or ``prefill``: whatever goes wrong, let the target prefill and say so in the result. What
            `target_cache` holds of the conversation is kept then too, mapped tokens included, unless target or cache were what
            went wrong. Ids, a mask or a target that no prefill could use raise an error in both cases.

    Returns:
        The cache, the ids still to run, and what was done. Continue with ``moved.generate(max_new_tokens=...)``.

    Raises:
        MismatchError: the target or the guide is not the mapper's, or ids, mask and caches do not fit each other, or the target
            would have to run an image's placeholder. `target_cache` then holds what it held, or the tokens that it shares with
            the conversation where it had been cropped to them before something went wrong.
        UnsupportedModelError: a model's attention kernel cannot do what `recompute` or `exact_tokens` needs, or the target does
            not fill its cache.
    """
    if on_error not in ("raise", "prefill"):
        raise MismatchError(f"on_error: found {on_error!r}, needed 'raise' or 'prefill'")
    require_model(target_model, "target_model")
    input_ids = checked_ids(target_model, input_ids)
    mask = checked_mask(input_ids, attention_mask)
    mover = Mover(target_model, input_ids, mask)
    if isinstance(mapper, Mapper) and isinstance(recompute, int | float) and exact_tokens is None:
        _warn_of_less(mapper, recompute)
    reason = None
    try:
        wanted = Wanted(exact_head, exact_tail, recompute, guide, exact_tokens)
        filled = mover.move(mapper, source_cache, wanted, target_cache, target_ids)
    except Exception as error:
        if on_error == "raise":
            raise
        reason = str(error) if isinstance(error, KvfitError) else f"{type(error).__name__}: {error}"
    if reason is not None:  # outside the handler, whose error would keep all that the attempt has allocated alive
        filled = mover.prefill()
    return _handoff(mover, filled, reason)


def _handoff(mover: Mover, filled: Filled, reason: str | None) -> Handoff:
    return Handoff(
        cache=filled.cache,
        input_ids=mover.input_ids,
        remaining_ids=mover.input_ids[:, filled.n_reused + filled.n_exact + filled.n_mapped :],
        status="applied" if reason is None else "fallback_prefill",
        reason=reason,
        n_mapped=filled.n_mapped,
        n_exact=filled.n_exact,
        n_reused=filled.n_reused,
        recomputed=filled.recomputed,
        target_model=mover.model,
        attention_mask=mover.mask,
        seconds=mover.seconds,
    )


def _warn_of_less(mapper: Mapper, recompute: float) -> None:
    """A verdict speaks of the handoff that was judged: with less recomputed, recall may be gone and nothing else show it."""
    if recompute < mapper.judged_recompute:
        warnings.warn(
            f"mapper {mapper.spec.source.ref} -> {mapper.spec.target.ref}: found recompute={recompute:g}, needed "
            f"{mapper.judged_recompute:g} as its verdict {mapper.verdict} was found with: pass recompute="
            f"{mapper.judged_recompute:g} and guide=, or evaluate without",
            stacklevel=4,  # handoff and torch's no_grad are between this and the caller
        )
