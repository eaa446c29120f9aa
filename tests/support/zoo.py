"""Tiny models with random weights, one per rotary scheme and cache layout, with what is known about each.

The expectations are written by hand and never read from kvfit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 96


@dataclass(frozen=True)
class Family:
    """A family and what kvfit must find.

    Attributes:
        name: unique name of the case.
        model_type: of transformers.
        config: keyword arguments beyond the common ones.
        pairing: of the rotated features.
        rotated_width: R; the head size is 16 unless `config` says otherwise.
        assignment: per layer the table's number, None for a layer that does not rotate.
        windows: per layer the window or None; None for no windows at all.
        scaling: attention scaling of table 0.
        note: for the table in the documentation.
        since: first version of transformers that can make the model.
        geometry: per layer heads, key size and value size, where they differ anywhere.
    """

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    pairing: str = "half"
    rotated_width: int = 16
    assignment: tuple[int | None, ...] = (0, 0, 0)
    windows: tuple[int | None, ...] | None = None
    scaling: float = 1.0
    note: str = ""
    since: str = "4.57"
    geometry: tuple[tuple[int, int, int], ...] | None = None

    @property
    def rotated_widths(self) -> set[int]:
        """Of its tables: where whole heads rotate, the sizes of the layers' keys."""
        if self.rotated_width != 16 or self.geometry is None:
            return {self.rotated_width}
        return {size for _, size, _ in self.geometry}


def _yarn(**more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **more}}


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_OUTER = {"sliding_window": 24, "layer_types": [_SLIDING, _FULL, _SLIDING]}
_LAST_FULL = {"sliding_window": 24, "layer_types": [_SLIDING, _SLIDING, _FULL]}
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
# Three layers with keys and values, and two that read those of the second and the third.
_READING = {
    "sliding_window": 24, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
}  # fmt: skip
_3N = {"intermediate_size": [64] * 5, "activation_sparsity_pattern": [0.0] * 5, "laurel_rank": 4}

