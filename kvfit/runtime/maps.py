"""A mapper's weights in memory: check them once, and move them between devices and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.runtime.checks import DTYPES
from kvfit.runtime.features import Columns, Tables
from kvfit.spec import Kind, MapperSpec

if TYPE_CHECKING:
    from kvfit.bundle.bundle import Bundle

Weights = Mapping[tuple[Kind, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Place:
    """Device and dtype of a target layer's keys and values, or of the gathered inputs."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Maps:
    """The weights of a mapper.

    Attributes:
        spec: what they map.
        weights: per (kind, mapped target layer), the weight of `spec.weight_shape` and the bias (G,), on any device, all in one
            floating-point dtype.
        basis: the shared basis, of `spec.basis_shape` and the weights' dtype; None if `spec.rank` is None.
        tables: the rotary tables of both models.

    Raises:
        MismatchError: a weight or the basis is missing or has another shape or dtype, or a bias is on another device than its
            weight.
    """

    spec: MapperSpec
    weights: Weights
    basis: Tensor | None = None
    tables: Tables = field(init=False, repr=False, compare=False)
    _columns: dict[tuple[int, ...], Columns] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", Tables(self.spec))
        object.__setattr__(self, "_columns", {})
        basis, spec = self.basis, self.spec
        dtypes = set() if basis is None else {basis.dtype}
        shape, needed_shape = None if basis is None else tuple(basis.shape), None if spec.rank is None else spec.basis_shape
        if shape != needed_shape:
            raise MismatchError(f"basis: found shape {shape}, needed {needed_shape}")
        for layer in spec.layers:
            where = f"{layer.kind} of target layer {layer.layer_index}"
            found = self.weights.get((layer.kind, layer.layer_index))
            shapes = None if found is None else (tuple(found[0].shape), tuple(found[1].shape))
            needed = (spec.weight_shape(layer.kind, layer.layer_index), (spec.target.width_of(layer.kind, layer.layer_index),))
            if found is None or shapes != needed:
                raise MismatchError(f"{where}: found weight and bias {shapes}, needed {needed}")
            dtypes.update(part.dtype for part in found)
            if len(dtypes) > 1 or found[0].dtype not in DTYPES or found[0].device != found[1].device:
                kinds = sorted({f"{part.dtype} on {part.device}" for part in found} | set(map(str, dtypes)))
                raise MismatchError(
                    f"{where}: found weight and bias as {kinds}, needed one floating dtype for all weights, and a bias on "
                    "the device of its weight"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Maps, (self.spec, self.weights, self.basis)  # the tables would add tensors on devices

    @classmethod
    def read(cls, bundle: Bundle, device: torch.device | str | None, dtype: torch.dtype | None) -> Maps:
        """The weights of an opened bundle, each layer read straight to the device.

        Raises:
            MismatchError: torch does not have the device or cannot map in the dtype.
        """
        _require_place(device, dtype)
        weights = {
            (layer.kind, layer.layer_index): bundle.layer(layer.kind, layer.layer_index, device=device, dtype=dtype)
            for layer in bundle.spec.layers
        }
        return cls(bundle.spec, weights, bundle.basis(device=device, dtype=dtype))

    @property
    def nbytes(self) -> int:
        """Size of all weights, biases and the basis in bytes."""
        of_basis = 0 if self.basis is None else self.basis.nbytes
        return of_basis + sum(tensor.nbytes for pair in self.weights.values() for tensor in pair)

    def to(self, device: torch.device | str | Sequence[torch.device] | None, dtype: torch.dtype | None) -> Maps:
        """The weights on other devices or in another dtype; see `Mapper.to`."""
        n_layers = self.spec.target.n_layers
        devices = list(device) if isinstance(device, Sequence) and not isinstance(device, str) else [device] * n_layers
        if len(devices) != n_layers:
            raise MismatchError(f"device: found {len(devices)} devices, needed one, or {n_layers}: one per target layer")
        for each in devices:
            _require_place(each, dtype)
        weights = {
            key: (weight.to(device=devices[key[1]], dtype=dtype), bias.to(device=devices[key[1]], dtype=dtype))
            for key, (weight, bias) in self.weights.items()
        }
        first = devices[self.spec.mapped_layers[0]]
        basis = None if self.basis is None else self.basis.to(device=first, dtype=dtype)
        return Maps(self.spec, weights, basis)

    def columns(self, layers: Iterable[int]) -> Columns:
        """The columns that the maps of some target layers read, computed once for each choice of layers."""
        chosen = tuple(layers)
        if chosen not in self._columns:
            self._columns[chosen] = Columns(self.spec, chosen)
        return self._columns[chosen]

    def places(self, dtype: torch.dtype) -> list[Place]:
        """The device of each target layer's weights, and `dtype`. A layer without weights goes with the first that has some."""
        first, n_layers = self.spec.mapped_layers[0], self.spec.target.n_layers
        return [Place(self.weights["keys", max(i, first)][0].device, dtype) for i in range(n_layers)]

    def inputs_place(self, layer_index: int) -> Place:
        """Device and dtype in which the inputs are gathered: those of the basis, or of the weights of this layer."""
        tensor = self.weights["keys", layer_index][0] if self.basis is None else self.basis
        return Place(tensor.device, tensor.dtype)


def _require_place(device: Any, dtype: Any) -> None:
    """Refuse a device that torch does not have, before any weight is moved."""
    if dtype is not None and dtype not in DTYPES:
        raise MismatchError(f"dtype: found {dtype!r}, needed one of {', '.join(map(str, DTYPES))}")
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        reason = " ".join(str(error).split()).partition(". ")[0][:120]
        raise MismatchError(f"device: found {device!r}, needed one that torch has here, such as 'cpu' ({reason})") from None
