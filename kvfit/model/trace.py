"""`trace`: watch one forward pass and report what each layer gave its rotary function and what it cached.

Undoing a rotation by a wrong angle and repeating it gives the same keys again, so a round trip proves nothing. To verify a
`RopeSpec`, one needs the tensor that the model's own code gave to its own rotary function. This module records it for every
family whose modeling code calls a function named like ``apply_rotary_pos_emb``, also with fused projections.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvfit.errors import UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import family

_ROTARY_FUNCTION = re.compile(r"apply.*(rotary|rope)", re.IGNORECASE)
# The functions are replaced in modules that all threads share.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Rotation:
    """A tensor that a rotary function returned, and the tensors that it was given (`given`), the likeliest input first."""

    given: tuple[Tensor, ...]
    out: Tensor


@dataclass(frozen=True)
class Output:
    """Input and output of a module with parameters. It is a projection if it has a weight matrix that mixes features."""

    given: Tensor
    out: Tensor
    is_projection: bool


@dataclass(frozen=True)
class Norm:
    """Input and output of a norm without weights, and its function."""

    given: Tensor
    out: Tensor
    apply: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerTrace:
    """What one layer did with one batch.

    Attributes:
        layer_index: the layer's number in the cache.
        keys: (B, H, T, D) as cached.
        values: (B, H, T, D) as cached.
        rotations: the tensors that went through a rotary function since the layer before.
        outputs: inputs and outputs of the modules with parameters that ran since the layer before.
        norms: inputs and outputs of the norms without weights that ran since the layer before.
    """

    layer_index: int
    keys: Tensor
    values: Tensor
    rotations: tuple[Rotation, ...]
    outputs: tuple[Output, ...]
    norms: tuple[Norm, ...] = ()

    def given_keys(self) -> tuple[Tensor, ...] | None:
        """The keys that the rotary function was given, (B, H, T, width), width at most D.

        Returns:
            The candidates, likeliest first, because a function of queries and keys is given both. None if the layer provably
            does not rotate: no rotary function ran, and every cached key is, bit for bit, the output of a projection, or of a
            norm whose input is such an output. (A norm's output alone proves nothing, because its input may have been rotated
            by code that is not watched.)

        Raises:
            ValueError: neither was found; the message is the reason.
        """
        for rotation in self.rotations:
            for swapped in (False, True):  # some families rotate (B, T, H, D)
                out = rotation.out.transpose(1, 2) if swapped else rotation.out
                if self._is_cached(out):
                    return tuple(given.transpose(1, 2) if swapped else given for given in rotation.given)
            normed = self._normed_after(rotation)
            if normed is not None:
                return normed
        if self.rotations:
            raise ValueError("the cached keys are not what the rotary function returned: they are changed after the rotation")
        if self._is_projected(self.keys):
            return None
        for output in self.outputs:
            if not output.is_projection and _holds(output.out, self.keys):
                before = _by_head(output.given, self.keys)
                if before is not None and self._is_projected(before):
                    return None
        raise ValueError(
            "its keys reach the cache by a way that cannot be seen: no rotary function ran, no projection made them"
        )

    def _normed_after(self, rotation: Rotation) -> tuple[Tensor, ...] | None:
        """The norm of the rotation's inputs, if a norm without weights ran between the rotation and the cache; else None.

        Such a norm divides by a length that a rotation does not change, so it can be applied before the rotation instead. That
        this holds is verified when the rotated result is compared with the cache.
        """
        for norm in self.norms:
            given, out = norm.given, norm.out
            swapped = out.shape != self.keys.shape
            if torch.equal(given, rotation.out) and torch.equal(out.transpose(1, 2) if swapped else out, self.keys):
                normed = (norm.apply(tensor) for tensor in rotation.given)
                return tuple(tensor.transpose(1, 2) if swapped else tensor for tensor in normed)
        return None

    def _is_projected(self, keys: Tensor) -> bool:
        return any(output.is_projection and _holds(output.out, keys) for output in self.outputs)

    def _is_cached(self, out: Tensor) -> bool:
        head = self.keys[..., : out.shape[-1]]
        return out.shape == head.shape and torch.equal(out.to(head.dtype), head)  # a few families rotate in float32


def _by_head(states: Tensor, keys: Tensor) -> Tensor | None:
    """Hidden states as (B, slices, T, D), for the tokens and head size of `keys`; None if the shape does not allow it."""
    batch, _, n_tokens, head_dim = keys.shape
    if states.shape == keys.shape:
        return states
    if states.dim() < 3 or states.shape[:2] != (batch, n_tokens) or states[0, 0].numel() % head_dim:
        return None
    return states.reshape(batch, n_tokens, -1, head_dim).transpose(1, 2)


def _holds(output: Tensor, keys: Tensor) -> bool:
    """Whether every head's keys are, bit for bit, a slice of a module's output."""
    slices = _by_head(output, keys)
    if slices is None:
        return False
    for head in range(keys.shape[1]):
        # The first token rules out most slices. The other tokens are compared only if it agrees.
        same = (slices[0, :, 0] == keys[0, head, 0]).all(-1).nonzero().flatten().tolist()
        if not any(torch.equal(slices[:, index], keys[:, head]) for index in same):
            return False
    return True


@torch.no_grad()
def trace(model: Any, input_ids: Tensor, on_layer: Callable[[LayerTrace], None], *, position_ids: Tensor | None = None) -> None:
    """Run a model on a batch with an empty cache, and report each layer when it caches its keys and values.

    During the pass, recording functions replace the rotary functions of the model's modules. Other threads that trace wait.

    Args:
        model: a loaded causal language model, neither compiled nor wrapped.
        input_ids: (B, T).
        on_layer: called once per cache update, in the order of execution. It should not keep the tensors longer than it
            needs them.
        position_ids: (B, T); 0 to T - 1 by default.

    Raises:
        UnsupportedModelError: `on_layer` raised it, or the model has no cache argument.
    """
    rotations: list[Rotation] = []
    outputs: list[Output] = []
    norms: list[Norm] = []

    def on_update(layer_index: int, keys: Tensor, values: Tensor) -> None:
        on_layer(LayerTrace(layer_index, keys, values, tuple(rotations), tuple(outputs), tuple(norms)))
        rotations.clear()
        outputs.clear()
        norms.clear()

    def on_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if not _own(module):
            if given is not None and _is_states(given) and _is_states(out):
                norms.append(Norm(given, out, type(module).forward.__get__(module)))
        elif given is not None and isinstance(out, Tensor) and out.is_floating_point():
            outputs.append(Output(given, out, given.dim() == 3 and any(weight.dim() > 1 for weight in _own(module).values())))

    handles = [
        module.register_forward_hook(on_output, with_kwargs=True)
        for module in model.modules()
        if _may_make_keys(module) or (not _own(module) and "norm" in type(module).__name__.lower())
    ]
    try:
        with _LOCK, _recording(model, rotations):
            cache = caches.recording_cache(on_update)
            caches.forward(model, input_ids, cache, position_ids=position_ids, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, without those of its children. The weights of quantised projections are buffers."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _may_make_keys(module: nn.Module) -> bool:
    """Whether a module has weights of its own and is not a rotary module, whose output may already be rotated keys."""
    own = _own(module)
    return bool(own) and not any("inv_freq" in name for name in own) and "rotary" not in type(module).__name__.lower()


@contextmanager
def _recording(model: Any, rotations: list[Rotation]) -> Iterator[None]:
    """Replace every rotary function that the model's code may call by a recording one; restore them at the end."""
    depth = [0]
    replaced: list[tuple[Any, str, Any]] = []
    for namespace, name, function in _rotary_functions(model):
        replaced.append((namespace, name, function))
        setattr(namespace, name, _recorder(function, rotations, depth))
    try:
        yield
    finally:
        for namespace, name, function in replaced:
            setattr(namespace, name, function)


