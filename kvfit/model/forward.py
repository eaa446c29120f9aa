"""Run a model on the tokens that follow a cache."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model.decoder import family, owning_layers, unwrapped
from kvfit.model.reading import cache_length


def cache_argument(model: Any) -> str:
    """Name of the argument, and of the output field, for the cache: ``cache`` or ``past_key_values``.

    Raises:
        UnsupportedModelError: `forward` takes neither.
    """
    parameters = inspect.signature(unwrapped(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{family(model)}: forward takes neither cache= nor past_key_values=, needed a model with a cache"
    )


@torch.no_grad()
def forward(
    model: Any,
    input_ids: Tensor,
    cache: Any,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_to_keep: int | None = None,
    base: bool = False,
) -> Tensor:
    """Run a model on the tokens that follow a cache, and append their keys and values to it.

    Args:
        model: a causal language model.
        input_ids: (B, T_new), the tokens that the cache does not hold.
        cache: a transformers cache; it grows in place.
        position_ids: (B, T_new). For a left-padded batch they are derived from the mask by default, because transformers'
            own `forward` does not derive them.
        attention_mask: (B, T_cache + T_new), 1 for real tokens; None if all are.
        logits_to_keep: return logits of this many last tokens only; None for all.
        base: skip the language-model head.

    Returns:
        (B, T_new or `logits_to_keep`, vocabulary) logits, or with `base` the (B, T_new, hidden) last hidden state; where layers
        that own no keys and values come last, of the last token only.

    Raises:
        MismatchError: the mask or the positions have the wrong shape, with which transformers would silently compute wrong
            numbers.
    """
    batch, n_new = input_ids.shape
    total = cache_length(cache) + n_new
    arguments: dict[str, Any] = {}
    if attention_mask is not None:
        if tuple(attention_mask.shape) != (batch, total):
            raise MismatchError(
                f"attention_mask: found shape {tuple(attention_mask.shape)}, needed ({batch}, {total}): "
                "cached and new tokens together"
            )
        if position_ids is None and bool((attention_mask == 0).any()):
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -n_new:]
        arguments["attention_mask"] = attention_mask
    if position_ids is not None:
        if tuple(position_ids.shape) not in {(batch, n_new), (1, n_new)}:
            raise MismatchError(
                f"position_ids: found shape {tuple(position_ids.shape)}, needed ({batch}, {n_new}) as input_ids"
            )
        arguments["position_ids"] = position_ids
    arguments[cache_argument(model)] = cache
    if base:
        inner = base_model(model)
        if "logits_to_keep" in inspect.signature(inner.forward).parameters:
            # Layers that read an earlier one's keys and values add nothing to the cache; `generate` spares them too.
            arguments["logits_to_keep"] = 1
        return inner(input_ids=input_ids, use_cache=True, **arguments)[0]  # type: ignore[no-any-return]
    if logits_to_keep is not None and "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters:
        arguments["logits_to_keep"] = logits_to_keep
    logits: Tensor = model(input_ids=input_ids, use_cache=True, **arguments).logits
    return logits if logits_to_keep is None else logits[:, -logits_to_keep:]


_EAGER = threading.Lock()
_eager_blocks = 0
_eager_stance: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run whatever is compiled, a model, its layers or its `forward`, as it was written, while the block lasts.

    Compiled code hides attention from a function mode, and some of it reads a cache of another class wrongly. The setting is
    torch's own, for all threads: what they run meanwhile is not compiled either and gives the same results.
    """
    global _eager_blocks, _eager_stance
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        yield
        return
    with _EAGER:
        if _eager_blocks == 0:
            _eager_stance = torch.compiler.set_stance("force_eager")
        _eager_blocks += 1
    try:
        yield
    finally:
        with _EAGER:
            _eager_blocks -= 1
            if _eager_blocks == 0:
                _eager_stance.__exit__(None, None, None)


class _Filled(BaseException):
    """Ends a pass that has filled its cache. It is not an `Exception`, so that no model code can swallow it."""


@contextmanager
def stops_when_filled(model: Any, cache: Any) -> Iterator[None]:
    """End a pass of the block, and the block, as soon as the last layer with keys and values of its own has cached them.

    Nothing after that changes the cache: not this layer's attention and feed-forward network, which are the share 1 / L of a
    pass, nor layers that read another layer's keys and values, nor the head.

    Args:
        model: a causal language model.
        cache: the transformers cache that the pass fills.
    """
    last, update, replaced = owning_layers(model) - 1, cache.update, vars(cache).get("update")

    def last_update(keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        cached = update(keys, values, layer_idx, *args, **kwargs)
        if layer_idx == last:
            raise _Filled
        return cached

    cache.update = last_update  # hides the class's method for this one cache
    try:
        yield
    except _Filled:
        pass
    finally:
        if replaced is None:
            del cache.update
        else:
            cache.update = replaced


def base_model(model: Any) -> Any:
    """The model without its language-model head. In some versions a model's `base_model` is the model itself."""
    inner = unwrapped(model)
    for name in ("base_model", "model", "transformer", "language_model"):
        base = getattr(inner, name, None)
        if base is None or base is inner:
            continue
        if "logits_to_keep" not in inspect.signature(base.forward).parameters or base.get_output_embeddings() is None:
            return base
    raise UnsupportedModelError(f"{family(model)}: found no base model without a language-model head")
