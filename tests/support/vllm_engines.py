"""vLLM engines for the tests: each in a process of its own, offline, on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvfit.vllm.store import FolderStore

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def transfer_config(**options: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` with the connector's own options."""
    return {
        "kv_connector": "KvfitConnector",
        "kv_connector_module_path": "kvfit.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def engine_arguments(model: Path, **options: Any) -> dict[str, Any]:
    """Arguments of an engine with the connector; `options` are the connector's."""
    os.environ.update(ENVIRONMENT)
    # The engine's process finds the test's own store by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "kv_transfer_config": transfer_config(**options),
    }


@contextmanager
def running(model: Path, more: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A running engine; `more` are arguments of its own."""
    arguments = {**engine_arguments(model, **options), **(more or {})}
    from vllm import LLM

    engine = LLM(**arguments)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def generate(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n_tokens: int = 12,
    tenant: str | None = None,
    sampled: dict[str, Any] | None = None,
    **asked: Any,
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Greedy tokens of some prompts, all at once, and what the connector says about each.

    `asked` are the request's options, and `sampled` are more of vLLM's sampling parameters.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=n_tokens,
        temperature=0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"kvfit": asked}},
        **(sampled or {}),
    )
    salt = {} if tenant is None else {"cache_salt": tenant}
    outputs = engine.generate([{"prompt_token_ids": list(ids), **salt} for ids in prompts], sampling, use_tqdm=False)
    told = [(output.kv_transfer_params or {}).get("kvfit", {}) for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], told


def counters(engine: Any) -> dict[str, float]:
    """The connector's Prometheus counters so far; those with a reason as ``fallback_prefill:reason``.

    Read from the engine's own logger: a process has one registry, and vLLM empties it when another engine starts.
    """
    loggers = engine.llm_engine.logger_manager.stat_loggers
    ours = next(logger.kv_connector_prom.prom_metrics for logger in loggers if hasattr(logger, "kv_connector_prom"))
    found: dict[str, float] = {}
    for metric in (*ours._counters.values(), ours._fallbacks):
        for sample in metric.collect()[0].samples:
            if sample.name.endswith("_total"):
                reason = sample.labels.get("reason")
                name = sample.name.removeprefix("vllm:kvfit_").removesuffix("_total") + (f":{reason}" if reason else "")
                found[name] = sample.value
    return found


class FailingStore(FolderStore):
    """A folder whose entries can vanish between the look-up and the load, or come late: see the two files that it looks for."""

    def get(self, address: str) -> bytes | None:
        """As the folder's, unless told otherwise."""
        import time

        if (self.folder / "vanish").exists():
            return None
        if (self.folder / "late").exists():
            time.sleep(2.0)
        return super().get(address)


def failing_store(options: dict[str, Any]) -> FailingStore:
    """The factory that the configuration names."""
    return FailingStore(options["folder"], 1 << 30)
