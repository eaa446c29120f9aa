"""`KvfitConnector`, the class that vLLM loads: it passes vLLM's calls on to the scheduler's and the worker's half.

vLLM makes one connector beside the scheduler and one in every worker. The one beside the scheduler decides from token ids
alone. Its decisions travel to the worker with each step, and the worker's failures travel back with the step's result.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvfit.hub.load import load_mapper
from kvfit.vllm.addresses import AddressBook, SourceIdentity
from kvfit.vllm.checkpoint import check_engine, engine_identity
from kvfit.vllm.engine import Engine
from kvfit.vllm.loading import Loader
from kvfit.vllm.metrics import KvfitPromMetrics, KvfitStats
from kvfit.vllm.options import connector_options
from kvfit.vllm.plans import Load, LoadPlanner, Save
from kvfit.vllm.requirements import check_configuration, check_mapper
from kvfit.vllm.saving import Saver
from kvfit.vllm.scheduling import LoadScheduling, SaveScheduling
from kvfit.vllm.store import open_store

_log = logging.getLogger("kvfit")


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What one step of the engine has to load and to save."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    content: str = ""


@dataclass
class StepResult(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The requests whose load failed, each with the reason."""

    failures: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResult:
        """The failures of both workers."""
        assert isinstance(other, StepResult)
        return StepResult({**self.failures, **other.failures})


class KvfitConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Lets a target engine start from what a source engine has read; see docs/guides/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Check the engine and open mapper and store.

        Raises:
            OptionError: the configuration names an unknown option or an impossible value.
            UnsupportedModelError: the engine is set up in a way that the connector cannot verify; the message says what to
                change.
            MismatchError: the engine does not run the mapper's target.
            GateError: the mapper's verdict is ``fail``.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = self._options = connector_options(transfer.kv_connector_extra_config)
        check_configuration(vllm_config, kv_cache_config, options)
        # A miss is never an error here: the engine computes the blocks that could not be loaded.
        transfer.kv_load_failure_policy = "recompute"
        self._store = open_store(options.store, options.max_store_bytes, options.store_options)
        self._mapper = None
        if options.mapper is not None:
            self._mapper = load_mapper(options.mapper, require=options.require)
            check_mapper(self._mapper.spec)
        self._scheduling: LoadScheduling | SaveScheduling | None = None
        self._worker: Loader | Saver | None = None
        self._failures: dict[str, str] = {}
        self._invalid_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduling = self._make_scheduling(vllm_config, kv_cache_config)

    def _make_scheduling(self, vllm_config: Any, kv_cache_config: Any) -> LoadScheduling | SaveScheduling:
        options = self._options
        block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if options.role == "target":
            mapper = self._mapper
            assert mapper is not None
            check_engine(mapper.spec.target, vllm_config.model_config, weights=options.check_weights)
            book = AddressBook(SourceIdentity.of(mapper.spec.source).sampled, options.block_tokens, options.salt)
            return LoadScheduling(LoadPlanner(book, self._store, options, block, mapper.judged_recompute))
        identity = engine_identity(vllm_config.model_config)
        self._content = identity.content or ""
        book = AddressBook(identity.sampled, options.block_tokens, options.salt)
        self._marker = book.marker()
        return SaveScheduling(book, self._store, block, options.guide)

    # The scheduler's calls.

    def on_new_request(self, request: Any) -> None:
        """Note a request that has arrived."""
        if isinstance(self._scheduling, SaveScheduling):
            self._scheduling.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The number of tokens that this step can load before its forward pass."""
        if isinstance(self._scheduling, LoadScheduling):
            return self._scheduling.matched(request, num_computed_tokens), False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that a load goes to."""
        if isinstance(self._scheduling, LoadScheduling):
            self._scheduling.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """What the worker has to do in this step."""
        if isinstance(self._scheduling, LoadScheduling):
            return StepPlan(loads=self._scheduling.take_due())
        assert self._scheduling is not None
        saves = self._scheduling.take_due(scheduler_output)
        if saves and not self._store.has(self._marker):
            self._store.put(self._marker, b"")
        return StepPlan(saves=saves, content=self._content)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which of a step's loads have failed."""
        result = connector_output.kv_connector_worker_meta
        if isinstance(result, StepResult) and isinstance(self._scheduling, LoadScheduling):
            self._scheduling.failed(result.failures)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """False, since the blocks can be freed, and what the client gets in ``kv_transfer_params``."""
        assert self._scheduling is not None
        return False, self._scheduling.finished(request)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: where a save is lost, the target has a miss, so the source need not run anything again."""
        return False

    # The worker's calls.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:  # noqa: ARG002
        """Find the model and its caches, which exist from now on."""
        engine = Engine(self._vllm_config, self._kv_cache_config)
        if self._options.role == "target":
            assert self._mapper is not None
            content = SourceIdentity.of(self._mapper.spec.source).content
            self._worker = Loader(self._mapper, engine, self._store, content, self._options)
        else:
            self._worker = Saver(engine, self._store, self._options.block_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load what this step starts from."""
        if not isinstance(self._worker, Loader):
            return
        for plan in self._get_connector_metadata().loads:
            reason = self._worker.load(plan)
            if reason is not None:
                self._failures[plan.request_id] = reason
                self._invalid_blocks.update(plan.block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are complete before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are read after the last layer, when the keys and values of all layers are there."""

    def wait_for_save(self) -> None:
        """Save what this step has completed."""
        if isinstance(self._worker, Saver):
            step = self._get_connector_metadata()
            for plan in step.saves:
                self._worker.save(plan, step.content)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be loaded, which the engine has to compute."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> StepResult | None:
        """The reasons why requests were not loaded since the last call."""
        failures, self._failures = self._failures, {}
        return StepResult(failures) if failures else None

    # Counters, in both halves.

    def get_kv_connector_stats(self) -> KvfitStats | None:
        """The counts since the last call."""
        counted = self._scheduling or self._worker
        return None if counted is None else counted.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvfitStats:
        """The counts that another process has sent."""
        return KvfitStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KvfitPromMetrics:
        """The counters for Prometheus."""
        return KvfitPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
