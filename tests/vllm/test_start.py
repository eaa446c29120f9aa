"""What an engine must be like before it serves, and what every way of storing a block on this machine looks like."""

from pathlib import Path

import pytest
import torch

# A module of vLLM's: this folder alone would pass for a package of that name.
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from bundle_factory import evaluated_bundle
from planted_identity import write_identity
from vllm_engines import engine_arguments

from kvfit.demo import MODELS
from kvfit.errors import GateError, MismatchError, OptionError, UnsupportedModelError

MAPPER = Path(__file__).resolve().parents[2] / "registry" / "demo-mapper"
SOURCE, TARGET = MODELS["demo:source"], MODELS["demo:target"]


def connector(model, tmp_path, *, arguments=None, block=128, spec=None, groups=1, **options):
    """The connector that an engine would make beside its scheduler, without the engine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    asked = {**engine_arguments(model, store=str(tmp_path / "store"), **options), **(arguments or {})}
    config = EngineArgs(**asked).create_engine_config()
    spec = spec or FullAttentionSpec(block_size=block, num_kv_heads=4, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)] * groups)
    return KVConnectorFactory.create_connector(config=config, role=KVConnectorRole.SCHEDULER, kv_cache_config=cache)


def target(tmp_path, **more):
    return connector(TARGET, tmp_path, **{"role": "target", "mapper": str(MAPPER), "require": "any", **more})


def test_a_right_engine_starts_and_a_miss_is_never_an_error(tmp_path):
    made = target(tmp_path)
    assert made._vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert made.get_kv_connector_stats() is None
    connector(SOURCE, tmp_path, role="source")


def test_prefix_caching_is_refused_on_a_target_alone(tmp_path):
    on = {"enable_prefix_caching": True}
    with pytest.raises(UnsupportedModelError, match="--no-enable-prefix-caching"):
        target(tmp_path, arguments=on)
    connector(SOURCE, tmp_path, role="source", arguments=on)


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_devices_are_refused(tmp_path, parallel):
    with pytest.raises(UnsupportedModelError, match=parallel):
        target(tmp_path, arguments={parallel: 2})


def test_a_quantised_cache_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="kv_cache_dtype"):
        target(tmp_path, arguments={"kv_cache_dtype": "fp8", "dtype": "bfloat16"})


def test_layers_of_other_kinds_are_refused(tmp_path):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    windowed = SlidingWindowSpec(block_size=128, num_kv_heads=4, head_size=32, dtype=torch.float32, sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="SlidingWindowSpec"):
        target(tmp_path, spec=windowed)
    with pytest.raises(UnsupportedModelError, match="2 groups"):
        target(tmp_path, groups=2)


def test_blocks_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(MismatchError, match="multiple of the 128"):
        connector(SOURCE, tmp_path, role="source", block_tokens=64)


def test_another_model_than_the_mappers_target_is_refused(tmp_path):
    for weights in (True, False):
        with pytest.raises(MismatchError):
            connector(SOURCE, tmp_path, role="target", mapper=str(MAPPER), require="any", check_weights=weights)


def test_other_weights_of_the_same_shape_are_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto")
    with torch.no_grad():
        model.model.layers[3].self_attn.v_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "tuned")
    tuned = {"role": "target", "mapper": str(MAPPER), "require": "any"}
    with pytest.raises(MismatchError, match="weight"):
        connector(tmp_path / "tuned", tmp_path, **tuned)
    connector(tmp_path / "tuned", tmp_path, check_weights=False, **tuned)  # what that option gives up


def test_a_wrong_mapper_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    identity = write_identity(tmp_path / "identity", AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32))
    with pytest.raises(MismatchError):
        target(tmp_path, mapper=str(identity))


def test_a_mapper_whose_verdict_is_fail_is_refused(tmp_path):
    with pytest.raises(GateError, match="verdict fail"):
        target(tmp_path, mapper=str(evaluated_bundle(tmp_path / "failed", "fail")), require="pass")


def test_an_option_with_a_typing_error_is_refused(tmp_path):
    with pytest.raises(OptionError, match="exact_tails"):
        target(tmp_path, exact_tails=1)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_of_this_machine_is_found_by_watching(head_dim, dtype):
    """What vLLM's own operation stores is read back, in the layouts of its kernels for this processor."""
    from vllm import _custom_ops as operations
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvfit.vllm.layout import watched_layout

    n_heads, block = 3, 128
    kernel = _get_attn_isa(dtype, block, head_dim)

    def write(keys, values, cache, slots):
        halves = cache.view(cache.shape[0], n_heads, 2 * block, -1).chunk(2, dim=2)
        operations.cpu_attn_reshape_and_cache(
            keys, values, *halves, slots, kernel, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    cache = torch.zeros(4, n_heads, block, 2 * head_dim, dtype=dtype)
    layout = watched_layout(write, cache, n_heads, block, head_dim)
    keys, values = (torch.randn(2 * block, n_heads, head_dim).to(dtype) for _ in range(2))
    write(keys, values, cache, torch.cat([torch.arange(block) + 3 * block, torch.arange(block) + block]))
    states = layout.read(cache, [3, 1])
    assert torch.equal(states, torch.stack([keys, values]).transpose(1, 2)), kernel
    again = torch.zeros_like(cache)
    layout.write(again, [3, 1], states)
    assert torch.equal(again, cache), kernel
