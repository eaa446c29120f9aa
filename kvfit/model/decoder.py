"""The decoder of a loaded model: its configuration, its layers by name, and the devices that hold their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import UnsupportedModelError

# The list of decoder layers has one of these names in every family. Vision and audio parts use the same names for theirs.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)(.*)")
_OTHER_PART = re.compile(r"vision|visual|image|audio|encoder")


def unwrapped(model: Any) -> Any:
    """The module inside `torch.compile`'s wrapper; any other model as it is."""
    return getattr(model, "_orig_mod", model)


def text_config(model: Any) -> Any:
    """The configuration of the decoder."""
    return model.config.get_text_config(decoder=True)


def setting(config: Any, name: str) -> Any:
    """A value of a configuration; None if it is missing, or if it differs between layers, in which case reading it raises."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def number(model: Any, name: str) -> int:
    """A whole number of the decoder's configuration, the same for all layers.

    Raises:
        UnsupportedModelError: it is missing or differs between layers.
    """
    found = setting(text_config(model), name)
    if not isinstance(found, int):
        raise UnsupportedModelError(
            f"{family(model)}, all layers: found no single {name} in its configuration, needed one number for all of them"
        )
    return found


def cached_heads(model: Any) -> dict[int, tuple[int, int]]:
    """Per decoder layer, the number of key/value heads and their size, where the size of the key projection confirms them.

    Layers with a fused or latent key projection, or with a projection of another size, are left out.
    """
    values = text_config(model).to_dict()  # reading an attribute that differs between layers would raise
    heads, head_dim = values.get("num_key_value_heads"), values.get("head_dim")
    if not isinstance(heads, int):
        return {}
    if not isinstance(head_dim, int):  # families that leave it out compute it this way
        width, n_query = values.get("hidden_size"), values.get("num_attention_heads")
        if not isinstance(width, int) or not isinstance(n_query, int):
            return {}
        head_dim = width // n_query
    found: dict[int, tuple[int, int]] = {}
    for layer_index, attention in _attentions(model):
        same_size = getattr(attention, "head_dim", head_dim) == head_dim  # other heads may come to the same width
        if same_size and getattr(attention.k_proj, "out_features", None) == heads * head_dim:
            found[layer_index] = (heads, head_dim)
    return found


def projected_heads(model: Any) -> dict[int, tuple[int, int, int]]:
    """Per decoder layer its key/value heads and the size of a key and of a value, as its projections and head size say.

    Left out are layers whose attention has no projection of its own for keys or does not say its head size.
    """
    found: dict[int, tuple[int, int, int]] = {}
    for layer_index, attention in _attentions(model):
        width, size = getattr(attention.k_proj, "out_features", None), getattr(attention, "head_dim", None)
        if isinstance(width, int) and isinstance(size, int) and size > 0 and width % size == 0:
            heads = width // size
            of_values = getattr(getattr(attention, "v_proj", None), "out_features", width)  # values made of keys are as wide
            found[layer_index] = (heads, size, of_values // heads)
    return found


def owning_layers(model: Any) -> int:
    """Decoder layers that own keys and values; in some families the last ones read those of earlier layers."""
    return number(model, "num_hidden_layers") - (setting(text_config(model), "num_kv_shared_layers") or 0)


def _attentions(model: Any) -> Iterator[tuple[int, Any]]:
    """The modules with a ``k_proj``, and their layers."""
    for path, module in unwrapped(model).named_modules():
        place = layer_path(path)
        if place is not None and getattr(module, "k_proj", None) is not None:
            yield place[0], module


def decoder_parameters(model: Any) -> int:
    """Decoder weights that one token is multiplied with. Of a mixture's experts, the share that a token uses counts.

    The embedding and the output head do not count: a prefill only looks up the one and needs the other for its last token.
    """
    config = text_config(model)
    experts = next((n for name in ("num_local_experts", "num_experts", "n_routed_experts") if (n := setting(config, name))), 1)
    used = (setting(config, "num_experts_per_tok") or experts) / experts
    total = 0.0
    for name, weight in unwrapped(model).named_parameters():
        if layer_path(name) is not None and weight.dim() >= 2:
            total += weight.numel() * (used if ".experts." in name else 1.0)
    return round(total)


def hidden_size(model: Any) -> int | None:
    """Features of a token between two decoder layers; None where the configuration does not say."""
    found = setting(text_config(model), "hidden_size")
    return found if isinstance(found, int) else None


def family(model: Any) -> str:
    """Transformers' ``model_type``, or the class name of a model without one."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def layer_path(path: str) -> tuple[int, str] | None:
    """The decoder layer and the rest of the path of a module's or weight's name; None for a name outside the layers."""
    found = _LAYER.search(path)
    return None if found is None or _OTHER_PART.search(path) else (int(found[1]), found[2])


def loaded_tensor(model: Any, module: Any, name: str) -> Tensor:
    """A parameter or buffer; the copy that accelerate keeps, if it was offloaded.

    Raises:
        UnsupportedModelError: the tensor is on the meta device and there is no copy.
    """
    tensor: Tensor = getattr(module, name)
    if not tensor.is_meta:
        return tensor
    for hook in _hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            return torch.as_tensor(weights[name])
    raise UnsupportedModelError(
        f"{family(model)}: found {type(module).__name__}.{name} on the meta device, needed loaded weights to identify the model"
    )


def layer_devices(model: Any, n_layers: int) -> list[torch.device]:
    """The device that each decoder layer runs on; the CPU if no layer can be found by name."""
    found = [running_device(model, path, name) for path, name in layer_parameters(model, n_layers)]
    return found or [torch.device("cpu")] * n_layers


def layer_parameters(model: Any, n_layers: int) -> list[tuple[str, str]]:
    """One parameter of each decoder layer, as the path of its module and its name; [] if no layer can be found by name."""
    found: dict[int, tuple[str, str]] = {}
    for path, module in unwrapped(model).named_modules():
        place = layer_path(path)
        if place is None or place[0] in found:
            continue
        for name, tensor in module._parameters.items():
            if tensor is not None:
                found.setdefault(place[0], (path, name))
        if place[0] in found and all(layer_index in found for layer_index in range(n_layers)):
            break  # a walk of the whole model takes long for what its first layer tells
    fallback = next(iter(found.values()), None)
    return [] if fallback is None else [found.get(layer_index, fallback) for layer_index in range(n_layers)]


def input_device(model: Any) -> torch.device:
    """The device for a model's input ids: the one that its first layer runs on, also if accelerate has offloaded that layer."""
    return layer_devices(model, 1)[0]


def some_tokens(model: Any, count: int) -> Tensor:
    """A few token ids (count,), distinct if the vocabulary is large enough, on the model's input device.

    They lie away from the ends of the vocabulary, where special tokens are.
    """
    vocabulary = number(model, "vocab_size")
    return (torch.arange(count, device=input_device(model)) * 5 + vocabulary // 3) % vocabulary


def running_device(model: Any, path: str, name: str) -> torch.device:
    """The device that a module of a model runs on; `name` is one of its parameters.

    Raises:
        AttributeError: the model no longer has this module or parameter.
    """
    module = unwrapped(model).get_submodule(path)
    for hook in _hooks(module):  # an offloaded weight is on another device until its layer runs
        execution = getattr(hook, "execution_device", None)
        if execution is not None:
            return torch.device(execution)
    device: torch.device = getattr(module, name).device
    return device


def _hooks(module: Any) -> tuple[Any, ...]:
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,)))
