"""Which model this is: the `ModelSpec` of a loaded model, its fingerprints, and the check of a model against a spec."""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import family, layer_path, loaded_tensor, text_config, unwrapped
from kvfit.model.probe import frequency_dtype, probe, rotary_tables
from kvfit.spec import ModelSpec

_SAMPLES = 64
_ENDS = 16
_MIXTURE = re.compile(r"expert|moe|router|(^|\.)gate$")
_DECIMALS = 9  # significant digits of a configured number; more than any file carries, fewer than a float32 invents


def describe_model(model: Any, tokenizer: Any, *, ref: str, revision: str | None) -> ModelSpec:
    """The spec of a loaded model, with its rotary embedding proved on two short passes.

    Args:
        model: a causal language model of transformers, neither compiled nor wrapped.
        tokenizer: its tokenizer.
        ref: what to call it: ``org/name``, ``demo:source`` or the name of a folder.
        revision: commit hash, None for what has none.

    Raises:
        UnsupportedModelError: what cannot be described or proved; names family, layer and reason.
    """
    seen = probe(model)
    config = text_config(model)
    return ModelSpec(
        ref=ref,
        revision=revision,
        family=family(model),
        n_layers=seen.n_layers,
        n_heads=seen.n_heads,
        head_dim=seen.head_dim,
        n_query_heads=int(config.num_attention_heads),
        windows=caches.layer_windows(model, seen.n_layers),
        rope=seen.rope,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        config_digest=config_digest(model.config),
        weight_fingerprint=weight_fingerprint(model),
        dtype=seen.dtype,
        quantisation=quantisation(model.config),
    )


def check_model(spec: ModelSpec, model: Any, tokenizer: Any = None) -> None:
    """Refuse a model that is not the one a spec describes. Takes milliseconds; nothing is run.

    Cheap and telling fields come first: family, geometry, rotary tables, configuration, quantisation, weights, tokenizer.

    Args:
        spec: what was recorded when the map was fitted.
        model: the loaded model; `torch.compile`'s wrapper is seen through.
        tokenizer: checked too where given.

    Raises:
        MismatchError: names the field.
    """
    require_model(model, f"model for {spec.ref}")
    model = unwrapped(model)
    config = text_config(model)
    _compare(spec, "family", spec.family, family(model))
    _compare(spec, "n_layers", spec.n_layers, int(config.num_hidden_layers))
    _compare(spec, "n_query_heads", spec.n_query_heads, int(config.num_attention_heads))
    heads, head_dim = _configured_heads(config)
    _compare(spec, "n_heads", spec.n_heads, spec.n_heads if heads is None else heads)
    _compare(spec, "head_dim", spec.head_dim, spec.head_dim if head_dim is None else head_dim)
    _compare(spec, "windows", spec.windows, caches.layer_windows(model, spec.n_layers))
    tables = rotary_tables(model)
    for index, table in enumerate(spec.rope.tables):
        if (table.inverse_frequencies, table.attention_scaling) not in tables:
            cast = frequency_dtype(model)
            if cast is not None:
                raise MismatchError(
                    f"field rope.tables[{index}]: found inverse frequencies rounded to {cast}, needed torch.float32: load the "
                    "model with from_pretrained(dtype=...) instead of casting it afterwards"
                )
            raise MismatchError(
                f"field rope.tables[{index}]: found a model with other inverse frequencies or attention scaling, needed those "
                f"of {spec.ref}: load it with its own configuration, and with a transformers that is new enough to read that"
            )
    _compare(spec, "config_digest", spec.config_digest, config_digest(model.config))
    _compare(spec, "quantisation", spec.quantisation, quantisation(model.config))
    _compare(spec, "weight_fingerprint", spec.weight_fingerprint, weight_fingerprint(model))
    if tokenizer is not None:
        check_tokenizer(spec, tokenizer)


