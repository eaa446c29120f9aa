"""Digests of a model's configuration, of its tokenizer, and of a sample of its weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import UnsupportedModelError
from kvfit.model.content import plain
from kvfit.model.decoder import family, layer_path, loaded_tensor, unwrapped

_SAMPLES = 64
_MIXTURE = re.compile(r"expert|moe|router|(^|\.)gate$")
_DECIMALS = 9  # significant digits of a configured number: more than any file has, fewer than a float32 makes up

# Tokenizers that share a vocabulary encode this text differently if their merges, normalisation, or treatment of spaces,
# digits, scripts or accents differ.
_TEXT = (
    "The quick brown fox jumps over the lazy dog. Été été, naïve coöperation; “quoted” — it's\n\n"
    "\tdef run(self, *args):\n        return {k: v for k, v in args}  # 3.14159, 1,234,567 and 0x7fff\r\n"
    "internationalization antidisestablishmentarianism HTTPResponse snake_case camelCase   three spaces "
    "今天天气很好。東京都 ひらがな 한국어 Здравствуйте αβγ مرحبا नमस्ते 😀🇩🇪 ﬁ ＡＢ x² + y₂ ≤ ∞ ½ "  # noqa: RUF001
    "https://example.org/a?b=c&d=%20 <tag attr='x'/> e.g. i.e. can't won't I'm you've cafe\u0301"
)
_SPACED = "  two spaces before,  between and after\t\n  "
# What special tokens look like. A vocabulary says which tokens it has, but not which of them are special.
_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_MARKS_PER_TEXT = 16  # so that no text is too long for a tokenizer that warns


def quantisation(config: Any) -> str | None:
    """Name of a model's quantisation method; None if it is not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Digest (SHA-256) of the token-to-id map, which does not depend on how far the embedding matrix is padded."""
    tokens = sorted((int(number), str(token)) for token, number in tokenizer.get_vocab().items())
    return digest(tokens)


def tokenization_digest(tokenizer: Any) -> str | None:
    """Digest (SHA-256) of the ids that a fixed text is encoded to, without special tokens; None if the tokenizer cannot encode.

    Two tokenizers with the same vocabulary but different merges or normalisers give different ids.
    """
    if not callable(getattr(tokenizer, "encode", None)):
        return None
    return digest([int(number) for number in tokenizer.encode(_TEXT, add_special_tokens=False)])


def telling_texts(tokenizer: Any) -> list[str]:
    """Texts that tokenizers of one vocabulary encode differently if anything in the way they encode differs.

    Besides the text of `tokenization_digest`, there are spaces at the ends of a text and, for every token that may be a special
    one, the token with and without spaces around it.
    """
    marks = sorted(token for token in tokenizer.get_vocab() if _MARK.fullmatch(token))
    runs = (marks[start : start + _MARKS_PER_TEXT] for start in range(0, len(marks), _MARKS_PER_TEXT))
    return [_TEXT, _SPACED, *("".join(f" a {mark} b{mark}c" for mark in run) for run in runs)]


def encoding_digest(tokenizer: Any) -> str | None:
    """Digest (SHA-256) of the ids that `telling_texts` are encoded to, with the special tokens that the tokenizer adds.

    It is None if the tokenizer cannot encode.
    """
    if not callable(getattr(tokenizer, "encode", None)):
        return None
    return digest([[int(number) for number in tokenizer.encode(text)] for text in telling_texts(tokenizer)])


def id_count(tokenizer: Any) -> int:
    """One more than the largest id that a tokenizer can produce."""
    return max((int(number) for number in tokenizer.get_vocab().values()), default=-1) + 1


