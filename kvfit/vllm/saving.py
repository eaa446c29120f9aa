"""The worker's half on the source: save the engine's blocks to the store, and the record of where the source looks."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from kvfit.vllm.engine import Engine
from kvfit.vllm.entries import pack
from kvfit.vllm.looking import looks
from kvfit.vllm.metrics import KvfitStats
from kvfit.vllm.plans import Save
from kvfit.vllm.store import Store

_log = logging.getLogger("kvfit")


class Saver:
    """Carries out saves in a worker.

    Attributes:
        stats: counts of what was saved.
    """

    def __init__(self, engine: Engine, store: Store, block_tokens: int) -> None:
        """Save blocks of `block_tokens` tokens."""
        self._engine, self._store, self._block_tokens = engine, store, block_tokens
        self._logged = False
        self.stats = KvfitStats()

    @torch.inference_mode()
    def save(self, plan: Save, content: str) -> None:
        """Save the blocks that a step has completed. An error is logged once and never stops the engine."""
        start = time.perf_counter()
        try:
            self._save(plan, content)
        except Exception as error:
            self.stats.count("unsaved_blocks", len(plan.addresses))
            if not self._logged:
                self._logged = True
                _log.warning("blocks were not saved: %s (said once; see the counters)", error)
        self.stats.count("save_milliseconds", 1000 * (time.perf_counter() - start))

    def _save(self, plan: Save, content: str) -> None:
        per_address = len(plan.block_ids) // max(1, len(plan.addresses))  # engine blocks in a stored block
        for index, address in enumerate(plan.addresses):
            if address:
                states = self._engine.read(plan.block_ids[index * per_address : (index + 1) * per_address])
                self._put(address, states, content)
        if plan.guide is not None:
            self._put(plan.guide, looks(self._engine, plan.token_ids, plan.all_block_ids), content)

    def _put(self, address: str, states: Tensor, content: str) -> None:
        data = pack(states.cpu(), content, address)
        if self._store.put(address, data):
            self.stats.count("saved_blocks")
            self.stats.count("saved_bytes", len(data))
        else:
            self.stats.count("unsaved_blocks")
