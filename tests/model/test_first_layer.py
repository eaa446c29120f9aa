"""The first layer's keys and values without attention, against a prefill of the whole model."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import FAMILIES, REFUSED, UNLISTED, VOCABULARY, Family, build, build_refused

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.first_layer import check_first_layer, first_layer

BY_NAME = {family.name: family for family in FAMILIES + UNLISTED}


def prompt(batch: int = 2, n_tokens: int = 20) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, n_tokens), generator=torch.Generator().manual_seed(5))


def prefilled(model: Any, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    cache = caches.full_cache()
    caches.forward(model, ids, cache, **kwargs)
    return caches.read_cache(cache)[0]


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES + UNLISTED, ids=lambda family: family.name)
def test_it_is_what_a_prefill_caches_far_from_position_zero(family: Family) -> None:
    model, ids = build(family), prompt()
    positions = torch.arange(1500, 1520)[None]
    assert_same(first_layer(model, ids, positions), prefilled(model, ids, position_ids=positions))
    check_first_layer(model)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma3", "glm"])
def test_left_padding(name: str) -> None:
    model, ids = build(BY_NAME[name]), prompt()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, wanted = first_layer(model, ids, positions), prefilled(model, ids, attention_mask=mask)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(one[1, :, 7:], other[1, :, 7:], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gpt-neox"])
def test_chunks_and_default_positions_change_nothing(name: str) -> None:
    model, ids = build(BY_NAME[name]), prompt()
    wanted = prefilled(model, ids)
    for chunk_tokens in (1, 7, 40, 4096):
        assert_same(first_layer(model, ids, chunk_tokens=chunk_tokens), wanted)


def test_bfloat16_is_equal_to_rounding() -> None:
    model, ids = build(BY_NAME["qwen3"], torch.bfloat16), prompt()
    for one, other in zip(first_layer(model, ids), prefilled(model, ids), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=1.6e-2, atol=1.6e-2)
    check_first_layer(model)


def test_the_other_layers_do_not_run() -> None:
    model = build(BY_NAME["qwen3"])
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda _module, _inputs, _out, index=index: ran.append(index))
    first_layer(model, prompt())
    assert ran == []


def test_a_model_whose_configuration_turns_the_cache_off() -> None:
    model, ids = build(BY_NAME["qwen3"], use_cache=False), prompt()
    assert_same(first_layer(model, ids), prefilled(build(BY_NAME["qwen3"]), ids))


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_offloaded_weights(place: str, tmp_path: Path) -> None:
    """Stopping the pass must leave accelerate's hooks as they were: the next pass is a plain one."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = build(BY_NAME["qwen3"]), prompt()
    wanted = prefilled(model, ids)
    if place == "memory":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        device_map = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "disk", "model.rotary_emb": "cpu"}
        model = accelerate.dispatch_model(
            model, {**device_map, "lm_head": "cpu"}, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
        )
    assert_same(first_layer(model, ids), wanted)
    assert model.model.layers[0].self_attn.k_proj.weight.is_meta
    assert model.model.layers[0].input_layernorm.weight.is_meta
    check_first_layer(model)
    assert_same(prefilled(model, ids), wanted)


def test_a_first_layer_that_looks_at_other_tokens_is_refused() -> None:
    """Token shift before the first layer, as some families mix tokens: the negative control of the check."""
    model = build(BY_NAME["qwen3"])

    def mix(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0]
        return (states + 0.1 * states.roll(1, 1), *args[1:]), kwargs

    check_first_layer(model)
    model.model.layers[0].register_forward_pre_hook(mix, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="qwen3, layer 0: its keys depend on more than the token and its position"):
        check_first_layer(model)


def test_positions_that_the_pass_ignores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that takes no positions but rotates by the place in the call."""
    model = build(BY_NAME["qwen3"])
    original = type(model.model).forward

    def ignoring(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **{**kwargs, "position_ids": None})

    monkeypatch.setattr(type(model.model), "forward", ignoring)
    with pytest.raises(UnsupportedModelError, match="depend on more than the token and its position"):
        check_first_layer(model)


@pytest.mark.parametrize(("name", "kind"), [("qwen3-next", "linear_attention"), ("lfm2", "conv")])
def test_a_first_layer_without_a_cache_is_refused_by_name(name: str, kind: str) -> None:
    refused = next(refused for refused in REFUSED if refused.name == name)
    config = {**refused.config, "layer_types": [kind, "full_attention", "full_attention"]}
    model = build(Family(name, refused.model_type, config))
    needed = rf"{refused.model_type}, layer 0: the layer owns no keys and values, layer 1 is the first that does"
    if int(metadata.version("transformers").split(".")[0]) < 5:  # such families had a kind of cache of their own
        needed = rf"{refused.model_type}, layer 0: a pass over 8 tokens failed"
    else:
        with pytest.raises(UnsupportedModelError, match=needed):
            first_layer(model, prompt())
    with pytest.raises(UnsupportedModelError, match=needed):
        check_first_layer(model)


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="t5, layer 0: a pass over 8 tokens failed"):
        check_first_layer(build_refused(next(refused for refused in REFUSED if refused.name == "t5")))


def test_a_pass_that_caches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gradient checkpointing does to the cache of a training model in older versions of transformers."""
    model = build(BY_NAME["qwen3"])
    original = type(model.model).forward

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = {name: None for name in ("cache", "past_key_values") if name in kwargs}
        return original(self, *args, **{**kwargs, **dropped, "use_cache": False})

    monkeypatch.setattr(type(model.model), "forward", forgetful)
    with pytest.raises(UnsupportedModelError, match="qwen3, layer 0: a pass cached nothing"):
        first_layer(model, prompt())


def test_shapes_are_checked() -> None:
    model = build(BY_NAME["qwen3"])
    with pytest.raises(MismatchError, match=r"input_ids: found shape \(4,\), needed \(B, T\)"):
        first_layer(model, torch.zeros(4, dtype=torch.long))
    with pytest.raises(MismatchError, match=r"position_ids: found shape \(2, 19\), needed \(2, 20\)"):
        first_layer(model, prompt(), torch.zeros(2, 19, dtype=torch.long))
