"""The worker's half on the target: read and map blocks, write them into the engine's cache, and run chosen tokens again."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from kvfit.errors import KvfitError
from kvfit.runtime.mapper import Mapper
from kvfit.vllm.engine import Engine
from kvfit.vllm.entries import EntryError, unpack
from kvfit.vllm.metrics import KvfitStats
from kvfit.vllm.options import ConnectorOptions
from kvfit.vllm.plans import Load
from kvfit.vllm.store import Store

_log = logging.getLogger("kvfit")


class Loader:
    """Carries out loads in a worker.

    Attributes:
        stats: counts of loads that succeeded and that failed.
    """

    def __init__(self, mapper: Mapper, engine: Engine, store: Store, content: str | None, options: ConnectorOptions) -> None:
        """Accept entries of a source whose weights have the digest `content`, or of any source where it is None."""
        self._mapper = mapper.to(engine.device, engine.dtype)
        self._engine, self._store, self._content, self._options = engine, store, content, options
        self._logged: set[str] = set()
        self.stats = KvfitStats()

    @torch.inference_mode()
    def load(self, plan: Load) -> str | None:
        """Fill a prompt's blocks; return None, or the reason of any failure.

        After a failure the blocks hold anything, and the engine must be told to compute them.
        """
        start = time.perf_counter()
        try:
            recomputed = self._load(plan, start + self._options.timeout_seconds)
        except EntryError as error:
            return self._failed(error.reason, error)
        except KvfitError as error:
            return self._failed("mismatch", error)
        except Exception as error:  # an engine that serves must survive any error here: it can prefill instead
            return self._failed("error", error)
        self.stats.count("applied")
        self.stats.count("mapped_tokens", len(plan.token_ids))
        self.stats.count("recomputed_tokens", recomputed)
        self.stats.count("load_milliseconds", 1000 * (time.perf_counter() - start))
        return None

    def _failed(self, reason: str, error: Exception) -> str:
        self.stats.fall_back(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("a request is prefilled: %s, %s (said once; see the counters)", reason, error)
        return reason

    def _load(self, plan: Load, deadline: float) -> int:
        """Fill the blocks; return the number of tokens that were run again."""
        blocks = [self._get(address, deadline) for address in plan.addresses]
        guide = None if plan.guide is None else self._get(plan.guide, deadline)
        n_tokens = len(plan.token_ids)
        source = self._mapper.spec.source
        for states in blocks:
            if states.dim() != 5 or (*states.shape[:3], states.shape[4]) != (
                source.n_layers,
                2,
                source.n_heads,
                source.head_dim,
            ):
                raise EntryError("mismatch", f"found a block of shape {tuple(states.shape)}, needed one of {source.ref}")
        states = torch.cat(blocks, 3)[:, :, :, :n_tokens].to(self._engine.device)  # (L, 2, H, T, D)
        if states.shape[3] != n_tokens:
            raise EntryError("mismatch", f"found {states.shape[3]} tokens in the store's blocks, needed {n_tokens}")
        if guide is not None and guide.shape != (plan.prompt_tokens - 1,):
            raise EntryError("mismatch", f"found a guide of {tuple(guide.shape)}, needed {plan.prompt_tokens - 1} tokens")
        tokens = plan.run_again(self._options.exact_head, guide)
        pairs = [(layer[0][None], layer[1][None]) for layer in states]
        first_layer = self._engine.first_layer(plan.token_ids) if self._mapper.spec.lexical_lags else None
        for layer_index, (keys, values) in enumerate(self._mapper.stream_layers(pairs, first_layer=first_layer)):
            if not (bool(keys.isfinite().all()) and bool(values.isfinite().all())):
                raise EntryError("nonfinite", f"found NaN or infinity in mapped layer {layer_index}, needed finite numbers")
            self._engine.write(layer_index, plan.block_ids, keys[0], values[0])
        self._check_time(deadline)
        self._engine.run(plan.token_ids, tokens, plan.block_ids)
        return len(tokens)

    def _get(self, address: str, deadline: float) -> Tensor:
        data = self._store.get(address)
        self._check_time(deadline)
        if data is None:
            raise EntryError("evicted", "found no entry any more that was there when the request was scheduled")
        self.stats.count("loaded_bytes", len(data))
        entry = unpack(data)
        if entry.address != address or self._content not in (None, entry.content):
            raise EntryError("mismatch", "found an entry of another source or address, needed the one that was asked for")
        age, oldest = time.time() - entry.written, self._options.max_age_seconds
        if oldest is not None and age > oldest:
            raise EntryError("stale", f"found an entry of {age:.0f} s, needed one of at most {oldest:.0f}")
        return entry.states

    def _check_time(self, deadline: float) -> None:
        if time.perf_counter() > deadline:
            raise EntryError("slow", f"found a load that takes longer than {self._options.timeout_seconds} s")