def check_tokenizer(spec: ModelSpec, tokenizer: Any) -> None:
    """Refuse a tokenizer that is not the one of the model that a spec describes.

    Raises:
        MismatchError: it is another, or none.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise MismatchError(
            f"tokenizer: found {type(tokenizer).__name__}, needed a loaded tokenizer: AutoTokenizer.from_pretrained(...)"
        )
    _compare(spec, "tokenizer_fingerprint", spec.tokenizer_fingerprint, tokenizer_fingerprint(tokenizer))


def require_model(model: Any, name: str) -> None:
    """Refuse what is no loaded model of transformers, such as its name.

    Raises:
        MismatchError: says what it is.
    """
    inner = unwrapped(model)
    if not isinstance(inner, torch.nn.Module) or not hasattr(inner, "config"):
        raise MismatchError(
            f"{name}: found {type(inner).__name__}, needed a loaded model: AutoModelForCausalLM.from_pretrained(...)"
        )


class WeightStamp:
    """Notices that a checked model is no longer what it was: weights written in place, replaced or moved, an adapter put on.

    Compares which tensors there are, how often each was written, and a few numbers of the first and the last layers, so it
    takes about a millisecond and waits for a device once. The numbers are for what torch does not count: peft merges an adapter
    through ``tensor.data``. What is written so to layers in the middle alone goes unnoticed.
    """

    def __init__(self, model: Any) -> None:
        weights = _tensors(model)
        self._parts = [(weakref.ref(weight), _state(weight)) for weight in weights]
        self._numbers = _numbers(weights)

    def holds(self, model: Any) -> bool:
        """Whether nothing was written since."""
        weights = _tensors(model)
        return (
            len(weights) == len(self._parts)
            and all(
                # Accelerate puts a new tensor in the place of an offloaded one after every pass.
                (weight.is_meta or kept() is weight) and state == _state(weight)
                for weight, (kept, state) in zip(weights, self._parts, strict=True)
            )
            and _numbers(weights) == self._numbers
        )


def _tensors(model: Any) -> list[Tensor]:
    """Parameters and buffers: inverse frequencies and quantised weights are among the latter."""
    model = unwrapped(model)
    return [*model.parameters(), *model.buffers()]


def _numbers(weights: list[Tensor]) -> list[float]:
    """Four numbers of each of the first and last matrices, a layer or more at either end, as they are."""
    matrices = [weight for weight in weights if weight.dim() > 1 and weight.is_floating_point() and not weight.is_meta]
    ends = matrices[:_ENDS] + matrices[_ENDS:][-_ENDS:]
    found: dict[torch.device, list[Tensor]] = {}
    for weight in ends:
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // 4)
        step -= step % 2 == 0  # an even step would stay in one column of a matrix
        found.setdefault(weight.device, []).append(flat[::step][:4].float())
    return [number for parts in found.values() for number in torch.cat(parts).tolist()]


def _state(weight: Tensor) -> tuple[int, int]:
    """How often it was written, and where it is."""
    if weight.is_meta:
        return weight.numel(), 0
    return (0 if weight.is_inference() else weight._version), weight.data_ptr()


_DIGEST = re.compile(r"[0-9a-f]{64}")


def _compare(spec: ModelSpec, field: str, needed: object, found: object) -> None:
    if needed != found:
        at = f"{spec.ref}@{spec.revision[:12]}" if spec.revision else spec.ref
        advice = {
            "tokenizer_fingerprint": f"use the tokenizer of {at}",
            "weight_fingerprint": f"load the weights of {at} (not in float16 if they are bfloat16), or fit a mapper for these",
        }.get(field, f"load {at} with its own configuration, or fit a mapper for this model")
        raise MismatchError(
            f"field {field}: found {_short(found)}, needed {_short(needed)} as {spec.ref} had when the map was fitted: {advice}"
        )


def _short(value: object) -> str:
    """A digest by its first digits, which are enough to tell two apart."""
    return str(value)[:12] if isinstance(value, str) and _DIGEST.fullmatch(value) else str(value)


def _configured_heads(config: Any) -> tuple[int | None, int | None]:
    heads = getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None)
    return (heads if isinstance(heads, int) else None), (head_dim if isinstance(head_dim, int) else None)


def quantisation(config: Any) -> str | None:
    """Name of the quantisation method of a model, None for none."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Digest (SHA-256) of the token-to-id map. Padding of the embedding matrix beyond the tokenizer does not enter."""
    tokens = sorted((int(number), str(token)) for token, number in tokenizer.get_vocab().items())
    return _digest(tokens)


