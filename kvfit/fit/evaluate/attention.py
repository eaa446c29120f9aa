"""Watching a model's attention: its own queries, and what they would read from other keys and values.

Works for every model whose layers call an attention function through transformers' registry (`AttentionInterface`); the
function that a layer really uses is called, so masks, windows, sinks and soft caps are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_NAME = "kvfit_watched"


@dataclass(frozen=True)
class Reading:
    """One layer reading its cache.

    Attributes:
        layer_index: the layer.
        queries: (B, H_query, C, D), rotated.
        keys: (B, H, T, D) as the attention function was given them: a windowed layer's last tokens only.
        values: (B, H, T, D).
        scaling: of the scores.
        window: tokens of a sliding window, None for all.
        output: (B, C, H_query, D) what it read, before the output projection.
    """

    layer_index: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    window: int | None
    output: Tensor
    _attend: Callable[[Tensor, Tensor], Tensor] = field(repr=False)

    def attend(self, keys: Tensor, values: Tensor) -> Tensor:
        """(B, C, H_query, D) what the same queries read from other keys and values (B, H, T, D)."""
        return self._attend(keys, values)


@contextmanager
def watched(model: Any, on_reading: Callable[[Reading], None]) -> Iterator[None]:
    """Within it, `on_reading` is called for every layer that reads its cache; what the model computes does not change.

    A model that does not use the registry runs as ever, and nothing is called.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    names = {key: getattr(config, "_attn_implementation", None) for key, config in configs.items()}
    usable = {name for name in names.values() if name in ALL_MASK_ATTENTION_FUNCTIONS}
    for name in usable:
        ALL_ATTENTION_FUNCTIONS.register(f"{_NAME}_{name}", _watching(ALL_ATTENTION_FUNCTIONS.get(name), on_reading))
        ALL_MASK_ATTENTION_FUNCTIONS.register(f"{_NAME}_{name}", ALL_MASK_ATTENTION_FUNCTIONS[name])
    try:
        for key, config in configs.items():
            if names[key] in usable:
                config._attn_implementation_internal = f"{_NAME}_{names[key]}"
        yield
    finally:
        for key, config in configs.items():
            if names[key] in usable:
                config._attn_implementation_internal = names[key]
        for name in usable:
            for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                type(registry)._global_mapping.pop(f"{_NAME}_{name}", None)


def _watching(function: Callable[..., Any] | None, on_reading: Callable[[Reading], None]) -> Callable[..., Any]:
    """An attention function that does what `function` does (None: the eager one beside the layer's class) and tells."""

    def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        used = function or sys.modules[type(module).__module__].eager_attention_forward

        def attend(keys: Tensor, values: Tensor) -> Any:
            return used(module, query, keys, values, attention_mask, *args, **kwargs)

        result = attend(key, value)
        scaling = kwargs.get("scaling")
        on_reading(
            Reading(
                layer_index=int(module.layer_idx),
                queries=query,
                keys=key,
                values=value,
                scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                window=kwargs.get("sliding_window"),
                output=result[0],
                _attend=lambda keys, values: attend(keys, values)[0],
            )
        )
        return result

    return watch