def weight_fingerprint(model: Any) -> str:
    """Digest (SHA-256) of fixed, evenly spread slices of the decoder's weights, each rounded to bfloat16.

    It covers 64 numbers of every parameter of every decoder layer (key and value projections, fused or not, queries, norms,
    MLPs) and of the input embedding. Experts and their router are left out, because their layout differs between versions.
    Because of the rounding, a bfloat16 and a float32 load of one checkpoint agree. A float16 load of a bfloat16 checkpoint
    loses bits and does not agree.

    Raises:
        UnsupportedModelError: the weights are not in memory (meta device, offloaded to disk).
    """
    model = unwrapped(model)
    parts: list[Tensor] = []
    for tensor in _weights(model):
        flat = plain(model, tensor, "a weight").reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        step -= step % 2 == 0  # an even step would sample few columns of a matrix
        sample = flat[::step][:_SAMPLES]
        parts.append(sample.to(torch.bfloat16).view(torch.int16) if tensor.is_floating_point() else sample.to(torch.int16))
    digest = hashlib.sha256()
    # One transfer per device instead of one per weight.
    by_device: dict[torch.device, list[int]] = {}
    for index, part in enumerate(parts):
        by_device.setdefault(part.device, []).append(index)
    samples: list[Tensor] = list(parts)
    for indices in by_device.values():
        moved = torch.split(torch.cat([parts[i] for i in indices]).cpu(), [parts[i].numel() for i in indices])
        for index, part in zip(indices, moved, strict=True):
            samples[index] = part
    for part in samples:
        digest.update(part.numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def _weights(model: Any) -> Iterator[Tensor]:
    """The tensors of the embedding and the decoder layers, in an order that does not depend on the prefixes of their names."""
    yield loaded_tensor(model, model.get_input_embeddings(), "weight")
    layers: dict[int, list[tuple[str, Any, str]]] = {}
    for path, module in model.named_modules():
        found = layer_path(path)
        if found is None or _MIXTURE.search(path):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            # Quantised weights are buffers. Causal masks and rotary frequencies are buffers as well, but not weights.
            if tensor is not None and tensor.numel() > 1 and tensor.dtype != torch.bool and "inv_freq" not in name:
                layers.setdefault(found[0], []).append((f"{found[1]}.{name}", module, name))
    if not layers:
        raise UnsupportedModelError(f"{family(model)}: found no decoder layers by name, needed their weights as identity")
    for layer_index in sorted(layers):
        for _, module, name in sorted(layers[layer_index], key=lambda item: item[0]):
            yield loaded_tensor(model, module, name)


# Settings that change the arithmetic, by the words in their names. All others (token ids, dropout, initialisation, longest
# position, generation, file versions) do not affect keys and values, and differ between versions of transformers.
_MATTERS = re.compile(
    r"hidden|intermediate|num_.*(layers|heads|groups|experts)|head_dim|eps|activation|_act(_fn)?$|bias|scal|multiplier|softcap"
    r"|experts|topk|clip|lora_rank|parallel|residual|no_rope|qk_(layer)?norm|query_pre_attn|alibi"
)
_NOISE = re.compile(r"^_|dropout|initializer|output_|aux|rope_scaling|use_cache|pad|transformers|fused|beam|hidden_states")
_RENAMED = {"num_local_experts": "num_experts"}


def config_digest(config: Any) -> str:
    """Digest (SHA-256) of the configuration values that change what the model computes.

    It leaves out names, versions, dtype, token ids, dropout, the padded size of the vocabulary, and what `ModelSpec` has fields
    for: rotary parameters and windows. It also leaves out values that are None or False, so that the digest stays the same
    when a version of transformers adds an option that is off. An integer and a float of the same value are written alike.
    """
    config = config.get_text_config(decoder=True)
    values = config.to_dict()
    kept: dict[str, Any] = {"model_type": values.get("model_type")}
    for name, value in values.items():
        if _MATTERS.search(name) and not _NOISE.search(name) and value is not None and value is not False:
            kept[_RENAMED.get(name, name)] = _plain(value)
    heads = values.get("num_attention_heads")
    if "head_dim" not in kept and isinstance(heads, int) and isinstance(values.get("hidden_size"), int):
        kept["head_dim"] = _plain(values["hidden_size"] // heads)  # every family that leaves it out computes it this way
    return digest(kept)


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return f"{value:.{_DECIMALS}g}"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None and item is not False}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