def _rotary_functions(model: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    modules: dict[str, ModuleType] = {}
    for part in model.modules():
        # A class may inherit its forward method from another file, where its functions are looked up.
        for cls in type(part).__mro__:
            module = sys.modules.get(cls.__module__)
            if module is not None and not cls.__module__.startswith("torch"):
                modules[cls.__module__] = module
        for name, value in vars(part).items():
            if inspect.isroutine(value) and ("rotary" in name or "rope" in name):
                yield part, name, value
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if _ROTARY_FUNCTION.search(name) and callable(value) and not inspect.isclass(value):
                yield module, name, value


def _recorder(function: Callable[..., Any], rotations: list[Rotation], depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        if depth[0]:  # one rotary function may call another; only the outer one is given the model's keys
            return function(*args, **kwargs)
        # Some functions rotate in place, so their inputs are copied.
        given = [value.detach().clone() for value in (*args, *kwargs.values()) if _is_states(value)]
        depth[0] += 1
        try:
            result = function(*args, **kwargs)
        finally:
            depth[0] -= 1
        for index, out in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if _is_states(out):
                same = [tensor for tensor in given if tensor.shape == out.shape]
                likeliest = given[index : index + 1]
                same.sort(key=lambda tensor: not any(tensor is other for other in likeliest))
                rotations.append(Rotation(tuple(same), out.detach()))
        return result

    return record


def _is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def refusal(model: Any, layer_index: int | None, reason: str) -> UnsupportedModelError:
    """The error for a model that cannot be described or verified; names family, layer (None: all) and reason."""
    where = "all layers" if layer_index is None else f"layer {layer_index}"
    return UnsupportedModelError(f"{family(model)}, {where}: {reason}; kvfit refuses a model that it cannot verify")
