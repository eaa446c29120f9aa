"""The serving connector: a vLLM engine of the target continues from what an engine of the source has read.

This package may import everything but `fit` and `cli`. Only `connector`, `engine` and `metrics` import vLLM, so that
addresses, store and layouts can be used and tested without it. `KvfitConnector` is imported when it is first used.
"""

from typing import Any

__all__ = ["KvfitConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvfitConnector":
        raise AttributeError(f"module 'kvfit.vllm' has no attribute {name!r}")
    from kvfit.vllm.connector import KvfitConnector

    return KvfitConnector