def weight_fingerprint(model: Any) -> str:
    """Digest (SHA-256) of fixed, evenly spread slices of the decoder's weights, each rounded to bfloat16.

    64 numbers of every parameter of every decoder layer (key and value projections, fused ones included, queries, norms, MLPs)
    and of the input embedding; experts and their router are left out, as their layout differs between versions. Rounding first
    makes a bfloat16 and a float32 load of one checkpoint agree; a float16 load of a bfloat16 one loses bits and does not.

    Raises:
        UnsupportedModelError: the weights are not in memory (meta device, offloaded to disk).
    """
    model = unwrapped(model)
    parts: list[Tensor] = []
    for tensor in _weights(model):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        step -= step % 2 == 0  # an even step would stay in one column of a matrix
        sample = flat[::step][:_SAMPLES]
        parts.append(sample.to(torch.bfloat16).view(torch.int16) if tensor.is_floating_point() else sample.to(torch.int16))
    digest = hashlib.sha256()
    # One copy per device instead of one per weight.
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
    """Embedding and decoder layers' tensors, in an order that does not depend on the prefix of their names."""
    yield loaded_tensor(model, model.get_input_embeddings(), "weight")
    layers: dict[int, list[tuple[str, Any, str]]] = {}
    for path, module in model.named_modules():
        found = layer_path(path)
        if found is None or _MIXTURE.search(path):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            # Quantised weights are buffers; so are causal masks and frequencies, which are no weights.
            if tensor is not None and tensor.numel() > 1 and tensor.dtype != torch.bool and "inv_freq" not in name:
                layers.setdefault(found[0], []).append((f"{found[1]}.{name}", module, name))
    if not layers:
        raise UnsupportedModelError(f"{family(model)}: found no decoder layers by name, needed their weights as identity")
    for layer_index in sorted(layers):
        for _, module, name in sorted(layers[layer_index], key=lambda item: item[0]):
            yield loaded_tensor(model, module, name)


# Values that change the arithmetic, by the words in their names. The rest (token ids, dropout, initialisation, longest
# position, generation, file versions) leaves keys and values alone, and differs between versions of transformers.
_MATTERS = re.compile(
    r"hidden|intermediate|num_.*(layers|heads|groups|experts)|head_dim|eps|activation|_act(_fn)?$|bias|scal|multiplier|softcap"
    r"|experts|topk|clip|lora_rank|parallel|residual|no_rope|qk_(layer)?norm|query_pre_attn|alibi"
)
_NOISE = re.compile(r"^_|dropout|initializer|output_|aux|rope_scaling|use_cache|pad|transformers|fused|beam|hidden_states")
_RENAMED = {"num_local_experts": "num_experts"}


def config_digest(config: Any) -> str:
    """Digest (SHA-256) of the configuration values that change what the model computes.

    Not in it: names, versions, dtype, token ids, dropout, the padded size of the vocabulary, and what `ModelSpec` records in
    fields of its own: rotary parameters and windows. Values that are None or False are left out, so that a version of
    transformers that adds an option which is off does not change the digest; whole numbers and fractions are written alike.
    """
    config = config.get_text_config(decoder=True)
    values = config.to_dict()
    kept: dict[str, Any] = {"model_type": values.get("model_type")}
    for name, value in values.items():
        if _MATTERS.search(name) and not _NOISE.search(name) and value is not None and value is not False:
            kept[_RENAMED.get(name, name)] = _plain(value)
    heads = values.get("num_attention_heads")
    if "head_dim" not in kept and isinstance(heads, int) and isinstance(values.get("hidden_size"), int):
        kept["head_dim"] = _plain(values["hidden_size"] // heads)  # what every family does that leaves it out
    return _digest(kept)


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


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
