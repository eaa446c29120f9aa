"""Run and time passes of the target, check what each has written to its cache, and undo it if something goes wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import family
from kvfit.runtime.features import Pairs


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the wall time of a part to `seconds`."""
    begun = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begun


def run(
    model: Any, input_ids: Tensor, cache: Any, *, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
) -> int:
    """Run a model on the tokens that follow a cache; see `kvfit.model.cache.forward`.

    Returns:
        The number of tokens by which every layer of the cache has grown, which is that of `input_ids`.

    Raises:
        UnsupportedModelError: a layer has grown by another number.
    """
    before = [state.length for state in caches.layer_states(cache)]
    with caches.stops_when_filled(model, cache):
        caches.forward(model, input_ids, cache, position_ids=position_ids, attention_mask=attention_mask, base=True)
    states = caches.layer_states(cache)
    added = {state.length - length for state, length in zip(states, before + [0] * len(states), strict=False)}
    if added != {input_ids.shape[1]}:
        raise UnsupportedModelError(
            f"{family(model)}: found a cache that grew by {sorted(added)} tokens in a pass over {input_ids.shape[1]}, needed "
            "all of them in every layer: a model that trains with gradient checkpointing caches nothing, call its eval()"
        )
    return input_ids.shape[1]


def check_ran(cache: Any, ranges: Sequence[tuple[int, int]], mask: Tensor | None) -> None:
    """Refuse NaN and infinity in tokens that the target ran. This waits once for each device.

    Args:
        cache: the target's cache.
        ranges: ranges of tokens, as [start, stop).
        mask: (B, T), 0 on padding, which is not checked; None without padding.

    Raises:
        MismatchError: a value is not finite; names the layer and kind.
    """
    for start, stop in ranges:
        if stop <= start:
            continue
        pairs = []
        for layer, state in zip(caches.own_layers(cache), caches.layer_states(cache), strict=True):
            if state.keys is None:
                continue
            # A windowed layer has dropped its first tokens. A static layer has memory beyond its last token.
            dropped = max(0, state.length - state.keys.shape[2])
            part = slice(max(0, start - dropped), max(0, stop - dropped))
            pairs.append((_real(layer.keys[:, :, part], mask, stop), _real(layer.values[:, :, part], mask, stop)))
        where = caches.first_nonfinite(pairs)
        if where is not None:
            raise MismatchError(
                f"target's cache, {where}: found NaN or infinity in tokens that the target ran itself, needed finite numbers: "
                "load the target in bfloat16 or float32"
            )


def check_mapped(mapped: Pairs, source: Pairs, start: int, head: int) -> None:
    """Refuse NaN and infinity in mapped keys and values from token `start` on, which is token `head` of the source.

    Raises:
        MismatchError: a value is not finite; names the layer and kind, in the source's cache if the fault is there.
    """
    where = caches.first_nonfinite([(keys[:, :, start:], values[:, :, start:]) for keys, values in mapped])
    if where is not None:
        caches.check_finite([(keys[:, :, head:], values[:, :, head:]) for keys, values in source], "source_cache")
        raise MismatchError(
            f"mapped cache, {where}: found NaN or infinity made of finite numbers, needed a dtype that holds them: "
            "load the target in bfloat16 or float32"
        )


def _real(half: Tensor, mask: Tensor | None, stop: int) -> Tensor:
    """Keys or values of the last tokens before `stop`, with zeros on padding."""
    if mask is None:
        return half
    padding = mask[:, stop - half.shape[2] : stop] == 0
    return half.masked_fill(padding[:, None, :, None].to(half.device), 0)


@contextmanager
def undone_on_error(cache: Any, length: int, *, rewritten: bool = False) -> Iterator[None]:
    """Restore a cache to its current `length` tokens if the block raises.

    Args:
        cache: a transformers cache.
        length: number of tokens that it holds now.
        rewritten: whether the block also changes these tokens. Then they are saved, which costs their memory.
    """
    kept = [_kept(layer, rewritten) for layer in cache.layers]
    try:
        yield
    except BaseException:
        del cache.layers[len(kept) :]
        for layer, attributes in zip(cache.layers, kept, strict=True):
            _restore(layer, attributes, length)
        raise


def _kept(layer: Any, rewritten: bool) -> dict[str, Any] | None:
    """The attributes that are needed to restore a layer; None if cropping is enough."""
    static, windowed = "Static" in type(layer).__name__, getattr(layer, "is_sliding", False)
    if static and windowed:  # it is overwritten in place
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(layer).items()}
    return dict(vars(layer)) if not static and (windowed or rewritten) else None


def _restore(layer: Any, kept: dict[str, Any] | None, length: int) -> None:
    static = "Static" in type(layer).__name__
    if kept is not None:
        for name, value in kept.items():
            own = getattr(layer, name)
            if static and isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
                own.copy_(value)  # compiled graphs keep its address
            else:
                setattr(layer, name, value)
    elif getattr(layer, "keys", None) is None or layer.keys.dim() != 4:
        return
    elif not static:
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
    elif hasattr(layer, "crop"):
        layer.crop(length - int(layer.get_seq_length()))
    else:  # before version 5, a static layer's length is the number of tokens that are not zero
        layer.keys[:, :, length:] = 0
        layer.values[:, :, length:] = 0
