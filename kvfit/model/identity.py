"""Tell which model this is: describe a loaded model as a `ModelSpec`, and check a loaded model against one."""

from __future__ import annotations

import re
from typing import Any

import torch

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.content import content_of, derived_digest, part_digests
from kvfit.model.decoder import family, number, owning_layers, setting, text_config, unwrapped
from kvfit.model.digests import (
    config_digest,
    encoding_digest,
    id_count,
    quantisation,
    tokenization_digest,
    tokenizer_fingerprint,
    weight_fingerprint,
)
from kvfit.model.interference import active_dropout, adapted_module, check_hooks
from kvfit.model.rope_probe import dtype_name, probe
from kvfit.model.tables import frequency_dtype, rotary_tables
from kvfit.spec import Content, ModelSpec

_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")


def describe_model(model: Any, tokenizer: Any, *, ref: str, revision: str | None) -> ModelSpec:
    """The spec of a loaded model. Two short passes verify its rotary embedding; its weights are read once.

    Args:
        model: a causal language model of transformers, neither compiled nor wrapped.
        tokenizer: its tokenizer.
        ref: the model's ref: ``org/name``, ``demo:source`` or the name of a folder.
        revision: commit hash, None if it has none.

    Raises:
        UnsupportedModelError: the model cannot be described or verified; names family, layer and reason.
        MismatchError: forward hooks change what the model computes, or dropout is active.
    """
    refuse_interference(model, ref)
    seen = probe(model)
    return ModelSpec(
        ref=ref,
        revision=revision,
        family=family(model),
        n_layers=seen.n_layers,
        n_heads=seen.n_heads,
        head_dim=seen.head_dim,
        n_query_heads=number(model, "num_attention_heads"),
        windows=caches.layer_windows(model, seen.n_layers),
        rope=seen.rope,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        config_digest=config_digest(model.config),
        weight_fingerprint=weight_fingerprint(model),
        dtype=seen.dtype,
        quantisation=quantisation(model.config),
        content=content_of(model, id_count(tokenizer)),
        tokenization_digest=tokenization_digest(tokenizer),
        encoding_digest=encoding_digest(tokenizer),
        geometry=seen.geometry,
    )


def check_model(spec: ModelSpec, model: Any, tokenizer: Any = None) -> None:
    """Refuse a model that differs from a spec in anything that affects its forward pass.

    Cheap and informative fields come first: family, geometry, rotary tables, configuration, quantisation. Then every weight is
    read once, on its own device. The model is not run, unless it carries forward hooks; then two passes over a few tokens show
    whether they change anything.

    Args:
        spec: the spec recorded when the map was fitted. If it has no `content`, a sample of the weights is checked.
        model: the loaded model; may be wrapped by `torch.compile`.
        tokenizer: the loaded tokenizer, to check it too; None not to.

    Raises:
        MismatchError: the model differs; names the field.
        UnsupportedModelError: the weights are not in memory, or are stored in a quantised tensor type.
    """
    require_model(model, f"model for {spec.ref}")
    model = unwrapped(model)
    config = text_config(model)
    _compare(spec, "family", spec.family, family(model))
    _compare(spec, "n_layers", spec.n_layers, owning_layers(model))
    _compare(spec, "n_query_heads", spec.n_query_heads, number(model, "num_attention_heads"))
    heads, head_dim = _configured_heads(config)
    if spec.geometry is None:  # what differs by layer a configuration does not say under one name
        _compare(spec, "n_heads", spec.n_heads, spec.n_heads if heads is None else heads)
        _compare(spec, "head_dim", spec.head_dim, spec.head_dim if head_dim is None else head_dim)
    _compare(spec, "windows", spec.windows, caches.layer_windows(model, spec.n_layers))
    _check_tables(spec, model)
    _compare(spec, "config_digest", spec.config_digest, config_digest(model.config))
    _compare(spec, "quantisation", spec.quantisation, quantisation(model.config))
    refuse_interference(model, spec.ref)
    if spec.content is None:
        _compare(spec, "weight_fingerprint", spec.weight_fingerprint, weight_fingerprint(model))
    else:
        _check_content(spec, spec.content, model)
    if tokenizer is not None:
        check_tokenizer(spec, tokenizer)


