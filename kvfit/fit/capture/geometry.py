"""The shape of a model, read from its configuration alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from kvfit.errors import UnsupportedModelError
from kvfit.fit.capture import models
from kvfit.fit.capture.locate import split_ref
from kvfit.model.decoder import decoder_parameters, hidden_size, owning_layers, projected_heads, setting


@dataclass(frozen=True)
class Geometry:
    """The shape of a model, as `plan` needs it.

    Attributes:
        name: ref, or the name of a built-in geometry.
        n_layers: number of layers that own keys and values.
        n_heads: KV heads per layer, of the first layer if layers differ.
        head_dim: features per head, of the first layer's keys if they differ.
        parameters: parameters of the whole model.
        decoder_parameters: weights of the decoder layers that every token is multiplied with; 0 if they are not known.
        layers: per layer its number of heads, key size and value size, if these differ anywhere; else None.
        n_query_heads: query heads per layer; 0 if they are not known.
        hidden_size: features of a token between two layers; None if they are not known.
        item_bytes: bytes per weight of the checkpoint; 2 if its dtype is not known.
    """

    name: str
    n_layers: int
    n_heads: int
    head_dim: int
    parameters: float
    decoder_parameters: float = 0.0
    layers: tuple[tuple[int, ...], ...] | None = None
    n_query_heads: int = 0
    hidden_size: int | None = None
    item_bytes: int = 2


# Source: Heo et al., arXiv:2608.03893, table 10; parameters as in the models' names.
GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("qwen3-8b", 36, 8, 128, 8e9),
        Geometry("qwen3-14b", 40, 8, 128, 14e9),
        Geometry("qwen3-32b", 64, 8, 128, 32e9),
        Geometry("llama-3.1-8b", 32, 8, 128, 8e9),
        Geometry("llama-3.1-70b", 80, 8, 128, 70e9),
        Geometry("ministral-3-3b", 26, 8, 128, 3e9),
        Geometry("ministral-3-8b", 34, 8, 128, 8e9),
        Geometry("ministral-3-14b", 40, 8, 128, 14e9),
    )
}


def is_built_in(ref: str) -> bool:
    """Whether a ref is the name of a geometry in `GEOMETRIES`."""
    return ref.lower() in GEOMETRIES and not os.path.isdir(ref)


def read_geometry(ref: str, revision: str | None, trust_remote_code: bool) -> Geometry:
    """The geometry that a model's configuration describes, or one of `GEOMETRIES` by name.

    Raises:
        RefError: the model does not exist or cannot be reached.
        UnsupportedModelError: the configuration has no geometry, or is not that of a causal language model.
    """
    if is_built_in(ref):
        return GEOMETRIES[ref.lower()]
    outer = models.load_config(ref, revision, trust_remote_code=trust_remote_code)
    config = outer.get_text_config()
    n_layers, n_query = setting(config, "num_hidden_layers"), setting(config, "num_attention_heads")
    head_dim = setting(config, "head_dim") or (setting(config, "hidden_size") or 0) // (n_query or 1)
    counts = {"num_hidden_layers": n_layers, "num_attention_heads": n_query, "head_dim": head_dim}
    missing = [name for name, count in counts.items() if not count]
    if missing:
        raise UnsupportedModelError(
            f"{ref} ({outer.model_type}): found no single {' and '.join(missing)} in its configuration, needed one number for "
            "all layers"
        )
    n_heads = setting(config, "num_key_value_heads") or n_query
    model = _without_weights(outer, trust_remote_code)
    # Tied weights are one parameter under two names; `parameters` counts them once.
    weights = (float(sum(parameter.numel() for parameter in model.parameters())), float(decoder_parameters(model)))
    n_layers, found = owning_layers(model), projected_heads(model)
    layers = tuple(found[index] for index in range(n_layers) if index in found)
    name = split_ref(ref, revision)[1]
    width = hidden_size(model)
    item_bytes = getattr(setting(config, "dtype") or setting(outer, "dtype"), "itemsize", 2)
    differ = len(layers) == n_layers and set(layers) != {(*layers[0][:2], layers[0][1])}
    heads, size = layers[0][:2] if differ else (n_heads, head_dim)
    return Geometry(name, n_layers, heads, size, *weights, layers if differ else None, n_query, width, item_bytes)


def _without_weights(config: Any, trust_remote_code: bool) -> Any:
    """The model that a configuration describes, as shapes alone."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # the family's own code, of the Hub too if it is trusted
        reason = " ".join(str(error).split())[:160]
        raise UnsupportedModelError(
            f"{config.model_type}: found no causal language model for this configuration ({reason}), needed a decoder"
        ) from error