FAMILIES = [
    Family("qwen2", "qwen2", note="biased projections"),
    Family(
        "qwen2-window",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        windows=(None, 24, 24),
    ),
    Family("qwen3", "qwen3", {"head_dim": 16, "rope_theta": 1e6}, note="normalised keys"),
    Family("qwen3-moe", "qwen3_moe", {"head_dim": 16, "num_experts": 4, **_MOE}),
    Family("llama", "llama"),
    Family("llama-llama3", "llama", {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 256}}),
    Family("llama-linear", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    Family("llama-yarn", "llama", _yarn(), scaling=1.1386294361119891, note="attention factor 0.1 ln(factor) + 1"),
    Family("llama-yarn-1.0", "llama", _yarn(attention_factor=1.0)),
    Family("llama-yarn-1.277", "llama", _yarn(attention_factor=1.277), scaling=1.277),
    Family("mistral", "mistral", {"sliding_window": None}),
    Family("mistral-window", "mistral", {"sliding_window": 24}, windows=(24, 24, 24)),
    Family("ministral", "ministral", {"head_dim": 16, "rope_theta": 1e4, **_OUTER}, windows=(24, None, 24)),
    Family("ministral-full", "ministral", {"head_dim": 16, "sliding_window": 24, "layer_types": [_FULL] * 3}),
    Family("gemma2", "gemma2", {"head_dim": 16, "sliding_window": 24}, windows=(24, None, 24), note="soft-capped attention"),
    Family(
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, **_OUTER, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        assignment=(0, 1, 0),
        windows=(24, None, 24),
        note="a table per layer type",
    ),
    Family(
        "gemma4",
        "gemma4_text",
        {**_GEMMA4, **_LAST_FULL},
        assignment=(0, 0, 1),
        windows=(24, 24, None),
        note="heads of another size in full-attention layers",
        since="5.19",
        geometry=((2, 16, 16), (2, 16, 16), (2, 32, 32)),
    ),
    Family(
        "gemma4-fewer",
        "gemma4_text",
        {**_GEMMA4, **_LAST_FULL, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        assignment=(0, 0, 1),
        windows=(24, 24, None),
        note="fewer and larger heads in full-attention layers, values made of keys",
        since="5.19",
        geometry=((2, 16, 16), (2, 16, 16), (1, 32, 32)),
    ),
    Family(
        "gemma4-shared",
        "gemma4_text",
        {**_GEMMA4, **_READING},
        assignment=(0, 1, 0),
        windows=(24, None, 24),
        note="the last two of five layers read keys and values of earlier ones",
        since="5.19",
        geometry=((2, 16, 16), (2, 32, 32), (2, 16, 16)),
    ),
    Family(
        "gemma3n",
        "gemma3n_text",
        {"head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, **_READING, **_3N},
        assignment=(0, 1, 0),
        windows=(24, None, 24),
        note="the last two of five layers read keys and values of earlier ones",
        since="5.19",
    ),
    Family(
        "mimo-v2-flash",
        "mimo_v2_flash",
        {
            "head_dim": 16,
            "v_head_dim": 8,
            **_OUTER,
            "mlp_layer_types": ["dense"] * 3,
            "rope_parameters": {
                _FULL: {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        },
        rotated_width=8,
        assignment=(0, 1, 0),
        windows=(24, None, 24),
        note="more heads in windowed layers, values smaller than keys",
        since="5.24",
        geometry=((4, 16, 8), (2, 16, 8), (4, 16, 8)),
    ),
    Family("phi3", "phi3", {"sliding_window": None, "pad_token_id": 0}, note="fused projections"),
    Family(
        "phi3-partial", "phi3", {"sliding_window": None, "partial_rotary_factor": 0.75, "pad_token_id": 0}, rotated_width=12
    ),
    Family("glm", "glm", {"head_dim": 16, "pad_token_id": 0}, pairing="interleaved", rotated_width=8),
    Family("glm4", "glm4", {"head_dim": 16, "pad_token_id": 0}, pairing="interleaved", rotated_width=8),
    Family("cohere", "cohere", {}, pairing="interleaved"),
    Family("cohere-qk-norm", "cohere", {"use_qk_norm": True}, pairing="interleaved", note="normalised keys"),
    Family(
        "cohere2",
        "cohere2",
        {"head_dim": 16, **_LAST_FULL},
        pairing="interleaved",
        assignment=(0, 0, None),
        windows=(24, 24, None),
        note="full-attention layers do not rotate",
    ),
    Family("smollm3", "smollm3", {"no_rope_layers": [1, 1, 0], "pad_token_id": 0}, assignment=(0, 0, None)),
    Family(
        "exaone4",
        "exaone4",
        {"head_dim": 16, "sliding_window_pattern": 3, **_LAST_FULL},
        assignment=(0, 0, None),
        windows=(24, 24, None),
        note="full-attention layers do not rotate",
    ),
    Family("olmo2", "olmo2", note="keys normalised over all heads"),
    Family(
        "olmo3",
        "olmo3",
        {**_OUTER, **_yarn()},
        assignment=(0, 1, 0),
        windows=(24, None, 24),
        note="YaRN on full-attention layers only",
    ),
    Family("granite", "granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    Family("stablelm", "stablelm", {"partial_rotary_factor": 0.25}, rotated_width=4, note="25 % rotated"),
    Family("stablelm-qk-norm", "stablelm", {"partial_rotary_factor": 0.25, "qk_layernorm": True}, rotated_width=4, since="5.0"),
    Family(
        "gpt-neox",
        "gpt_neox",
        {"rotary_pct": 0.25, "num_key_value_heads": None},
        rotated_width=4,
        note="fused projections, interleaved by head",
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_yarn(), **_OUTER},
        windows=(24, None, 24),
        scaling=1.1386294361119891,
        note="attention sinks; cosines of half the width",
    ),
]

# Families that nobody listed above: kvfit has no code for them, the self-check decides.
UNLISTED = [
    Family("gemma", "gemma", {"head_dim": 16}),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "sliding_window": None}),
    Family("olmo", "olmo"),
    Family("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("starcoder2", "starcoder2", {"sliding_window": None}),
    Family("phi", "phi", {"partial_rotary_factor": 0.5}, rotated_width=8),
    Family("helium", "helium", {"head_dim": 16}, pairing="interleaved"),
    Family("ernie4_5", "ernie4_5", {"head_dim": 16}, pairing="interleaved"),
    Family("nemotron", "nemotron", {"partial_rotary_factor": 0.5}, rotated_width=8),
    Family("persimmon", "persimmon", {"num_key_value_heads": None, "partial_rotary_factor": 0.5}, rotated_width=8),
    Family(
        "gptj",
        "gptj",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 4096, "num_key_value_heads": None},
        pairing="interleaved",
        rotated_width=8,
        note="frequencies from its table of sines",
    ),
    Family(
        "codegen",
        "codegen",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 4096, "num_key_value_heads": None},
        pairing="interleaved",
        rotated_width=8,
        note="frequencies from its table of sines",
    ),
    Family("nanochat", "nanochat", note="keys normalised, without weights, after the rotation", since="5.0"),
    Family(
        "gpt2",
        "gpt2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 4096, "num_key_value_heads": None},
        assignment=(None, None, None),
    ),
]


def build(family: Family, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """The family's model: 3 layers, 4 query heads on 2 key/value heads, hidden 64 (head size 16), vocabulary 96."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _skip_before(family.since)
    common = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    config = AutoConfig.for_model(family.model_type, **{**common, **family.config, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # the usual initialisation leaves keys so small that half of them would round to nothing
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4)
            elif parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


class Tokenizer:
    """A token-to-id map, the part of a tokenizer that identity looks at."""

    def __init__(self, size: int = VOCABULARY) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        """One token per id."""
        return {f"token {number}": number for number in range(self.size)}


@dataclass(frozen=True)
class Refused:
    """A model that must be refused, the layer that the message must name (None: all), and words of the reason."""

    name: str
    model_type: str
    config: dict[str, Any]
    layer_index: int | None
    reason: str
    what: str  # for the table in the documentation
    since: str = "4.57"


_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "num_key_value_heads": 4, **_MOE,
}  # fmt: skip
_LINEAR = {
    "head_dim": 16, "layer_types": [_FULL, "linear_attention", _FULL], "num_experts": 4, "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 16, **_MOE,
}  # fmt: skip
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_LONG = {"original_max_position_embeddings": 512, "rope_scaling": _LONGROPE, "sliding_window": None, "pad_token_id": 0}

REFUSED = [
    Refused("deepseek-v2", "deepseek_v2", _LATENT, None, "latent attention", "latent attention (MLA)"),
    Refused("deepseek-v3", "deepseek_v3", _LATENT, None, "latent attention", "latent attention (MLA)"),
    Refused("qwen3-next", "qwen3_next", _LINEAR, 1, "linear_attention owns no keys", "linear-attention hybrid"),
    Refused("lfm2", "lfm2", {"layer_types": [_FULL, "conv", _FULL]}, 1, "conv owns no keys", "convolution hybrid"),
    Refused(
        "llama4",
        "llama4_text",
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64},
        0,
        "which keys a token sees depends on where its chunk begins",
        "chunked attention",
    ),
    Refused(
        "mllama",
        "mllama_text_model",
        {"cross_attention_layers": [1], "rope_scaling": {"rope_type": "default"}},
        1,
        "cross attention",
        "cross attention",
    ),
    Refused("t5", "t5", {"d_kv": 16, "decoder_start_token_id": 0}, None, "cross attention", "encoder and decoder"),
    Refused(
        "llama-dynamic",
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        None,
        "dynamic rotary",
        "dynamic NTK scaling",
    ),
    Refused("phi3-longrope", "phi3", _LONG, None, "longrope rotary", "longrope"),
    Refused(
        "hunyuan", "hunyuan_v1_dense", {"head_dim": 16}, 0, "changed after the rotation", "keys normalised after the rotation"
    ),
    Refused(
        "qwen2-vl",
        "qwen2_vl",
        {"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]}},
        None,
        "several positions",
        "multimodal rotary embedding",
    ),
    Refused(
        "qwen2-vl-unnamed",
        "qwen2_vl",
        {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
        None,
        "several positions",
        "multimodal rotary embedding that the configuration does not name",
        "5.0",
    ),
    Refused("paligemma", "paligemma", {}, 0, "its positions start at 1", "positions from 1"),
]


def build_refused(refused: Refused) -> Any:
    """The model, by the class that transformers has for it."""
    import transformers

    _skip_before(refused.since)
    if refused.name == "t5":
        return _seeded(
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(vocab_size=VOCABULARY, d_model=64, num_layers=2, **refused.config),
        )
    common = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    if refused.name == "mllama":
        from transformers.models.mllama.configuration_mllama import MllamaTextConfig

        return _seeded(transformers.MllamaForCausalLM, MllamaTextConfig(**common, **refused.config))
    if refused.model_type in ("qwen2_vl", "paligemma"):
        return multimodal(refused.model_type, {**common, **refused.config})
    return build(Family(refused.name, refused.model_type, refused.config))


def multimodal(model_type: str, text: dict[str, Any], **config: Any) -> Any:
    """A tiny model that reads images too: `text` for its decoder, `config` for the wrapper."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {
        "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": text["hidden_size"], "num_heads": 2, "patch_size": 4},
        "paligemma": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_use_head": False,
        },
        "llava": {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 8,
        },
    }[model_type]  # fmt: skip
    more = {"paligemma": {"projection_dim": 64, "hidden_size": 64, "image_token_index": 1}}.get(model_type, {})
    kind = {"qwen2_vl": "qwen2_vl_text", "paligemma": "gemma", "llava": "llama"}[model_type]
    whole = {"text_config": {"model_type": kind, "head_dim": 16, **text}, "vision_config": vision, **more, **config}
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **whole)).eval()


def _seeded(cls: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return cls(config).eval()


def _skip_before(version: str) -> None:
    import pytest
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"transformers {transformers.__version__} cannot make this model, needed {version}")
