"""The decoder inside a loaded model: its configuration, its layers by name, and where their weights are."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import UnsupportedModelError

# Families call their list of layers one of these; parts for images and sound have lists of the same name.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)(.*)")
_OTHER_PART = re.compile(r"vision|visual|image|audio|encoder")


def unwrapped(model: Any) -> Any:
    """The module behind `torch.compile`'s wrapper; any other model as it is."""
    return getattr(model, "_orig_mod", model)


def text_config(model: Any) -> Any:
    """The configuration of the decoder."""
    return model.config.get_text_config(decoder=True)


def setting(config: Any, name: str) -> Any:
    """A value of a configuration, None where it has none, or where it differs between layers and raises when asked for."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def cached_heads(model: Any) -> dict[int, tuple[int, int]]:
    """Per decoder layer, the number of key/value heads and their size, as the configuration says and the projection confirms.

    Left out are layers whose keys come from a fused or a latent projection, and layers of another size.
    """
    values = text_config(model).to_dict()  # asking for an attribute that differs between layers raises errors of its own
    heads, head_dim = values.get("num_key_value_heads"), values.get("head_dim")
    if not isinstance(heads, int):
        return {}
    if not isinstance(head_dim, int):  # families that leave it out compute it so
        width, n_query = values.get("hidden_size"), values.get("num_attention_heads")
        if not isinstance(width, int) or not isinstance(n_query, int):
            return {}
        head_dim = width // n_query
    found: dict[int, tuple[int, int]] = {}
    for path, module in unwrapped(model).named_modules():
        place = layer_path(path)
        if place is not None and place[1].endswith("k_proj") and getattr(module, "out_features", None) == heads * head_dim:
            found[place[0]] = (heads, head_dim)
    return found


def decoder_parameters(model: Any) -> int:
    """Weights of the decoder layers that one token is multiplied with; of a mixture's experts, the share that a token uses.

    Embedding and output head are apart: a prefill looks up the one and needs the other for its last token only.
    """
    config = text_config(model)
    experts = next(
        (n for name in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(config, name, None))), 1
    )
    used = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    total = 0.0
    for name, weight in unwrapped(model).named_parameters():
        if layer_path(name) is not None and weight.dim() >= 2:
            total += weight.numel() * (used if ".experts." in name else 1.0)
    return round(total)


def family(model: Any) -> str:
    """Transformers' ``model_type``, or the class name of a model without one."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def layer_path(path: str) -> tuple[int, str] | None:
    """Decoder layer number and remaining path of a module's or weight's name; None for what is outside the layers."""
    found = _LAYER.search(path)
    return None if found is None or _OTHER_PART.search(path) else (int(found[1]), found[2])


def loaded_tensor(model: Any, module: Any, name: str) -> Tensor:
    """A parameter or buffer; where accelerate offloaded it, the copy that it keeps.

    Raises:
        UnsupportedModelError: there is none.
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
    """The device that each decoder layer runs on; the model's own for layers that cannot be found by name."""
    found = [running_device(model, path, name) for path, name in layer_parameters(model, n_layers)]
    return found or [torch.device("cpu")] * n_layers


def layer_parameters(model: Any, n_layers: int) -> list[tuple[str, str]]:
    """One parameter of each decoder layer, as the path of its module and its name; [] where no layer is found by name."""
    found: dict[int, tuple[str, str]] = {}
    for path, module in unwrapped(model).named_modules():
        place = layer_path(path)
        if place is None or place[0] in found:
            continue
        for name, tensor in module._parameters.items():
            if tensor is not None:
                found.setdefault(place[0], (path, name))
    fallback = next(iter(found.values()), None)
    return [] if fallback is None else [found.get(layer_index, fallback) for layer_index in range(n_layers)]


def input_device(model: Any) -> torch.device:
    """Where a model wants its input ids: where its first layer runs, also where accelerate spread or offloaded the model."""
    return layer_devices(model, 1)[0]


def some_tokens(model: Any, count: int) -> Tensor:
    """A few token ids (count,), distinct where the vocabulary allows, on the model's input device.

    Away from the ends of the vocabulary, where special tokens are.
    """
    vocabulary = int(text_config(model).vocab_size)
    return (torch.arange(count, device=input_device(model)) * 5 + vocabulary // 3) % vocabulary


def running_device(model: Any, path: str, name: str) -> torch.device:
    """The device that a module of a model runs on; `name` is one of its parameters.

    Raises:
        AttributeError: the model has no such module or parameter any more.
    """
    module = unwrapped(model).get_submodule(path)
    for hook in _hooks(module):  # an offloaded weight is elsewhere until its layer runs
        execution = getattr(hook, "execution_device", None)
        if execution is not None:
            return torch.device(execution)
    device: torch.device = getattr(module, name).device
    return device


def _hooks(module: Any) -> tuple[Any, ...]:
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,)))
