"""What changes a forward pass without changing a stored weight is refused when bound and noticed when used."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import FAMILIES, UNLISTED, Tokenizer, build

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.identity import check_model, describe_model
from kvfit.model.stamp import WeightStamp
from kvfit.spec import ModelSpec

BY_NAME = {family.name: family for family in FAMILIES + UNLISTED}
MASK = 2**64 - 1


def describe(model: Any) -> ModelSpec:
    return describe_model(model, Tokenizer(), ref="org/name", revision=None)


@pytest.fixture
def qwen3() -> Any:
    return build(BY_NAME["qwen3"])


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return describe(build(BY_NAME["qwen3"]))


class EmbeddingAdapter(nn.Module):
    """A low-rank adapter on the embedding, in the shape that adapter libraries give it."""

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(2, base_layer.num_embeddings))})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.base_layer(ids)
        return states + self.lora_embedding_A["default"].T[ids].repeat(1, 1, states.shape[-1] // 2)


def test_an_adapter_outside_the_layers_is_refused(spec: ModelSpec, qwen3: Any) -> None:
    check_model(spec, qwen3)
    stamp = WeightStamp(qwen3)
    qwen3.model.embed_tokens = EmbeddingAdapter(qwen3.model.embed_tokens)
    assert not stamp.holds(qwen3)
    for one in (spec, dataclasses.replace(spec, content=None)):
        with pytest.raises(MismatchError, match=r"org/name: found an adapter on model\.embed_tokens, needed the plain model"):
            check_model(one, qwen3)


class Renamed(nn.Module):
    """Something around a projection that no name gives away."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Parameter(torch.ones(1))

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states) * self.more


@pytest.mark.parametrize("part", ["lm_head", "model.norm", "model.layers.1.mlp.up_proj"])
def test_a_module_wrapped_in_another_is_refused(spec: ModelSpec, qwen3: Any, part: str) -> None:
    parent, _, name = part.rpartition(".")
    owner = qwen3.get_submodule(parent)
    setattr(owner, name, Renamed(getattr(owner, name)))
    with pytest.raises(MismatchError, match="field content: found other weights"):
        check_model(spec, qwen3)


def test_an_adapter_merged_through_data_into_middle_layers(spec: ModelSpec, qwen3: Any) -> None:
    check_model(spec, qwen3)
    stamp = WeightStamp(qwen3)
    assert stamp.holds(qwen3)
    weight = qwen3.model.layers[1].self_attn.q_proj.weight
    counted = weight._version
    weight.data += 0.01 * torch.randn(64, 2) @ torch.randn(2, 64)
    assert weight._version == counted  # torch does not count it
    assert not stamp.holds(qwen3)
    with pytest.raises(MismatchError, match="other weights in layer 1"):
        check_model(spec, qwen3)


