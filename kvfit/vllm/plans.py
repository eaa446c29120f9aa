"""Decide what a step of the engine has to load and to save.

The scheduler's half makes these plans, and the worker, which has the cache, carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvfit.runtime.choice import choose
from kvfit.vllm.addresses import AddressBook
from kvfit.vllm.options import ConnectorOptions, RequestOptions
from kvfit.vllm.store import Store


@dataclass
class Load:
    """A plan to map a prompt's prefix into the target's blocks.

    Attributes:
        request_id: the request whose prompt it is.
        token_ids: the prefix.
        addresses: the addresses of the stored blocks that cover it.
        block_ids: the engine's blocks to write; set once they are allocated.
        guide: the address of the record of where the source looks; None where no token is chosen by it.
        recompute: the share of the prefix behind the exact head to run again, or ``auto``.
        exact_tokens: the tokens to run again that the request names; None where the guide chooses.
        prompt_tokens: the length of the whole prompt.
    """

    request_id: str
    token_ids: list[int]
    addresses: list[str]
    guide: str | None
    recompute: float | Literal["auto"]
    exact_tokens: frozenset[int] | None
    prompt_tokens: int
    block_ids: list[int] = field(default_factory=list)

    def run_again(self, exact_head: int, guide: Tensor | None) -> list[int]:
        """The mapped tokens that the engine runs again: the prompt's head, and those behind it that matter most.

        Args:
            exact_head: how many first tokens the engine runs in any case.
            guide: (S - 1,), the source's attention weight on each token of the prompt but the last; None where it chooses none.

        Returns:
            The tokens, ascending; those of the guide are what `handoff` chooses.
        """
        n_tokens = len(self.token_ids)
        head = min(exact_head, n_tokens)
        chosen: set[int] = set()
        if self.exact_tokens is not None:
            chosen = {token for token in self.exact_tokens if token < n_tokens}
        elif guide is not None and head < n_tokens:
            numbers = torch.arange(n_tokens)[None]
            chosen = set(choose(guide[None, :n_tokens], numbers >= head, self.recompute, numbers == 0)[0].tolist())
        return sorted(chosen | set(range(head)))


@dataclass
class Save:
    """A plan to save the blocks of a prompt that a step of the source engine completes.

    Attributes:
        addresses: the address of each stored block; "" where the store has the block already.
        block_ids: the engine's blocks that hold them.
        guide: the address for the record of where the source looks after the whole prompt; None until it has read all of it.
        token_ids: the prompt; set with `guide`.
        all_block_ids: the engine's blocks that hold the whole prompt; set with `guide`.
    """

    addresses: list[str]
    block_ids: list[int]
    guide: str | None = None
    token_ids: list[int] = field(default_factory=list)
    all_block_ids: list[int] = field(default_factory=list)


class Miss(Exception):
    """The target has to prefill a request; `reason` is the name under which it is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class LoadPlanner:
    """Decides how much of a prompt can be mapped.

    Attributes:
        book: the addresses of the mapper's source.
        store: the store with the blocks.
        options: the connector's options.
        engine_block: the number of tokens in the target engine's blocks; a mapped prefix ends where such a block ends.
        recompute: the share to run again where neither the request nor the connector sets one.
    """

    book: AddressBook
    store: Store
    options: ConnectorOptions
    engine_block: int
    recompute: float

    def plan(self, request_id: str, token_ids: Sequence[int], tenant: str, wanted: RequestOptions) -> Load:
        """Plan the load of one prompt; the engine's blocks are set later.

        Raises:
            Miss: with the reason ``opted_out``, ``short`` (no whole block of the prompt has a token between head and tail),
                ``other_source`` (no engine that runs the mapper's source with this salt has used the store), ``missing`` (the
                store lacks the prompt's first blocks) or ``no_guide`` (it lacks the record of where the source looks).
        """
        if not wanted.map:
            raise Miss("opted_out")
        length = len(token_ids)
        tail = self.options.exact_tail if wanted.exact_tail is None else wanted.exact_tail
        limit = length - max(1, tail)  # the engine always runs the last token, whose logits give the first token of the answer
        if wanted.max_mapped_tokens is not None:
            limit = min(limit, wanted.max_mapped_tokens)
        # If the target ran every mapped token again, a prefill would do the same without a load.
        if self._whole(limit // self.book.block_tokens) <= self.options.exact_head:
            raise Miss("short")
        addresses = self.book.blocks(token_ids[:limit], tenant)
        held = next((index for index, address in enumerate(addresses) if not self.store.has(address)), len(addresses))
        if held == 0:
            raise Miss("missing" if self.store.has(self.book.marker()) else "other_source")
        n_tokens = self._whole(held)
        if n_tokens <= self.options.exact_head:
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

    def _whole(self, n_blocks: int) -> int:
        """The tokens of the first stored blocks, up to the end of one of the engine's own."""
        return n_blocks * self.book.block_tokens // self.engine_block * self.engine_block


@dataclass
class Reading:
    """A prompt that the source engine is reading.

    Attributes:
        token_ids: the prompt.
        addresses: the addresses of its whole blocks.
        guide: the address for the record of where the source looks; None where that is not saved, or is saved already.
        block_ids: the engine's blocks that have been allocated for it.
        n_saved: how many of its blocks are in the store.
    """

    token_ids: list[int]
    addresses: list[str]
    guide: str | None
    block_ids: list[int]
    n_saved: int = 0

    def save(self, computed: int, engine_block: int, block_tokens: int, store: Store) -> Save | None:
        """Plan what to save once `computed` tokens have been run; None where there is nothing to save."""
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
