"""The models that a mapper has checked. A model is checked once, and again after it has changed."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.model.cache import cache_dtype
from kvfit.model.decoder import layer_parameters, running_device, unwrapped
from kvfit.model.first_layer import check_first_layer
from kvfit.model.identity import check_model, require_model
from kvfit.model.stamp import WeightStamp
from kvfit.runtime.features import Pairs
from kvfit.runtime.maps import Place
from kvfit.runtime.rewrite import check_rewrite, refuse_attention
from kvfit.runtime.same_tokens import check_same_tokens
from kvfit.spec import MapperSpec, ModelSpec

Role = Literal["source", "target"]
GLANCED_TOKENS = 32  # tokens compared per row, in a handoff without a guide


class KnownModels:
    """The checked models, by role. References are weak, so that a mapper keeps no model alive. Threads may share one."""

    def __init__(self, spec: MapperSpec) -> None:
        """Start without any checked model."""
        self._specs: dict[str, ModelSpec] = {"source": spec.source, "target": spec.target}
        self._spec = spec
        self._stamps: weakref.WeakKeyDictionary[Any, dict[str, WeightStamp]] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakKeyDictionary[Any, list[tuple[str, str]]] = weakref.WeakKeyDictionary()
        self._rewrites: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bound: weakref.ref[Any] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of checked models."""
        return len(self._stamps)

    def copy(self) -> KnownModels:
        """A copy, for a mapper with the same spec whose weights are on other devices."""
        other = KnownModels(self._spec)
        with self._lock:
            other._stamps.update((model, dict(roles)) for model, roles in self._stamps.items())
            other._bound = self._bound
        return other

    def check(self, role: Role, model: Any) -> None:
        """Check a model in full, unless that was done before and it has not changed since. None is accepted.

        Raises:
            MismatchError: the model differs from the spec; names the model and the field.
        """
        if model is None:
            return
        require_model(model, f"{role}_model")
        with self._lock:
            stamp = self._stamps.get(unwrapped(model), {}).get(role)
        if stamp is None or not stamp.holds(model):
            self.verify(role, model)

    def check_tokens(self, pairs: Pairs, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Check that a source's cache was made from some ids, if the source is among the checked models.

        Raises:
            MismatchError: a token differs; names the first.
        """
        with self._lock:
            source = next((model for model, roles in self._stamps.items() if "source" in roles), None)
        prefix = pairs[0][0].shape[2]
        if source is not None and prefix:
            check_same_tokens(source, pairs, input_ids, prefix, attention_mask, GLANCED_TOKENS)

    def check_rewrite(self, target_model: Any) -> None:
        """Check that the target can run chosen tokens again. The expensive part is done once per model.

        Raises:
            UnsupportedModelError: it cannot; says why.
        """
        model = unwrapped(target_model)
        refuse_attention(model, "to run chosen tokens")  # may change from call to call
        if model not in self._rewrites:
            check_rewrite(model, self._spec.target.windows)
            self._rewrites.add(model)

    def places(self, target_model: Any) -> list[Place]:
        """Device and dtype of each target layer's cache. The target's modules are searched on the first call only."""
        model, n_layers = unwrapped(target_model), self._spec.target.n_layers
        if model not in self._layers:
            self._layers[model] = layer_parameters(model, n_layers)
        try:
            devices = [running_device(model, path, name) for path, name in self._layers[model]]
        except AttributeError:  # an adapter was added or removed
            self._layers[model] = layer_parameters(model, n_layers)
            devices = [running_device(model, path, name) for path, name in self._layers[model]]
        dtype = cache_dtype(target_model)
        return [Place(device, dtype) for device in devices or [torch.device("cpu")] * n_layers]

    def verify(self, role: Role, model: Any, *tokenizer: Any) -> None:
        """Check a model in full, and a tokenizer if there is one, whether or not that was done before.

        Raises:
            MismatchError: the model differs from the spec; names the model and the field.
            UnsupportedModelError: the mapper reads the target's first layer, and this model's first layer needs attention.
        """
        require_model(model, f"{role}_model")
        check_model(self._specs[role], model, *tokenizer)
        if role == "target" and self._spec.lexical_lags:
            check_first_layer(model)
        stamp = WeightStamp(model)
        with self._lock:
            self._stamps.setdefault(unwrapped(model), {})[role] = stamp

    def bind(self, target_model: Any) -> None:
        """Remember the target, for transfers that need its first layer."""
        self._bound = weakref.ref(unwrapped(target_model))

    def bound(self) -> Any:
        """The target that was bound; None if there is none or it no longer exists."""
        return None if self._bound is None else self._bound()
