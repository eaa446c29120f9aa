"""A model in which anything that runs differs from what was fitted is refused; the same model in another guise is not."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import FAMILIES, UNLISTED, VOCABULARY, Tokenizer, build

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.content import _expert_sum, _tensor_sum, content_of, part_digests
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


# Every tensor, one element at a time


def tensors(model: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, tensor, and whether a checkpoint holds it, of every parameter and buffer."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter, True
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}", buffer, name not in module._non_persistent_buffers_set


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma3", "gpt-neox", "gpt-oss", "mixtral", "cohere2", "glm4", "gpt2"])
def test_any_tensor_changed_by_one_element_is_refused(name: str) -> None:
    model = build(BY_NAME[name])
    spec = describe(model)
    check_model(spec, model)
    generator = torch.Generator().manual_seed(0)
    n_changed = 0
    for path, tensor, stored in tensors(model):
        if "original" in path or not tensor.is_floating_point() or tensor.numel() == 0:
            continue  # `original_inv_freq` is a copy that no pass reads; boolean masks are made from positions
        flat = tensor.detach().view(-1)
        index = int(torch.randint(flat.numel(), (1,), generator=generator))
        saved = flat[index].clone()
        with torch.no_grad():
            if stored:  # the smallest change there is: the last bit
                flat[index : index + 1].view(torch.int32).bitwise_xor_(1)
            else:
                flat[index] *= 1.01
        with pytest.raises(MismatchError, match=r"field (content|rope\.tables)"):
            check_model(spec, model)
        with torch.no_grad():
            flat[index] = saved
        n_changed += 1
    check_model(spec, model)
    assert n_changed >= len(list(model.parameters()))


def test_the_message_names_the_parts_that_differ(spec: ModelSpec, qwen3: Any) -> None:
    def refused(*weights: Tensor) -> str:
        saved = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.view(-1)[5] += 1
        with pytest.raises(MismatchError) as caught:
            check_model(spec, qwen3)
        with torch.no_grad():
            for weight, old in zip(weights, saved, strict=True):
                weight.copy_(old)
        return str(caught.value)

    layers = qwen3.model.layers
    assert "found other weights in layer 1, needed" in refused(layers[1].mlp.up_proj.weight)
    assert "in 2 layers from 0 to 2, needed" in refused(layers[0].mlp.up_proj.weight, layers[2].self_attn.q_norm.weight)
    assert "in the input embedding, needed" in refused(qwen3.model.embed_tokens.weight)
    assert "in the parts outside the decoder layers, needed" in refused(qwen3.model.norm.weight)
    assert "in the parts outside the decoder layers, needed" in refused(qwen3.lm_head.weight)


def test_every_embedding_row_counts(spec: ModelSpec, qwen3: Any) -> None:
    """Trained special tokens are the everyday case: a few rows, anywhere."""
    for row in (0, 1, 47, VOCABULARY - 1):
        with torch.no_grad():
            qwen3.model.embed_tokens.weight[row] *= 1.01
        with pytest.raises(MismatchError, match="the input embedding"):
            check_model(spec, qwen3)
        qwen3.load_state_dict(build(BY_NAME["qwen3"]).state_dict())
    check_model(spec, qwen3)


# The same model in another guise


@pytest.mark.parametrize("fitted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", "gpt-neox"])
def test_another_dtype_is_compared_as_bfloat16(name: str, fitted: torch.dtype) -> None:
    one = build(BY_NAME[name], torch.bfloat16)
    other = build(BY_NAME[name], torch.float32)
    other.load_state_dict(one.state_dict())
    first, second = (one, other) if fitted == torch.bfloat16 else (other, one)
    spec = describe(first)
    check_model(spec, second)
    with torch.no_grad():
        second.get_input_embeddings().weight[3, 3] *= 1.05
    with pytest.raises(MismatchError, match="the input embedding"):
        check_model(spec, second)


def test_a_vocabulary_padded_by_eight_rows_is_the_same_model(spec: ModelSpec, qwen3: Any) -> None:
    padded = build(BY_NAME["qwen3"])
    padded.resize_token_embeddings(VOCABULARY + 8)
    assert padded.get_input_embeddings().weight.shape[0] == padded.lm_head.weight.shape[0] == VOCABULARY + 8
    check_model(spec, padded)
    check_model(describe(padded), qwen3)
    with torch.no_grad():
        padded.get_input_embeddings().weight[VOCABULARY + 2] += 1  # a row that no token has
    check_model(spec, padded)
    with torch.no_grad():
        padded.get_input_embeddings().weight[VOCABULARY - 1] += 1
    with pytest.raises(MismatchError, match="the input embedding"):
        check_model(spec, padded)


def test_fewer_rows_than_tokens_are_refused(spec: ModelSpec) -> None:
    cut = build(BY_NAME["qwen3"])
    cut.resize_token_embeddings(VOCABULARY - 8)
    with pytest.raises(MismatchError, match="the input embedding and the parts outside"):
        check_model(spec, cut)


def test_offloaded_and_compiled_models_are_the_same(spec: ModelSpec, qwen3: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    check_model(spec, torch.compile(qwen3))
    offloaded = accelerate.cpu_offload(qwen3, execution_device=torch.device("cpu"))
    assert offloaded.model.embed_tokens.weight.is_meta
    check_model(spec, offloaded)
    offloaded.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"][0, 0] += 1
    with pytest.raises(MismatchError, match="layer 1"):
        check_model(spec, offloaded)


def test_tied_embeddings() -> None:
    model = build(BY_NAME["qwen3"], tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    spec = describe(model)
    check_model(spec, model)
    check_model(spec, copy.deepcopy(model))
    untied = build(BY_NAME["qwen3"], tie_word_embeddings=False)
    untied.load_state_dict(model.state_dict())
    check_model(spec, untied)
    with torch.no_grad():
        untied.lm_head.weight[3, 3] += 1
    with pytest.raises(MismatchError, match="outside the decoder layers"):
        check_model(spec, untied)


# What changes a pass without changing a stored weight


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


@pytest.mark.parametrize("change", ["epsilon", "scaling", "buffer", "retyped", "replaced", "dropout"])
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


# The arithmetic


def mixed(number: int) -> int:
    """SplitMix64's finaliser on Python's whole numbers."""
    number = number * 0x9E3779B97F4A7C15 & MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def slow_sum(octets: bytes) -> int:
    octets += b"\0" * (-len(octets) % 8)
    words = [int.from_bytes(octets[start : start + 8], "little") for start in range(0, len(octets), 8)]
    within = [mixed(index + 1) | 1 for index in range(8192)]
    return sum((mixed(i // 8192 + 1) | 1) * within[i % 8192] * word for i, word in enumerate(words)) & MASK


SIZES = (1, 3, 4, 8191, 8192 * 4)
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, dtype) for size in SIZES for dtype in DTYPES), (8192 * 4 * 2 + 5, torch.bfloat16), (100_003, torch.bfloat16)],
)
def test_sums_are_those_of_plain_whole_numbers(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100
    tensor = values.abs().to(dtype)
    octets = tensor.view(torch.uint8).numpy().tobytes()
    assert _tensor_sum(tensor, False) & MASK == slow_sum(octets)


def test_rounding_in_pieces_is_rounding_at_once() -> None:
    values = torch.randn(8192 * 4 * 256 + 8192 * 4 + 7)
    assert _tensor_sum(values, True) & MASK == _tensor_sum(values.to(torch.bfloat16), False) & MASK


def test_strides_and_offsets_do_not_matter() -> None:
    values = torch.randn(65, 33)
    assert _tensor_sum(values.T.contiguous().T, False) == _tensor_sum(values, False)
    shifted = torch.randn(1001)[1:]
    assert _tensor_sum(shifted, False) == _tensor_sum(shifted.clone(), False)


def test_places_count() -> None:
    values = torch.randn(4, 64)
    assert _tensor_sum(values, False) != _tensor_sum(values.flip(0), False)
    assert _tensor_sum(values, False) != _tensor_sum(values.flip(1), False)


def test_experts_one_by_one_and_fused_are_alike() -> None:
    """As versions 4 and 5 of transformers keep them."""
    gate, up, down = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    fused = _expert_sum(torch.cat([gate, up], 1), False, None) + _expert_sum(down, False, None)
    apart = sum(_expert_sum(part[e], False, e) for part in (gate, up, down) for e in range(4))
    assert fused & MASK == apart & MASK
    changed = gate.clone()
    changed[2, 3, 4] += 1
    assert _expert_sum(torch.cat([changed, up], 1), False, None) + _expert_sum(down, False, None) & MASK != fused & MASK
    swapped = gate[[1, 0, 2, 3]]
    assert _expert_sum(swapped, False, None) & MASK != _expert_sum(gate, False, None) & MASK


PINNED = ("86a236ed2ae3e0c9", "bc742c2dc795cdcc", "ceab86dc833b115d", "b0f9d0b17a204dba")


def test_digests_are_the_same_on_every_version() -> None:
    """Weights that a formula gives, in the names of a checkpoint; written down once."""
    model = build(BY_NAME["qwen3"])
    with torch.no_grad():
        for number, name in enumerate(sorted(model.state_dict())):
            weight = model.state_dict()[name]
            weight.copy_((torch.arange(weight.numel()).reshape(weight.shape) * (number + 1) % 97 - 48) / 64)
    found = part_digests(model, VOCABULARY, rounding=False)
    assert found[:-1] == PINNED  # the last holds the rotary tables, whose last bit is the processor's
    assert content_of(model, VOCABULARY).bits == found
