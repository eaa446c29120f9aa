"""What a step of the engine has to load and to save: decided where requests are scheduled, carried out where the cache is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvfit.vllm.addresses import AddressBook
from kvfit.vllm.options import ConnectorOptions, RequestOptions
from kvfit.vllm.store import Store


@dataclass
class Load:
    """A prompt's prefix to be mapped into the target's blocks.

    Attributes:
        request_id: whose it is.
        token_ids: of the prefix, n_tokens of them.
        addresses: of the stored blocks that cover it.
        block_ids: of the engine's blocks that it goes to; set once they are allocated.
        guide: address of where the source looks; None where no token is chosen by it.
        recompute: share of the prefix to run again, or ``auto``.
        exact_tokens: tokens to run again that the request names; None where the guide chooses.
        prompt_tokens: length of the whole prompt.
    """

    request_id: str
    token_ids: list[int]
    addresses: list[str]
    guide: str | None
    recompute: float | Literal["auto"]
    exact_tokens: frozenset[int] | None
    prompt_tokens: int
    block_ids: list[int] = field(default_factory=list)


@dataclass
class Save:
    """Whole blocks of a prompt that a step of the source engine completes.

    Attributes:
        addresses: one a stored block, "" where the store holds it already.
        block_ids: of the engine's blocks that hold them.
        guide: where to save where the source looks after the whole prompt; None while it is not read to its end.
        token_ids: the prompt, with `guide`.
        all_block_ids: of all of the prompt's blocks, with `guide`.
    """

    addresses: list[str]
    block_ids: list[int]
    guide: str | None = None
    token_ids: list[int] = field(default_factory=list)
    all_block_ids: list[int] = field(default_factory=list)


class Miss(Exception):
    """A request that the target prefills; `reason` is the word under which it is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class LoadPlanner:
    """Decides what of a prompt can be mapped.

    Attributes:
        book: addresses of the mapper's source.
        store: where to look.
        options: the connector's.
        engine_block: tokens of the target engine's blocks; a prefix ends where one ends.
        recompute: share to run again where neither request nor connector says.
    """

    book: AddressBook
    store: Store
    options: ConnectorOptions
    engine_block: int
    recompute: float

    def plan(self, request_id: str, token_ids: Sequence[int], tenant: str, wanted: RequestOptions) -> Load:
        """The load of one prompt, without the blocks that it goes to.

        Raises:
            Miss: ``opted_out``, ``short`` (no whole block before the tail), ``other_source`` (no engine of the mapper's source
                with this salt has used the store), ``missing`` (the prompt's first block is not there), ``no_guide``.
        """
        if not wanted.map:
            raise Miss("opted_out")
        length = len(token_ids)
        tail = self.options.exact_tail if wanted.exact_tail is None else wanted.exact_tail
        limit = length - max(1, tail)  # the last token is the engine's own in any case: its logits are what is asked for
        if wanted.max_mapped_tokens is not None:
            limit = min(limit, wanted.max_mapped_tokens)
        if limit < max(self.engine_block, self.book.block_tokens):
            raise Miss("short")
        addresses = self.book.blocks(token_ids[:limit], tenant)
        held = next((index for index, address in enumerate(addresses) if not self.store.has(address)), len(addresses))
        if held == 0:
            raise Miss("missing" if self.store.has(self.book.marker()) else "other_source")
        n_tokens = held * self.book.block_tokens // self.engine_block * self.engine_block
        if n_tokens == 0:
            raise Miss("missing")
        share = next(one for one in (wanted.recompute, self.options.recompute, self.recompute) if one is not None)
        guide = None
        if wanted.chosen is None and share != 0:
            guide = self.book.guide(token_ids, tenant)
            if not self.store.has(guide):
                raise Miss("no_guide")
        return Load(
            request_id=request_id,
            token_ids=list(token_ids[:n_tokens]),
            addresses=addresses[: math.ceil(n_tokens / self.book.block_tokens)],
            guide=guide,
            recompute=share,
            exact_tokens=wanted.chosen,
            prompt_tokens=length,
        )


@dataclass
class Reading:
    """A prompt that the source engine is reading.

    Attributes:
        token_ids: the prompt.
        addresses: of its whole blocks.
        guide: address of where the source looks after it; None where that is not saved.
        block_ids: the engine's blocks so far.
        n_saved: stored blocks that were saved or found.
    """

    token_ids: list[int]
    addresses: list[str]
    guide: str | None
    block_ids: list[int]
    n_saved: int = 0

    def save(self, computed: int, engine_block: int, block_tokens: int, store: Store) -> Save | None:
        """What to save once `computed` tokens have been run; None for nothing."""
        done = min(computed, len(self.token_ids)) // block_tokens
        fresh = range(self.n_saved, done)
        addresses = ["" if store.has(self.addresses[index]) else self.addresses[index] for index in fresh]
        start, stop = (index * block_tokens // engine_block for index in (self.n_saved, done))
        self.n_saved = max(done, self.n_saved)
        save = Save(addresses, self.block_ids[start:stop])
        if self.guide is not None and computed >= len(self.token_ids):
            if not store.has(self.guide):
                count = math.ceil(len(self.token_ids) / engine_block)
                save.guide, save.token_ids, save.all_block_ids = self.guide, self.token_ids, self.block_ids[:count]
            self.guide = None
        return save if any(addresses) or save.guide else None
