"""`WeightStamp`: notice within about a millisecond that a model has changed since `identity` checked it in full."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvfit.model.decoder import text_config, unwrapped
from kvfit.model.interference import drops, interventions

_SAMPLES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightStamp:
    """A snapshot of a model's state that can be compared without reading all weights.

    It holds the values of the configuration, the tensors and their addresses, how many writes torch has counted to each, the
    hooks and constants of the modules, and a few numbers of every tensor. The numbers reveal writes that torch does not count,
    through ``tensor.data``, which is how adapters are merged. Such a write to a few elements goes unnoticed until the next full
    check.
    """

    def __init__(self, model: Any) -> None:
        """Take the snapshot of a model that was just checked."""
        modules = list(unwrapped(model).modules())
        # A module has dozens of attributes, so the names of its numbers are looked up only once.
        self._names = [tuple(n for n, value in vars(module).items() if type(value) is float) for module in modules]
        self._settings = _settings(model)
        self._surface, tensors = self._walk(model)
        self._parts: list[tuple[Callable[[], Tensor | None], tuple[Any, ...]]] = [
            (weakref.ref(tensor), _state(tensor)) for tensor in tensors
        ]
        self._sample = _sample(tensors)

    def holds(self, model: Any) -> bool:
        """Whether the model is still as it was in the snapshot. This waits once for each device."""
        surface, tensors = self._walk(model)
        same = len(tensors) == len(self._parts) and all(
            # Accelerate replaces an offloaded tensor by a new one after every pass.
            (tensor.is_meta or kept() is tensor) and state == _state(tensor)
            for tensor, (kept, state) in zip(tensors, self._parts, strict=True)
        )
        if not same or surface != self._surface or _settings(model) != self._settings:
            return False
        sample = _sample(tensors)
        return sample.keys() == self._sample.keys() and all(
            torch.equal(part, self._sample[key]) for key, part in sample.items()
        )

    def _walk(self, model: Any) -> tuple[list[Any], list[Tensor]]:
        """Per module, its class, hooks, numbers and dropout; and all parameters and buffers."""
        surface: list[Any] = []
        tensors: list[Tensor] = []
        n_names = len(self._names)
        for index, module in enumerate(unwrapped(model).modules()):
            own = vars(module)
            numbers = [own.get(name) for name in self._names[index]] if index < n_names else None
            surface.append((type(module), interventions(module), numbers, own["training"] and drops(module)))
            for held in (own["_parameters"], own["_buffers"]):
                tensors.extend(tensor for tensor in held.values() if tensor is not None)
        return surface, tensors


@torch.no_grad()
def _sample(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """Evenly spread numbers of every tensor, per device and dtype; as bits, because NaN would not equal itself."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        count = tensor.numel()
        if tensor.is_meta or count == 0 or hasattr(type(tensor), "__tensor_flatten__"):
            continue
        step = (count // _SAMPLES or 1) - 1 | 1  # an even step would stay in one column of a matrix
        size = min(_SAMPLES, count) if tensor.is_contiguous() else 1
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor.as_strided((size,), (step,)))
    return {
        key: torch.cat(parts).view(_BITS[key[1].itemsize]) if key[1].is_floating_point else torch.cat(parts)
        for key, parts in found.items()
    }


def _settings(model: Any) -> str:
    """The configuration as text. Some models read values such as a window's width from it in every pass."""
    plain = (int, float, str, list, tuple, dict)
    return repr(
        [
            (name, value)
            for config in {id(one): one for one in (unwrapped(model).config, text_config(model))}.values()
            for name, value in vars(config).items()
            if not name.startswith("_") and isinstance(value, plain)
        ]
    )


def _state(tensor: Tensor) -> tuple[Any, ...]:
    """The number of writes that torch has counted, the address and the dtype."""
    if tensor.is_meta:
        return tensor.numel(), 0, tensor.dtype
    return (0 if tensor.is_inference() else tensor._version), tensor.data_ptr(), tensor.dtype
