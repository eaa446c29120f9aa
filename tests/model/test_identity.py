"""Which model it is: fingerprints that other weights cannot share, and that other dtypes and versions do."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from zoo import FAMILIES, VOCABULARY, Tokenizer, build

from kvfit.bundle.mapper_json import read_mapper_spec
from kvfit.bundle.records import from_json, to_json
from kvfit.errors import MismatchError, SpecError, UnsupportedModelError
from kvfit.model.digests import config_digest, quantisation, tokenizer_fingerprint, weight_fingerprint
from kvfit.model.identity import check_model, check_tokenizer, describe_model
from kvfit.spec import ModelSpec

BY_NAME = {family.name: family for family in FAMILIES}

# Written down once; every supported version of transformers must come to the same.
DIGESTS = {
    "qwen3": "5ae65f6ebc1805fa4b37fe358e3a55ae7562cab5425b9e944552d9e74dcb7476",
    "qwen3-moe": "0e6f07ee181c825b00201e759df2a961c31847f1133a72e277c5c428ffa58187",
    "llama": "5b6fd9ae654160299236d250ebbd0889f8a105c02360fbc82f5366c329fb0d17",
    "mistral": "3191726c1cb707012f08cb51ea2ed37471b4e285c3d4f23547265822d7929e0d",
    "gemma3": "3236b7172ef3808ce09259ea5b04474e71450edc5167caad188c52a30a216e6f",
    "phi3": "37e82854fd1370a70a3e4f2f7aa2e9cf7921c763583c4983ff88ab062370c091",
    "glm": "020b0f3ad074a437193e92583658f221d49f26be60d78ab52b0b199691a872f6",
    "cohere2": "df0869e51660d8daaae8c4794fb83de741b4dc5b381f2c282dc863bf79057b45",
    "gpt-oss": "c69cf453cabc3b548021b1b33189292838f79afb82cf28d8e0fb15a4d5b79814",
    "granite": "260116092bcded644f622e275816086eed5f02cc51dc94bf3a6a053a8cafa1a3",
    "stablelm": "b33c955a4247a12b5e2fbf8f8374a24ca9f85367cc990aa8decb603c65394f87",
}


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return build(BY_NAME["qwen3"])


@pytest.fixture(scope="module")
def spec(qwen3: Any) -> ModelSpec:
    return describe_model(qwen3, Tokenizer(), ref="org/name", revision="0" * 40)


def test_describe(spec: ModelSpec) -> None:
    assert (spec.ref, spec.revision, spec.family) == ("org/name", "0" * 40, "qwen3")
    assert (spec.n_layers, spec.n_heads, spec.head_dim, spec.n_query_heads) == (3, 2, 16, 4)
    assert (spec.dtype, spec.quantisation, spec.windows) == ("float32", None, (None, None, None))
    assert from_json(ModelSpec, json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_model_passes_its_own_check_in_either_dtype(family: Any) -> None:
    model = build(family)
    spec = describe_model(model, Tokenizer(), ref="org/name", revision=None)
    check_model(spec, model, Tokenizer())
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(torch.bfloat16)  # casts the frequencies too, which loading in bfloat16 does not
    for name, buffer in frequencies.items():
        model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    check_model(spec, model, Tokenizer())


def test_frequencies_cast_to_bfloat16_are_another_rotation(spec: ModelSpec) -> None:
    model = build(BY_NAME["qwen3"])
    model.to(torch.bfloat16)
    if model.model.rotary_emb.inv_freq.dtype == torch.bfloat16:
        with pytest.raises(MismatchError, match=r"field rope\.tables\[0\]"):
            check_model(spec, model)


def test_a_compiled_model_is_seen_through(spec: ModelSpec, qwen3: Any) -> None:
    check_model(spec, torch.compile(qwen3), Tokenizer())


def test_other_weights_of_the_same_shape_are_refused(spec: ModelSpec) -> None:
    other = build(BY_NAME["qwen3"], seed=1)
    with pytest.raises(MismatchError, match=r"field content: found other weights in .* that org/name had when the map was"):
        check_model(spec, other)
    with pytest.raises(MismatchError, match=r"field weight_fingerprint: .* as org/name had"):
        check_model(dataclasses.replace(spec, content=None), other)


@pytest.mark.parametrize("part", ["k_proj", "v_proj", "q_proj", "k_norm"])
@pytest.mark.parametrize("layer_index", [0, 2])
def test_any_layer_that_was_tuned_shows(spec: ModelSpec, part: str, layer_index: int) -> None:
    model = build(BY_NAME["qwen3"])
    check_model(spec, model)
    with torch.no_grad():
        getattr(model.model.layers[layer_index].self_attn, part).weight.mul_(1.02)
    with pytest.raises(MismatchError, match=f"found other weights in layer {layer_index}, needed"):
        check_model(spec, model)
    with pytest.raises(MismatchError, match="weight_fingerprint"):
        check_model(dataclasses.replace(spec, content=None), model)


@pytest.mark.parametrize("name", ["phi3", "gpt-neox"])
def test_fused_projections_are_fingerprinted(name: str) -> None:
    model = build(BY_NAME[name])
    before = weight_fingerprint(model)
    fused = next(
        module
        for path, module in model.named_modules()
        if path.endswith(("1.self_attn.qkv_proj", "1.attention.query_key_value"))
    )
    with torch.no_grad():
        fused.weight.mul_(1.02)
    assert weight_fingerprint(model) != before


def test_layers_do_not_stand_in_for_each_other() -> None:
    model = build(BY_NAME["qwen3"])
    before = weight_fingerprint(model)
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    assert weight_fingerprint(model) != before


def test_weights_that_are_not_loaded_cannot_be_identified() -> None:
    with pytest.raises(UnsupportedModelError, match=r"qwen3: found .* on the meta device"):
        weight_fingerprint(build(BY_NAME["qwen3"]).to("meta"))


def test_offloaded_weights_are_identified() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build(BY_NAME["qwen3"])
    before = weight_fingerprint(model)
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert offloaded.model.layers[0].self_attn.k_proj.weight.is_meta
    assert weight_fingerprint(offloaded) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("family", "llama"),
        ("n_query_heads", 8),
        ("n_heads", 4),
        ("head_dim", 32),
        ("windows", (24, None, None)),
        ("config_digest", "0" * 64),
        ("quantisation", "gptq"),
        ("weight_fingerprint", "0" * 64),
        ("tokenizer_fingerprint", "0" * 64),
    ],
)
def test_the_field_that_differs_is_named(spec: ModelSpec, qwen3: Any, field: str, value: Any) -> None:
    with pytest.raises(MismatchError, match=rf"^field {field}: found .*, needed .* as org/name had"):
        check_model(dataclasses.replace(spec, content=None, **{field: value}), qwen3, Tokenizer())


def test_geometry_comes_first(spec: ModelSpec, qwen3: Any) -> None:
    rope = dataclasses.replace(spec.rope, assignment=(0,) * 4)
    other = dataclasses.replace(spec, n_layers=4, windows=(None,) * 4, rope=rope, weight_fingerprint="0" * 64)
    with pytest.raises(MismatchError, match="field n_layers: found 3, needed 4"):
        check_model(other, qwen3)


def test_another_theta_is_named_before_the_weights(spec: ModelSpec) -> None:
    model = build(BY_NAME["qwen3"], rope_theta=1e4)
    with pytest.raises(MismatchError, match=r"field rope\.tables\[0\]: found a model with other inverse frequencies"):
        check_model(spec, model)


def test_padding_of_the_vocabulary_is_no_difference(qwen3: Any) -> None:
    padded = build(BY_NAME["qwen3"], vocab_size=VOCABULARY + 32)
    assert config_digest(padded.config) == config_digest(qwen3.config)
    assert tokenizer_fingerprint(Tokenizer()) == tokenizer_fingerprint(Tokenizer())
    assert tokenizer_fingerprint(Tokenizer()) != tokenizer_fingerprint(Tokenizer(VOCABULARY + 1))

    class Swapped(Tokenizer):
        def get_vocab(self) -> dict[str, int]:
            vocabulary = super().get_vocab()
            vocabulary["token 3"], vocabulary["token 4"] = 4, 3
            return vocabulary

    assert tokenizer_fingerprint(Tokenizer()) != tokenizer_fingerprint(Swapped())


def test_what_the_digest_sees_and_what_not(qwen3: Any) -> None:
    digest = config_digest(qwen3.config)
    for name, value in [("rms_norm_eps", 1e-5), ("hidden_act", "gelu"), ("intermediate_size", 128), ("attention_bias", True)]:
        assert config_digest(build(BY_NAME["qwen3"], **{name: value}).config) != digest, name
    for name, value in [
        ("bos_token_id", 5),
        ("attention_dropout", 0.5),
        ("max_position_embeddings", 8192),
        ("use_cache", False),
    ]:
        assert config_digest(build(BY_NAME["qwen3"], **{name: value}).config) == digest, name
    moved = build(BY_NAME["qwen3"], torch.bfloat16).config
    moved._name_or_path = "/somewhere/else"
    assert config_digest(moved) == digest


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_the_digest_is_the_same_on_every_version(name: str) -> None:
    assert config_digest(build(BY_NAME[name]).config) == DIGESTS[name]


def test_a_model_without_layers_by_name_has_no_identity() -> None:
    model = build(BY_NAME["qwen3"])
    model.model.floors = model.model.layers
    del model.model.layers
    with pytest.raises(UnsupportedModelError, match="qwen3: found no decoder layers by name, needed their weights"):
        weight_fingerprint(model)


def test_quantisation_is_named(qwen3: Any) -> None:
    class Config:
        quantization_config: Any = None

    config = Config()
    assert quantisation(config) is None
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert quantisation(config) == "gptq"
    assert quantisation(qwen3.config) is None


# Tokenizers


def trained(merges: list[tuple[str, str]], **normalizer: Any) -> Any:
    """A real byte-pair tokenizer over a few letters."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*"abcdefghijklmnopqrstuvwxyz", "th", "he", "the", "qu", "ow", "fo", "ox", "[UNK]"]
    fast = Fast(models.BPE({word: number for number, word in enumerate(words)}, merges, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer:
        fast.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]")


MERGES = [("t", "h"), ("h", "e"), ("th", "e"), ("q", "u"), ("o", "w"), ("f", "o"), ("o", "x")]


def test_tokenizers_of_one_vocabulary_are_told_apart_by_what_they_do(qwen3: Any) -> None:
    """Other merges, or another normaliser: the vocabulary is the same to the last token."""
    own, swapped = trained(MERGES), trained([MERGES[1], MERGES[0], *MERGES[2:]])
    lowering = trained(MERGES, lowercase=True)
    assert own.get_vocab() == swapped.get_vocab() == lowering.get_vocab()
    spec = describe_model(qwen3, own, ref="org/name", revision=None)
    check_tokenizer(spec, trained(MERGES))
    for other in (swapped, lowering):
        assert tokenizer_fingerprint(other) == spec.tokenizer_fingerprint
        with pytest.raises(MismatchError, match=r"field tokenization_digest: .*this one has its vocabulary but splits text"):
            check_tokenizer(spec, other)
    old = dataclasses.replace(spec, tokenization_digest=None, encoding_digest=None)
    check_tokenizer(old, swapped)  # a bundle from before kvfit recorded it


def test_something_without_a_vocabulary_is_no_tokenizer(spec: ModelSpec) -> None:
    with pytest.raises(MismatchError, match="tokenizer: found str, needed a loaded tokenizer"):
        check_tokenizer(spec, "org/name")


# What older documents lack


def test_documents_from_before_the_digests_are_read(spec: ModelSpec) -> None:
    document = to_json(spec)
    assert set(document["content"]) == {"bits", "rounded", "n_ids", "derived", "transformers"}
    for name in ("content", "tokenization_digest", "encoding_digest"):
        document.pop(name, None)
    old = from_json(ModelSpec, document)
    assert old.content is None
    assert to_json(old) == document  # None is not written either
    with pytest.raises(SpecError, match=r"field content\.bits: found nothing, needed a value"):
        from_json(ModelSpec, {**document, "content": {}})


def test_version_1_has_no_digests(spec: ModelSpec) -> None:
    document = {"format_version": 1, "source": to_json(spec)}
    with pytest.raises(SpecError, match=r"field source\.content: found an unknown key, needed only the fields of"):
        read_mapper_spec(document)
