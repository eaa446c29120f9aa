"""Find adapters, forward hooks and dropout, which change a model's forward pass without changing a weight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.decoder import some_tokens, unwrapped

_N_TOKENS = 8
_ADAPTER_PARTS = ("lora_A", "lora_embedding_A", "base_layer", "ia3_l")
_LOCK = threading.Lock()


def adapted_module(model: Any) -> str | None:
    """Path of the first module that carries an adapter; None if none does."""
    for path, module in unwrapped(model).named_modules():
        if any(hasattr(module, part) for part in _ADAPTER_PARTS):
            return path or type(module).__name__
    return None


def active_dropout(model: Any) -> str | None:
    """Path of the first module whose dropout is active because the model is in training mode; None if there is none."""
    for path, module in unwrapped(model).named_modules():
        if module.training and drops(module):
            return path or type(module).__name__
    return None


def drops(module: nn.Module) -> bool:
    """Whether a module applies dropout in training mode."""
    rate = module.p if isinstance(module, nn.Dropout) else vars(module).get("attention_dropout", 0.0)
    return isinstance(rate, int | float) and rate > 0


def hooked_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Modules with forward hooks, or whose `forward` was replaced on the instance.

    The hooks with which accelerate moves weights do not count: they change where a module runs, not what it computes.
    """
    return [(path, module) for path, module in unwrapped(model).named_modules() if interventions(module)]


def interventions(module: nn.Module) -> tuple[int, ...]:
    """The ids of all hooks and replacements around a module's forward pass; empty for a plain module."""
    own = vars(module)
    found = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
    if "forward" in own and "_hf_hook" not in own:
        found.append(own["forward"])
    return tuple(map(id, found))


def check_hooks(model: Any, ref: str) -> None:
    """Refuse forward hooks that change what a model computes. Hooks that only observe are fine.

    If there are hooks, the model runs a few tokens with them and without them. Other threads that run the model during the
    second pass run it without its hooks.

    Raises:
        MismatchError: hooks change activations; names the hooked modules.
    """
    hooked = hooked_modules(model)
    if not hooked:
        return
    seen = _activations(model)
    with _LOCK, _lifted([module for _, module in hooked]):
        plain = _activations(model)
    for one, other in zip(seen, plain, strict=True):
        allowed = 64 * torch.finfo(other.dtype).eps * float(other.float().abs().max())
        if one.shape != other.shape or not bool(((one.float() - other.float()).abs() <= allowed).all()):
            names = ", ".join(path or type(module).__name__ for path, module in hooked[:3])
            raise MismatchError(
                f"{ref}: found forward hooks that change activations (hooked: {names}), needed the model as it was fitted: "
                "remove the hooks"
            )


def _activations(model: Any) -> list[Tensor]:
    """Keys and values of every layer, and the last logits, of a few fixed tokens."""
    cache = caches.full_cache()
    logits = caches.forward(model, some_tokens(model, _N_TOKENS)[None], cache, logits_to_keep=1)
    return [*(part for pair in caches.read_cache(cache) for part in pair), logits]


@contextmanager
def _lifted(modules: list[nn.Module]) -> Iterator[None]:
    """Take all hooks off some modules, and put them back at the end."""
    names = ("_forward_pre_hooks", "_forward_hooks", "forward")
    saved = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    try:
        for module, kept in zip(modules, saved, strict=True):
            for name in kept:
                if name == "forward":
                    if "_hf_hook" not in vars(module):
                        del module.__dict__[name]
                else:
                    module.__dict__[name] = OrderedDict()
        yield
    finally:
        for module, kept in zip(modules, saved, strict=True):
            module.__dict__.update(kept)
