"""A model in which anything that runs differs from what was fitted is refused; the same model in another guise is not."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, UNLISTED, VOCABULARY, Tokenizer, build

from kvfit.errors import MismatchError
from kvfit.model.identity import check_model, describe_model
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
