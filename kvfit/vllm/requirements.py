"""Check an engine before it serves, and refuse by name every setting with which the connector is not known to be right."""

from __future__ import annotations

from typing import Any

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.spec import MapperSpec
from kvfit.vllm.options import ConnectorOptions


def check_mapper(spec: MapperSpec) -> None:
    """Refuse a mapper of models whose heads differ by layer: stored blocks and the engine's have one shape for all layers.

    Raises:
        UnsupportedModelError: names the model.
    """
    for model in (spec.source, spec.target):
        if model.geometry is not None:
            raise UnsupportedModelError(
                f"mapper: found {model.ref}, whose heads differ by layer, needed the same heads in all layers, because stored "
                "blocks have one shape: use kvfit.handoff with transformers"
            )


def check_configuration(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> None:
    """Refuse an engine that the connector cannot serve.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        options: the connector's options.

    Raises:
        UnsupportedModelError: prefix caching on the target, several devices or pipeline stages, speculative decoding, a
            quantised cache, or layers that do not all cache plain keys and values of every token.
        MismatchError: the stored block is not a multiple of the source engine's.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if options.role == "target" and cache.enable_prefix_caching:
        # vLLM files a loaded block under the hash of its tokens as soon as it is allocated, as if the engine had computed it.
        # Later requests, even those that opted out of mapping, would then start from approximate keys and values.
        raise UnsupportedModelError(
            "prefix caching: found it on, needed it off on a target, where mapped blocks would be taken for exact ones: start "
            "the engine with --no-enable-prefix-caching"
        )
    for name, option in (
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("data_parallel_size", "--data-parallel-size"),
    ):
        if getattr(parallel, name) != 1:
            raise UnsupportedModelError(
                f"{name}: found {getattr(parallel, name)}, needed 1, because one worker maps whole layers: leave {option} out"
            )
    if vllm_config.speculative_config is not None:
        raise UnsupportedModelError("speculative decoding: found a draft model, needed none: its cache would not be mapped")
    if cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise UnsupportedModelError(
            f"kv_cache_dtype: found {cache.cache_dtype}, needed plain keys and values: start it with --kv-cache-dtype auto"
        )
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise UnsupportedModelError(
            f"attention cache: found {len(groups)} groups of layers ({', '.join(kinds)}), needed one of full attention: "
            "hybrid, windowed and latent-attention models are not mapped in vLLM"
        )
    block = groups[0].kv_cache_spec.block_size
    if options.role == "source" and options.block_tokens % block:
        raise MismatchError(
            f"block_tokens: found {options.block_tokens}, needed a multiple of the {block} tokens of the engine's own blocks"
        )