def check_tokenizer(spec: ModelSpec, tokenizer: Any) -> None:
    """Refuse a tokenizer other than that of the model in a spec. Its vocabulary and its encoding of fixed texts are compared.

    Raises:
        MismatchError: it differs, or is not a tokenizer.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise MismatchError(
            f"tokenizer: found {type(tokenizer).__name__}, needed a loaded tokenizer: AutoTokenizer.from_pretrained(...)"
        )
    _compare(spec, "tokenizer_fingerprint", spec.tokenizer_fingerprint, tokenizer_fingerprint(tokenizer))
    if spec.tokenization_digest is not None:
        _compare(spec, "tokenization_digest", spec.tokenization_digest, tokenization_digest(tokenizer))
    if spec.encoding_digest is not None:
        _compare(spec, "encoding_digest", spec.encoding_digest, encoding_digest(tokenizer))


def require_model(model: Any, name: str) -> None:
    """Refuse an argument that is not a loaded transformers model, such as a model's name.

    Raises:
        MismatchError: it is something else; says what.
    """
    inner = unwrapped(model)
    if not isinstance(inner, torch.nn.Module) or not hasattr(inner, "config"):
        raise MismatchError(
            f"{name}: found {type(inner).__name__}, needed a loaded model: AutoModelForCausalLM.from_pretrained(...)"
        )


def refuse_interference(model: Any, ref: str) -> None:
    """Refuse a model with adapters, forward hooks or dropout, which change a forward pass without changing a weight.

    Raises:
        MismatchError: the model has one of them; names the module.
    """
    adapted = adapted_module(model)
    if adapted is not None:
        raise MismatchError(
            f"{ref}: found an adapter on {adapted}, needed the plain model: unload the adapter, or merge it "
            "(merge_and_unload) and fit a mapper for the result"
        )
    dropping = active_dropout(model)
    if dropping is not None:
        raise MismatchError(f"{ref}: found active dropout in {dropping}, needed a model that infers: call model.eval()")
    check_hooks(model, ref)


def _check_tables(spec: ModelSpec, model: Any) -> None:
    tables = rotary_tables(model)
    for index, table in enumerate(spec.rope.tables):
        magnitudes = tuple(map(abs, table.inverse_frequencies))  # negative if the model rotates the other way
        if (magnitudes, table.attention_scaling) in tables:
            continue
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


def _check_content(spec: ModelSpec, content: Content, model: Any) -> None:
    """Compare every weight: bit for bit if the dtype is that of the fit, else rounded to bfloat16."""
    same_dtype = dtype_name(caches.cache_dtype(model)) == spec.dtype
    found = part_digests(model, content.n_ids, rounding=not same_dtype)
    needed = content.bits if same_dtype else content.rounded
    if found != needed:
        differing = [index for index, pair in enumerate(zip(found, needed, strict=False)) if pair[0] != pair[1]]
        ref = _pinned(spec)
        raise MismatchError(
            f"field content: found other weights in {_named(differing, len(needed))}, needed those that {spec.ref} had when "
            f"the map was fitted: load the weights of {ref} (not in float16 if they are bfloat16), or fit a mapper for these"
        )
    import transformers

    if content.transformers == transformers.__version__:
        _compare(spec, "content.derived", content.derived, derived_digest(model))


def _named(indices: list[int], count: int) -> str:
    """Names of some parts of `Content.bits`, for an error message."""
    layers = [index - 1 for index in indices if 0 < index < count - 1]
    words = ["the input embedding"] if 0 in indices else []
    if layers:
        words.append(f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers from {layers[0]} to {layers[-1]}")
    if count - 1 in indices or not words:
        words.append("the parts outside the decoder layers")
    return " and ".join(words)


def _compare(spec: ModelSpec, field: str, needed: object, found: object) -> None:
    if needed != found:
        ref = _pinned(spec)
        advice = {
            "tokenizer_fingerprint": f"use the tokenizer of {ref}",
            "tokenization_digest": f"use the tokenizer of {ref}; this one has its vocabulary but splits text differently",
            "encoding_digest": f"use the tokenizer of {ref}; this one has its vocabulary but adds other tokens to a text, or "
            "splits text differently at its ends or at special tokens",
            "weight_fingerprint": f"load the weights of {ref} (not in float16 if they are bfloat16), or fit a mapper for these",
            "content.derived": f"load {ref} with from_pretrained and leave its modules' constants and buffers as they are",
        }.get(field, f"load {ref} with its own configuration, or fit a mapper for this model")
        raise MismatchError(
            f"field {field}: found {_short(found)}, needed {_short(needed)} as {spec.ref} had when the map was fitted: {advice}"
        )


def _pinned(spec: ModelSpec) -> str:
    return f"{spec.ref}@{spec.revision[:12]}" if spec.revision else spec.ref


def _short(value: object) -> str:
    """A value for an error message; of a digest only the first digits, which are enough to tell two apart."""
    return value[:12] if isinstance(value, str) and _DIGEST.fullmatch(value) else str(value)


def _configured_heads(config: Any) -> tuple[int | None, int | None]:
    heads = setting(config, "num_key_value_heads")
    head_dim = setting(config, "head_dim")
    return (heads if isinstance(heads, int) else None), (head_dim if isinstance(head_dim, int) else None)
