"""`handoff`: move a conversation from the source to the target. `kvfit.runtime.mover` does the work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.errors import KvfitError, MismatchError
from kvfit.model.cache import cache_length
from kvfit.model.decoder import unwrapped
from kvfit.model.generate import generate
from kvfit.model.identity import require_model
from kvfit.runtime import EXACT_HEAD
from kvfit.runtime.checks import check_source_ids
from kvfit.runtime.mapper import Mapper
from kvfit.runtime.mover import Filled, Mover
from kvfit.runtime.request import Wanted, checked_ids, checked_mask


@dataclass(frozen=True, repr=False)
class Handoff:
    """A conversation that the target can continue.

    Attributes:
        cache: the target's cache of the whole conversation except `remaining_ids`.
        input_ids: (B, S), the whole conversation.
        remaining_ids: (B, m), m >= 1, the ids that the target still has to run.
        status: ``applied``, or ``fallback_prefill`` if the target prefilled instead.
        reason: why it fell back; None if it did not.
        n_mapped: tokens per sequence that were mapped.
        n_exact: tokens per sequence that the target ran here, head and tail together.
        n_reused: tokens per sequence that the target's cache already held.
        recomputed: (B, C), indices of the mapped tokens that the target ran again in the mapped context, this turn's and those
            that `target_cache` held; None if there are none. Tokens that the target runs anyway are not among them. A row with
            fewer than the longest row repeats one of its own, or its first where it has none.
        target_model: the target that `generate` runs.
        attention_mask: (B, S), 0 on padding.
        seconds: wall time of each part (``guide``, ``transfer``, ``exact``, ``recompute``, ``prefill``) on the host. A device
            may still be busy when it ends.
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
        of_them = "" if self.n_reused else "of them "  # else held tokens may be among them
        recomputed = "" if self.recomputed is None else f", {self.recomputed.shape[1]} {of_them}run again"
        reason = "" if self.reason is None else f", reason: {self.reason}"
        return (
            f"Handoff({self.status}: {batch} x {length} tokens: {self.n_reused} reused, {self.n_mapped} mapped{recomputed}, "
            f"{self.n_exact} exact, {self.remaining_ids.shape[1]} left to run{reason})"
        )

    def generate(self, **kwargs: Any) -> Any:
        """Continue the conversation with the target's own ``generate``, on the moved cache.

        It works on every version of transformers, for greedy search, sampling, beams, several sequences and assisted decoding;
        see `kvfit.model.generate.generate`. The cache grows while it is used, so this can be called only once.

        Args:
            **kwargs: arguments of ``target_model.generate``: ``max_new_tokens``, ``do_sample``, ``num_beams``, ...

        Returns:
            The result of ``generate``: the conversation and the new tokens, (B, S + new), or its output object.

        Raises:
            MismatchError: the cache holds the whole conversation, because this was called before, or fewer tokens than this
                handoff left in it, because another handoff has taken it; or an argument asks for another cache.
        """
        if "attention_mask" in kwargs:
            raise MismatchError("attention_mask: found a value, needed none, because the handoff keeps its own: drop it")
        held, left = cache_length(self.cache), self.input_ids.shape[1] - self.remaining_ids.shape[1]
        if held < left:
            raise MismatchError(
                f"cache: found {held} tokens, needed the {left} that this handoff left in it: another handoff (target_cache=) "
                "or beam search has changed it since; keep a copy where a conversation branches"
            )
        return generate(self.target_model, self.input_ids, self.cache, attention_mask=self.attention_mask, **kwargs)


