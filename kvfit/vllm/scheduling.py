"""The scheduler's half of the connector: it decides which requests load and which blocks are saved, and notes failures."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from kvfit.errors import OptionError
from kvfit.vllm.addresses import AddressBook
from kvfit.vllm.metrics import KvfitStats
from kvfit.vllm.options import request_options
from kvfit.vllm.plans import Load, LoadPlanner, Miss, Reading, Save
from kvfit.vllm.store import Store

_log = logging.getLogger("kvfit")


def plain_prompt(request: Any) -> bool:
    """Whether a request's keys and values follow from its token ids alone: no adapter, no images, no embeddings."""
    embedded = request.prompt_embeds is not None or request.prompt_token_ids is None
    return not embedded and request.lora_request is None and not request.mm_features


class LoadScheduling:
    """For role target: decides which requests start from mapped keys and values.

    Attributes:
        stats: counts of requests that are prefilled.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        """Decide with `planner`."""
        self._planner = planner
        self._plans: dict[str, Load | Miss] = {}
        self._due: list[Load] = []
        self._logged: set[str] = set()
        self.stats = KvfitStats()

    def matched(self, request: Any, computed: int) -> int:
        """The number of tokens that can be loaded; vLLM asks again for a request that waits or was preempted."""
        known = self._plans.get(request.request_id)
        if known is None:
            known = self._plans[request.request_id] = self._plan(request)
        return 0 if isinstance(known, Miss) or computed else len(known.token_ids)

    def _plan(self, request: Any) -> Load | Miss:
        try:
            wanted = request_options(request.kv_transfer_params)
            if not plain_prompt(request):
                raise Miss("not_text")
            if request.skip_reading_prefix_cache:  # vLLM asks all the same, drops the answer and runs every token
                raise Miss("whole_prompt")
            return self._planner.plan(request.request_id, request.prompt_token_ids, request.cache_salt or "", wanted)
        except Miss as miss:
            self._miss(miss.reason)
            return miss
        except OptionError as error:
            _log.warning("request %s: %s; it is prefilled", request.request_id, error)
            self._miss("bad_parameters")
            return Miss("bad_parameters")

    def _miss(self, reason: str) -> None:
        self.stats.fall_back(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.info("a request is prefilled: %s (said once; see the counters)", reason)

    def allocated(self, request: Any, block_ids: list[int], n_tokens: int) -> None:
        """Note the blocks that were allocated for a request, of which the first `n_tokens` tokens are to be loaded."""
        plan = self._plans.get(request.request_id)
        if isinstance(plan, Load):
            # Without blocks nothing is loaded: vLLM has not taken the tokens that it was offered.
            plan = dataclasses.replace(plan, block_ids=block_ids[: n_tokens // self._planner.engine_block])
            self._plans[request.request_id] = plan
            if plan.block_ids:
                self._due.append(plan)

    def take_due(self) -> list[Load]:
        """The loads of this step."""
        due, self._due = self._due, []
        return due

    def failed(self, failures: dict[str, str]) -> None:
        """Note the requests that the worker could not load, with the reasons, which the worker has counted."""
        for request_id, reason in failures.items():
            if request_id in self._plans:  # a request that was aborted meanwhile is forgotten already
                self._plans[request_id] = Miss(reason)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; return what to tell the client: what has happened, whatever was planned."""
        plan = self._plans.pop(request.request_id, None)
        if plan is None:
            return None
        if isinstance(plan, Load) and not plan.block_ids:
            plan = Miss("not_taken")
            self._miss(plan.reason)
        if isinstance(plan, Miss):
            return {"kvfit": {"status": "fallback_prefill", "reason": plan.reason, "mapped_tokens": 0}}
        return {"kvfit": {"status": "applied", "reason": None, "mapped_tokens": len(plan.token_ids)}}


class SaveScheduling:
    """For role source: decides which blocks to save after a step.

    Attributes:
        stats: always empty.
    """

    def __init__(self, book: AddressBook, store: Store, engine_block: int, guide: bool) -> None:
        """Save to `store` under the addresses of `book`, with a guide where `guide` is True."""
        self._book, self._store, self._engine_block, self._guide = book, store, engine_block, guide
        self._readings: dict[str, Reading] = {}
        self.stats = KvfitStats()

    def begin(self, request: Any) -> None:
        """Note a request that has arrived."""
        if not plain_prompt(request):
            return
        try:
            if not request_options(request.kv_transfer_params).map:
                return
        except OptionError as error:
            _log.warning("request %s: %s; it is saved anyway", request.request_id, error)
        token_ids, tenant = list(request.prompt_token_ids), request.cache_salt or ""
        addresses = self._book.blocks(token_ids, tenant)
        if addresses:
            guide = self._book.guide(token_ids, tenant) if self._guide else None
            self._readings[request.request_id] = Reading(token_ids, addresses, guide, [])

    def take_due(self, scheduler_output: Any) -> list[Save]:
        """Plan the saves of the blocks that this step completes."""
        saves = []
        for request_id, fresh, resumed, computed in _scheduled(scheduler_output):
            reading = self._readings.get(request_id)
            if reading is None:
                continue
            reading.block_ids = fresh if resumed else reading.block_ids + fresh
            computed += scheduler_output.num_scheduled_tokens[request_id]
            save = reading.save(computed, self._engine_block, self._book.block_tokens, self._store)
            if save is not None:
                saves.append(save)
        return saves

    def finished(self, request: Any) -> None:
        """Forget a request."""
        self._readings.pop(request.request_id, None)


def _scheduled(output: Any) -> Iterator[tuple[str, list[int], bool, int]]:
    """(request, new blocks, whether they replace the earlier ones, tokens computed before) for each request of a step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, list(new.block_ids[0]), True, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        fresh = [] if blocks is None else list(blocks[0])
        yield request_id, fresh, request_id in cached.resumed_req_ids, cached.num_computed_tokens[index]
