"""The models that a mapper has met: each is checked once, and again once its weights have changed."""

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
GLANCED_TOKENS = 32  # of each row, in a handoff without a guide


class KnownModels:
    """Models that were checked, by role. Weak: a mapper must not keep a model alive. Threads may share it."""

    def __init__(self, spec: MapperSpec) -> None:
        """Know no model yet of the mapper with this spec."""
        self._specs: dict[str, ModelSpec] = {"source": spec.source, "target": spec.target}
        self._spec = spec
        self._stamps: weakref.WeakKeyDictionary[Any, dict[str, WeightStamp]] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakKeyDictionary[Any, list[tuple[str, str]]] = weakref.WeakKeyDictionary()
        self._rewrites: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bound: weakref.ref[Any] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many models are known."""
        return len(self._stamps)

    def copy(self) -> KnownModels:
        """The same knowledge, for a mapper with its weights elsewhere."""
        other = KnownModels(self._spec)
        with self._lock:
            other._stamps.update((model, dict(roles)) for model, roles in self._stamps.items())
            other._bound = self._bound
        return other

    def check(self, role: Role, model: Any) -> None:
        """Check a model unless it is known and unchanged. For None, do nothing.

        Raises:
            MismatchError: names the model and the field that differs.
        """
        if model is None:
            return
        require_model(model, f"{role}_model")
        with self._lock:
            stamp = self._stamps.get(unwrapped(model), {}).get(role)
        if stamp is None or not stamp.holds(model):
            self.verify(role, model)

    def check_tokens(self, pairs: Pairs, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Check that a source's cache is of some ids, as far as a source that is known can tell.

        Raises:
            MismatchError: names the first token that differs.
        """
        with self._lock:
            source = next((model for model, roles in self._stamps.items() if "source" in roles), None)
        prefix = pairs[0][0].shape[2]
        if source is not None and prefix:
            check_same_tokens(source, pairs, input_ids, prefix, attention_mask, GLANCED_TOKENS)

    def check_rewrite(self, target_model: Any) -> None:
        """Check that the target can run chosen tokens again, unless it is known to.

        Raises:
            UnsupportedModelError: says why it cannot.
        """
        model = unwrapped(target_model)
        refuse_attention(model, "to run chosen tokens")  # may change from call to call
        if model not in self._rewrites:
            check_rewrite(model, self._spec.target.windows)
            self._rewrites.add(model)

    def places(self, target_model: Any) -> list[Place]:
        """Where each of the target's layers caches. Its modules are walked once, and only looked at later."""
        model, n_layers = unwrapped(target_model), self._spec.target.n_layers
        if model not in self._layers:
            self._layers[model] = layer_parameters(model, n_layers)
        try:
            devices = [running_device(model, path, name) for path, name in self._layers[model]]
        except AttributeError:  # an adapter was put on or taken off
            self._layers[model] = layer_parameters(model, n_layers)
            devices = [running_device(model, path, name) for path, name in self._layers[model]]
        dtype = cache_dtype(target_model)
        return [Place(device, dtype) for device in devices or [torch.device("cpu")] * n_layers]

    def verify(self, role: Role, model: Any, *tokenizer: Any) -> None:
        """Check a model, and a tokenizer where one is given, whether it is known or not.

        Raises:
            MismatchError: names the model and the field that differs.
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
        """The target that was bound, None where there is none or it is gone."""
        return None if self._bound is None else self._bound()