@torch.no_grad()
def handoff(
    mapper: Mapper,
    target_model: Any,
    input_ids: Tensor,
    source_cache: Any,
    *,
    source_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    exact_head: int = EXACT_HEAD,
    exact_tail: int = 0,
    recompute: float | Literal["auto"] = 0.0,
    guide: Any = None,
    exact_tokens: Tensor | Sequence[int] | None = None,
    target_cache: Any = None,
    target_ids: Tensor | None = None,
    on_error: Literal["raise", "prefill"] = "raise",
) -> Handoff:
    """Move a conversation that the source has read to the target.

    Every part of the target's cache is checked once, for its length and for NaN and infinity, which would spread to every
    logit. The check waits for the device a few times.

    The source's cache must have been made from exactly these ids. After beam search or after an edit of the text, a cache holds
    other tokens in some rows. Its positions must follow from the mask, with 0 for the first real token of each row: for a
    left-padded batch, ``forward`` of transformers needs ``position_ids``, which only ``generate`` computes by itself. Wrong
    tokens and wrong positions are refused if the source is known: up to 32 tokens per row are compared after
    ``mapper.bind(source, target)``, up to 1,024 if the source is the `guide`. If the source runs elsewhere, pass `source_ids`:
    all tokens are compared then, but not their positions.

    Args:
        mapper: the mapper from the source to the target.
        target_model: the loaded target. Its first use checks that it is the model that the mapper was fitted on.
        input_ids: (B, S), the whole conversation in ids of the target, on any device. The source's cache covers its first T
            tokens, T <= S.
        source_cache: the source's cache; it is not changed.
        source_ids: (B, T), the ids that the source's cache was filled with, one per token. All but padding are compared with
            `input_ids`. The result of ``generate`` has one token more than its cache.
        attention_mask: (B, S), for left-padded batches: 0 on padding. All ones by default, with a warning if some rows begin
            with the target's padding token.
        exact_head: number of first tokens that the target runs itself. Often one of them draws attention as the very first
            does, and maps miss it. If no more tokens than these are moved, nothing is mapped.
        exact_tail: number of last tokens of the moved prefix that the target runs itself.
        recompute: share of each row's mapped tokens, 0 to 1, that the target runs again: those that `guide` attends to (see
            `kvfit.runtime.recompute`). It is rounded up, and counts a row's first token as mapped and with a `target_cache` all
            that it holds. It costs this share of a prefill and restores exact content where the question needs it. ``auto``
            chooses the share from the guide's attention. A share below that of the mapper's evaluation warns once.
        guide: the loaded source; `recompute` needs it.
        exact_tokens: tokens to run again, instead of `recompute`: indices into the conversation, (C,) or (B, C), not a mask.
            A row with fewer tokens than the longest row repeats some. Padding and tokens outside the mapped part are ignored:
            the target runs those of the head and the tail anyway.
        target_cache: a cache of the target from an earlier turn. The longest common prefix of `target_ids` and `input_ids` is
            kept, everything after it is cropped off, and only newer tokens are mapped. It is changed in place and becomes the
            result's cache; only if tokens are run again in a target with windows, the result gets a new cache.
        target_ids: (B, n), the ids that `target_cache` was made from; needed with `target_cache`. Up to 32 of the kept tokens
            per row are compared with layer 0 of the cache. They are believed where a target's layer 0 depends on more than the
            token, and beyond the source's cache if the mapper has no lexical inputs, because such a token may have been mapped.
        on_error: ``raise``, or ``prefill`` to let the target prefill after any error and to report that in the result. The
            prefill still reuses what `target_cache` holds of the conversation, mapped tokens included, unless the error was in
            the target or that cache. Ids, a mask or a target with which a prefill is impossible raise in both cases.

    Returns:
        The cache, the ids still to run, and what was done. Continue with ``moved.generate(max_new_tokens=...)``.

    Raises:
        MismatchError: the target or the guide is not the model that the mapper was fitted on, or ids, mask and caches do not
            fit each other, or the target would have to run the placeholder of an image. `target_cache` is then unchanged, or
            cropped to the tokens that it shares with the conversation.
        UnsupportedModelError: a model's attention kernel cannot do what `recompute` or `exact_tokens` needs, or the target does
            not fill its cache.
    """
    if on_error not in ("raise", "prefill"):
        raise MismatchError(f"on_error: found {on_error!r}, needed 'raise' or 'prefill'")
    require_model(target_model, "target_model")
    input_ids = checked_ids(target_model, input_ids)
    mask = checked_mask(input_ids, attention_mask)
    if attention_mask is None and len(input_ids) > 1:
        _warn_of_padding(target_model, input_ids)
    mover = Mover(target_model, input_ids, mask)
    if isinstance(mapper, Mapper) and isinstance(recompute, int | float) and exact_tokens is None:
        _warn_of_less(mapper, recompute)
    reason = None
    try:
        wanted = Wanted(exact_head, exact_tail, recompute, guide, exact_tokens)
        if source_ids is not None:
            check_source_ids(source_ids, source_cache, input_ids, mask)
        filled = mover.move(mapper, source_cache, wanted, target_cache, target_ids)
    except Exception as error:
        if on_error == "raise":
            raise
        reason = str(error) if isinstance(error, KvfitError) else f"{type(error).__name__}: {error}"
    if reason is not None:  # not in the handler, where the error would keep the memory of the attempt alive
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


def _warn_of_padding(target_model: Any, input_ids: Tensor) -> None:
    """A batch of several lengths without its mask: padding would be read as text, and shift all that follows it."""
    settings = getattr(unwrapped(target_model), "generation_config", None)
    padding = getattr(settings, "pad_token_id", None)
    if not isinstance(padding, int) or padding == getattr(settings, "bos_token_id", None):
        return
    begins = input_ids[:, 0] == padding
    if bool(begins.any() & ~begins.all()):
        warnings.warn(
            f"input_ids: found {int(begins.sum())} of {len(begins)} rows that begin with token {padding}, which the target "
            "pads with, and no attention_mask: pass the one that the tokenizer gave",
            stacklevel=4,  # handoff and torch's no_grad are between this and the caller
        )


def _warn_of_less(mapper: Mapper, recompute: float) -> None:
    """Warn if less is recomputed than in the evaluation: recall may be lost, and nothing else would show it."""
    if recompute < mapper.judged_recompute:
        warnings.warn(
            f"mapper {mapper.spec.source.ref} -> {mapper.spec.target.ref}: found recompute={recompute:g}, needed "
            f"{mapper.judged_recompute:g}, the share at which it was evaluated as {mapper.verdict}: pass recompute="
            f"{mapper.judged_recompute:g} and guide=, or evaluate the mapper without it",
            stacklevel=4,  # handoff and torch's no_grad are between this function and the caller
        )
