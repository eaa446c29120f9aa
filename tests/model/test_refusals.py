"""What kvfit cannot prove right is refused, naming family, layer and reason; nothing falls through to a wrong map."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import FAMILIES, REFUSED, UNLISTED, Refused, Tokenizer, build, build_refused

from kvfit.errors import KvfitError, UnsupportedModelError
from kvfit.fit.capture.activations import check_positions
from kvfit.fit.capture.inspect import inspect_model
from kvfit.model import rope_probe as probing
from kvfit.model.axes import refuse_several_axes
from kvfit.model.decoder import decoder_parameters
from kvfit.model.identity import check_model, describe_model
from kvfit.model.rope_probe import probe
from kvfit.model.tables import frequencies_of_sines

QWEN3 = next(family for family in FAMILIES if family.name == "qwen3")
LLAMA = next(family for family in FAMILIES if family.name == "llama")


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_refused_by_name(refused: Refused) -> None:
    model = build_refused(refused)
    with pytest.raises(UnsupportedModelError) as caught:
        describe_model(model, Tokenizer(), ref="org/name", revision=None)
    message = str(caught.value)
    where = "all layers" if refused.layer_index is None else f"layer {refused.layer_index}:"
    assert message.startswith(model.config.model_type)
    assert where in message
    assert refused.reason in message
    assert "\n" not in message


def refusal_of(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        probe(model)
    return str(caught.value)


def test_compiled_models() -> None:
    assert "compiled" in refusal_of(torch.compile(build(QWEN3)))
    model = build(QWEN3)
    model.compile()
    assert "compiled" in refusal_of(model)


def test_adapters() -> None:
    class Adapted(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.lora_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, base_layer.in_features))})

        def forward(self, states: Tensor) -> Tensor:
            return self.base_layer(states)

    model = build(QWEN3)
    probe(model)
    model.model.layers[1].self_attn.q_proj = Adapted(model.model.layers[1].self_attn.q_proj)
    assert "carries an adapter: merge it first" in refusal_of(model)


def test_a_rotation_that_no_table_of_the_model_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRotaryEmbedding, "forward", lambda self, x, position_ids: original(self, x, position_ids * 2)
    )
    assert "llama, layer 0: no rotary table of the model with either pairing" in refusal_of(build(LLAMA))


def test_a_rotation_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating inline, under no name that can be watched, must not pass for a layer without rotation."""
    from transformers.models.llama import modeling_llama

    function = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "turn", function, raising=False)
    source = modeling_llama.LlamaAttention.forward
    while hasattr(source, "__wrapped__"):
        source = source.__wrapped__
    code = source.__code__.replace(
        co_names=tuple("turn" if name == "apply_rotary_pos_emb" else name for name in source.__code__.co_names)
    )
    hidden = type(source)(code, source.__globals__, "forward", source.__defaults__, source.__closure__)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", hidden)
    assert "llama, layer 0: its keys reach the cache by a way that cannot be seen" in refusal_of(build(LLAMA))


def test_a_norm_after_a_rotation_out_of_sight() -> None:
    """The norm's output is the cached key, but its input was rotated unseen: the norm must not count as a projection."""
    from kvfit.model.trace import LayerTrace, Output

    keys, rotated, projected = torch.randn(3, 1, 2, 5, 4)
    out = projected.transpose(1, 2).reshape(1, 5, 8)
    norm, projection = Output(rotated, keys, False), Output(torch.randn(1, 5, 8), out, True)
    with pytest.raises(ValueError, match="cannot be seen"):
        LayerTrace(0, keys, keys, (), (projection, norm)).given_keys()
    honest = Output(projected, keys, False)
    assert LayerTrace(0, keys, keys, (), (projection, honest)).given_keys() is None
    assert LayerTrace(0, projected, keys, (), (projection,)).given_keys() is None


