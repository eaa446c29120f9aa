"""Count what the connector does, for vLLM's log line and its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# What each counter counts; requests that are prefilled have a counter per reason beside these.
COUNTERS = {
    "applied": "requests that started from mapped keys and values",
    "mapped_tokens": "tokens that were mapped",
    "recomputed_tokens": "mapped tokens that the target ran again",
    "loaded_bytes": "bytes read from the store",
    "load_milliseconds": "wall time of loads: read, map, write, run again",
    "saved_blocks": "blocks written to the store",
    "saved_bytes": "bytes written to the store",
    "save_milliseconds": "wall time of saves",
    "unsaved_blocks": "blocks that the store did not take",
}
FALLBACK = "fallback_prefill"


@dataclass
class KvfitStats(KVConnectorStats):  # type: ignore[misc]
    """The counts since the last report; ``fallback_prefill:REASON`` counts requests that the target prefilled."""

    data: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self.data[name] = self.data.get(name, 0) + amount

    def fall_back(self, reason: str) -> None:
        """Count a request that is prefilled."""
        self.count(f"{FALLBACK}:{reason}")

    def take(self) -> KvfitStats | None:
        """The counts since the last call, None without any; counting starts again at zero."""
        taken = KvfitStats(self.data)
        self.reset()
        return None if taken.is_empty() else taken

    def reset(self) -> None:
        """Start again at nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvfitStats:
        """Add the counts of another process."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, with milliseconds as whole numbers, for the log line."""
        return {name: round(value) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvfitPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same counts as Prometheus counters ``vllm:kvfit_...``."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        """Register the counters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvfit_{name}", documentation=f"kvfit: {what}", labelnames=labelnames)
            for name, what in COUNTERS.items()
        }
        self._fallbacks = self._counter_cls(
            name=f"vllm:kvfit_{FALLBACK}",
            documentation="kvfit: requests that were prefilled instead, by reason",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts since the last report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            kind, _, reason = name.partition(":")
            if kind == FALLBACK:
                self._fallbacks.labels(*labels, reason).inc(value)
            else:
                self._counters[kind].labels(*labels).inc(value)