def test_what_a_write_through_data_shows_and_when(spec: ModelSpec, qwen3: Any) -> None:
    """torch counts no such write. At use eight elements of each tensor are looked at, at the next bind every one."""
    weight = qwen3.model.layers[1].mlp.down_proj.weight.data
    step = (weight.numel() // 8) - 1 | 1
    looked_at = [number * step for number in range(8)]
    check_model(spec, qwen3)
    stamp = WeightStamp(qwen3)
    shows = {}
    for name, change in {
        "a matrix": slice(None),
        "every second element": slice(None, None, 2),
        "a row in the middle": slice(20 * weight.shape[1], 21 * weight.shape[1]),
        "one element that is looked at": looked_at[3],
        "one element beside it": looked_at[3] + 1,
    }.items():
        saved = weight.clone()
        weight.view(-1)[change] += 0.5
        shows[name] = not stamp.holds(qwen3)
        with pytest.raises(MismatchError, match="other weights in layer 1"):
            check_model(spec, qwen3)
        weight.copy_(saved)
        assert stamp.holds(qwen3)
    assert shows == {
        "a matrix": True, "every second element": True, "a row in the middle": False,
        "one element that is looked at": True, "one element beside it": False,
    }  # fmt: skip


@pytest.mark.parametrize("change", ["epsilon", "scaling", "buffer", "retyped", "replaced", "dropout", "window", "soft cap"])
def test_the_stamp_notices(change: str) -> None:
    model = build(BY_NAME["gemma3"])
    stamp = WeightStamp(model)
    assert stamp.holds(model)
    if change == "epsilon":
        model.model.norm.eps *= 2
    elif change == "scaling":
        model.model.layers[1].self_attn.scaling *= 2
    elif change == "buffer":
        next(iter(model.model.rotary_emb.buffers())).data.mul_(1.01)
    elif change == "retyped":
        model.lm_head.to(torch.bfloat16)
    elif change == "replaced":
        model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    elif change == "window":  # masks are made from it in every pass
        model.config.sliding_window = 2
    elif change == "soft cap":
        model.config.final_logit_softcapping = 1.0
    else:
        model.model.layers[0].self_attn.attention_dropout = 0.1
        model.train()
    assert not stamp.holds(model)


def test_constants_of_the_modules_are_compared(spec: ModelSpec, qwen3: Any) -> None:
    for module, name in ((qwen3.model.norm, "variance_epsilon"), (qwen3.model.layers[2].self_attn, "scaling")):
        saved = getattr(module, name)
        setattr(module, name, saved * 2)
        with pytest.raises(MismatchError, match=r"^field content\.derived: found .*, needed .* as org/name had"):
            check_model(spec, qwen3)
        setattr(module, name, saved)
    check_model(spec, qwen3)
    # Under another version of transformers its modules may hold other constants for the same model.
    assert spec.content is not None
    elsewhere = dataclasses.replace(spec.content, transformers="0.0.0", derived="0" * 64)
    check_model(dataclasses.replace(spec, content=elsewhere), qwen3)


def test_active_dropout_is_refused() -> None:
    model = build(BY_NAME["gpt2"])
    spec = describe(model)
    model.train()
    with pytest.raises(MismatchError, match=r"found active dropout in transformer\.drop, needed .*: call model\.eval\(\)"):
        check_model(spec, model)
    other = build(BY_NAME["qwen3"])
    described = describe(other)
    other.train()  # drops nothing
    check_model(described, other)


def test_a_retyped_weight_is_refused(spec: ModelSpec, qwen3: Any) -> None:
    qwen3.model.layers[1].mlp.to(torch.float64)
    with pytest.raises(MismatchError, match="layer 1"):
        check_model(spec, qwen3)


def test_a_quantised_tensor_of_another_kind_is_refused_by_name(spec: ModelSpec, qwen3: Any) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = qwen3.model.layers[1].mlp.up_proj.weight.detach()
    qwen3.model.layers[1].mlp.up_proj.weight = nn.Parameter(TwoTensor(weight, weight))
    for one in (spec, dataclasses.replace(spec, content=None)):
        with pytest.raises(UnsupportedModelError, match="quantised as TwoTensor, needed plain weights"):
            check_model(one, qwen3)


# Forward hooks


def steer(_module: nn.Module, _inputs: Any, out: Any) -> Any:
    return (out[0] + 0.05, *out[1:]) if isinstance(out, tuple) else out + 0.05


def test_hooks_that_change_activations_are_refused_and_others_are_not(spec: ModelSpec, qwen3: Any) -> None:
    seen: list[int] = []
    stamp = WeightStamp(qwen3)
    looking = qwen3.model.layers[1].register_forward_hook(lambda _module, _inputs, _out: seen.append(1))
    assert not stamp.holds(qwen3)
    check_model(spec, qwen3)
    assert seen
    assert WeightStamp(qwen3).holds(qwen3)
    steering = qwen3.model.layers[1].register_forward_hook(steer)
    needed = r"org/name: found forward hooks that change activations \(hooked: model\.layers\.1\), needed the model as it was"
    with pytest.raises(MismatchError, match=needed):
        check_model(spec, qwen3)
    with pytest.raises(MismatchError, match=needed):
        describe(qwen3)
    assert len(qwen3.model.layers[1]._forward_hooks) == 2  # lifted for one pass, and back in place
    steering.remove()
    looking.remove()
    check_model(spec, qwen3)


def test_pre_hooks_and_replaced_forwards(spec: ModelSpec, qwen3: Any) -> None:
    handle = qwen3.model.layers[2].mlp.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 1.1,))
    with pytest.raises(MismatchError, match="forward hooks that change activations"):
        check_model(spec, qwen3)
    handle.remove()
    norm = qwen3.model.norm
    plain = norm.forward
    norm.forward = lambda states: plain(states) * 1.1
    with pytest.raises(MismatchError, match="forward hooks that change activations"):
        check_model(spec, qwen3)
    norm.forward = lambda states: plain(states)
    check_model(spec, qwen3)