def test_frequencies_that_change_with_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaRotaryEmbedding.forward

    def growing(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        if int(position_ids.max()) > 1000:
            self.inv_freq = self.inv_freq / 2
        return original(self, x, position_ids)

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", growing)
    assert "change with the length of the input" in refusal_of(build(LLAMA))


def test_a_layer_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 2:
            kwargs.update({name: None for name in ("cache", "past_key_values") if name in kwargs})
        return original(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forgetful)
    assert "llama, layer 2: the layer owns no keys and values" in refusal_of(build(LLAMA))


def test_a_layer_that_caches_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    def stuttering(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 1:
            original(self, *args, **{**kwargs, "attention_mask": None})
        return original(self, *args, **{**kwargs, "attention_mask": None})

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", stuttering)
    assert "llama, layer 1: the layer cached keys twice in one pass" in refusal_of(build(LLAMA))


def test_keys_and_values_of_unlike_shapes() -> None:
    model = build(LLAMA)
    model.model.layers[1].self_attn.v_proj = nn.Linear(64, 64)
    found = "found keys and values of shapes (1, 2, 8, 16) and (1, 4, 8, 16), needed one number of heads"
    assert f"llama, layer 1: {found}" in refusal_of(model)


def test_a_layer_that_rotates_at_some_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    def near_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        cos = (kwargs.get("position_embeddings") or args[1])[0]
        if self.layer_idx != 2 or float(cos[0, 0, 0]) == 1.0:  # at position 0
            return original(self, *args, **kwargs)
        function = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = lambda q, k, *_args, **_kwargs: (q, k)
        try:
            return original(self, *args, **kwargs)
        finally:
            modeling_llama.apply_rotary_pos_emb = function

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", near_only)
    assert "llama, layer 2: it rotates at some positions and not at others" in refusal_of(build(LLAMA))


def test_a_decoder_with_cross_attention_layers() -> None:
    gpt2 = next(family for family in UNLISTED if family.name == "gpt2")
    message = refusal_of(build(gpt2, add_cross_attention=True))
    assert message.startswith("gpt2, all layers: cross attention keeps keys and values of an encoder")


def test_a_model_without_frequencies_is_not_given_any() -> None:
    """No theta is ever assumed: a rotating model whose module holds no frequencies is refused."""
    model = build(LLAMA)
    tables = model.model.rotary_emb
    frequencies = tables.inv_freq
    for name in [name for name in tables._buffers if name.endswith("inv_freq")]:
        del tables._buffers[name]
    tables.__dict__["inv_freq"] = frequencies  # a plain attribute, out of sight
    assert "llama, layer 0: it rotates, but no module of the model holds inverse frequencies (inv_freq)" in refusal_of(model)


def test_a_pass_that_fails_is_a_refusal_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(LLAMA)

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(model.model.norm, "forward", broken)
    assert "a pass over 8 tokens failed: RuntimeError: no kernel image" in refusal_of(model)


def test_watching_leaves_the_model_as_it_was() -> None:
    from transformers.models.qwen3 import modeling_qwen3

    before = modeling_qwen3.apply_rotary_pos_emb
    model = build(QWEN3)
    probe(model)
    assert modeling_qwen3.apply_rotary_pos_emb is before
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(UnsupportedModelError):
        probe(build_refused(next(refused for refused in REFUSED if refused.name == "hunyuan")))
    assert modeling_qwen3.apply_rotary_pos_emb is before


# Watching, not configuration strings


def test_three_axes_are_seen_where_no_configuration_names_them() -> None:
    """The negative control: taken for a model of one axis, keys of one token at two such positions would differ."""
    model = build_refused(next(refused for refused in REFUSED if refused.name == "qwen2-vl-unnamed"))
    assert "mrope_section" not in str(getattr(model.config.get_text_config(), "rope_parameters", None))
    assert "several positions" in refusal_of(model)


def test_one_axis_is_not_taken_for_several() -> None:
    for family in FAMILIES + UNLISTED:
        refuse_several_axes(build(family), 1031)


def test_frequencies_come_back_from_a_table_of_sines() -> None:
    wanted = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
    angles = torch.arange(2048).float()[:, None] * wanted
    found = frequencies_of_sines(torch.cat([angles.sin(), angles.cos()], 1))
    assert found is not None
    off = (torch.tensor(found) - wanted).abs()
    assert float((off * 2048).max()) < 1e-6  # radians at the last position
    assert frequencies_of_sines(torch.cat([angles.cos(), angles.sin()], 1)) is None
    assert frequencies_of_sines(torch.randn(2048, 64)) is None
    assert frequencies_of_sines(angles[:, :1]) is None


def test_a_norm_with_weights_after_the_rotation_does_not_pass() -> None:
    """The negative control of nanochat: weights that differ by feature do not commute with a rotation."""
    nanochat = next(family for family in UNLISTED if family.name == "nanochat")
    model = build(nanochat)
    probe(model)
    norm = model.model.layers[1].self_attn.k_norm
    weights = 1 + 0.2 * torch.randn(16)
    plain = type(norm).forward
    norm.__class__ = type("WeighingNorm", (type(norm),), {"forward": lambda self, states: plain(self, states) * weights})
    assert "nanochat, layer 1: no rotary table of the model with either pairing" in refusal_of(model)


class Raising:
    """A configuration whose per-layer values raise where they are asked for as one."""

    def __init__(self, config: Any) -> None:
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        if name in ("num_kv_shared_layers", "add_cross_attention", "kv_lora_rank", "cross_attention_layers"):
            raise RuntimeError(f"{name} differs between layers")
        return getattr(self.__dict__["config"], name)


def test_a_configuration_that_raises_for_values_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfit.model import decoder
    from kvfit.model.decoder import setting

    config = Raising(build(QWEN3).config)
    assert setting(config, "num_kv_shared_layers") is None
    assert setting(config, "num_attention_heads") == 4
    monkeypatch.setattr(probing, "text_config", lambda model: Raising(decoder.text_config(model)))
    assert probe(build(QWEN3)).n_layers == 3


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "num_attention_heads",
            "llama, all layers: found no single num_attention_heads in its configuration, needed one number for all of them",
        ),
        ("num_hidden_layers", "num_hidden_layers"),
        ("vocab_size", "llama, all layers: found no single vocab_size in its configuration, needed one number for all of them"),
        ("num_key_value_heads", None),
        ("head_dim", None),
        ("hidden_size", None),
        ("max_position_embeddings", None),
        ("rms_norm_eps", None),
    ],
)
def test_each_value_may_differ_by_layer(name: str, told: str | None) -> None:
    """The configurations of newer transformers raise where such a value is asked for as one: a reason, never a traceback.

    What only describes the model does not matter; what is known from watching it is not asked for.
    """
    model, tokenizer = build(LLAMA), Tokenizer()
    spec, weights = describe_model(model, tokenizer, ref="x", revision=None), decoder_parameters(model)
    model.config.per_layer_config = {1: {name: getattr(model.config, name) + 1}}
    try:
        getattr(model.config, name)
    except Exception:
        pass
    else:
        pytest.skip("in this transformers a value has one name for all layers")
    found = inspect_model(model)
    assert found.supported == (told is None)
    assert decoder_parameters(model) == weights
    check_positions(model.config, "x", 64, "--seq-len")
    if told is None:
        again = describe_model(model, tokenizer, ref="x", revision=None)
        assert replace(again, config_digest="") == replace(spec, config_digest="")
        return
    assert told in str(found.reason)
    with pytest.raises(UnsupportedModelError, match=told):
        describe_model(model, tokenizer, ref="x", revision=None)
    with suppress(KvfitError):  # where the value does not matter to what is compared, this is the same model
        check_model(spec, model)


def test_a_table_of_sines_shorter_than_the_far_position_is_enough() -> None:
    gptj = next(family for family in UNLISTED if family.name == "gptj")
    assert probe(build(gptj, n_positions=64)).rope.tables[0].pairing == "interleaved"
