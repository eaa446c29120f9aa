"""Watch a model's attention: record its queries, and compute what they would read from other keys and values.

This works for every model whose layers call an attention function through transformers' registry (`AttentionInterface`). The
layer's own function is called, with its masks, windows, sinks and soft caps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NAME = "kvfit_watched"


@dataclass(frozen=True)
class Reading:
    """One layer's attention in one pass.

    Attributes:
        layer_index: the layer.
        queries: (B, H_query, C, D), rotated.
        keys: (B, H, T, D), as the attention function was given them; of a windowed layer only the last tokens.
        values: (B, H, T, D).
        scaling: scale of the scores.
        window: sliding window in tokens; None for full attention.
        output: (B, C, H_query, D), the attention output before the output projection.
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
        """(B, C, H_query, D), the output of the same queries for other keys and values (B, H, T, D)."""
        return self._attend(keys, values)


@contextmanager
def watched(model: Any, on_reading: Callable[[Reading], None]) -> Iterator[None]:
    """A block in which `on_reading` is called for the attention of every layer. The model's results do not change.

    For a model that does not use the registry, `on_reading` is never called.
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
    """An attention function that calls `function` (None: the eager one in the layer's module) and reports the call."""

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


class Reads:
    """Sums over documents that compare one layer's attention to mapped and to own keys and values."""

    def __init__(self, n_heads: int, head_dim: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.n_queries = self.n_tokens = 0
        self.cosine = zeros(n_heads)
        self.queries, self.errors = zeros(n_heads, head_dim, head_dim), zeros(n_heads, head_dim, head_dim)
        self.weighted, self.weights, self.squares = zeros(n_heads), zeros(n_heads), zeros(n_heads)

    def add(self, reading: Reading, mapped: tuple[Tensor, Tensor], counted: slice) -> None:
        """Add a reading; of the keys and values `mapped` (B, H, P, D), only the tokens `counted` are mapped."""
        n_new = reading.queries.shape[2]
        n_heads = reading.keys.shape[1]
        total = reading.keys.shape[2]
        held = total - n_new  # a windowed layer has dropped the first tokens
        first = mapped[0].shape[2] - held
        keys, values = (
            torch.cat([part[:, :, first:].to(own), own[:, :, held:]], 2)
            for part, own in zip(mapped, (reading.keys, reading.values), strict=True)
        )
        read = reading.attend(keys, values)
        # (B, C, H_query, D) -> (H, B * C * group)
        cosine = F.cosine_similarity(read.double(), reading.output.double(), dim=-1)
        self.cosine += _grouped(cosine, 2, n_heads).transpose(0, 2).flatten(1).sum(1)
        self.n_queries += cosine.numel() // n_heads
        span = slice(max(counted.start - first, 0), counted.stop - first)
        if span.stop <= span.start:
            return
        wrong = [(a - b)[:, :, span].double() for a, b in ((keys, reading.keys), (values, reading.values))]
        self.n_tokens += wrong[0].shape[0] * wrong[0].shape[2]
        self.errors += torch.einsum("bhtd,bhte->hde", wrong[0], wrong[0])
        queries = _grouped(reading.queries.double(), 1, n_heads)  # (B, H, group, C, D)
        self.queries += torch.einsum("bhgcd,bhgce->hde", queries, queries)
        squares = wrong[1].square().sum(-1)  # (B, H, n)
        self.squares += squares.sum((0, 2))
        for row in range(len(keys)):  # one document at a time, because attention weights need most memory
            weights = _attention(reading, row, n_heads)[..., span].double().square().sum((1, 2))  # (H, n)
            self.weighted += (weights * squares[row]).sum(1)
            self.weights += weights.sum(1)

    def measures(self) -> dict[str, Tensor]:
        """The measures, (1 + H,) each: the mean over heads, then each head."""
        trace = torch.einsum("hde,hde->h", self.queries, self.errors)
        plain = self.queries.diagonal(dim1=1, dim2=2).sum(1) * self.errors.diagonal(dim1=1, dim2=2).sum(1)
        keys = self.errors.shape[1] * trace / plain
        values = (self.weighted / self.weights) / (self.squares / max(self.n_tokens, 1))
        cosine = self.cosine / max(self.n_queries, 1)
        return {
            name: torch.cat([found.mean(0, keepdim=True), found])
            for name, found in (("keys", keys), ("values", values), ("attention", cosine))
        }


def _grouped(values: Tensor, dim: int, n_heads: int) -> Tensor:
    """Split dimension `dim` of query heads into key/value heads and the query heads that read each of them."""
    return values.reshape(*values.shape[:dim], n_heads, -1, *values.shape[dim + 1 :])


def _attention(reading: Reading, row: int, n_heads: int) -> Tensor:
    """(H, group, C, T), the target's own attention weights of one document, without sinks and soft caps."""
    queries = _grouped(reading.queries[row].float(), 0, n_heads)  # (H, group, C, D)
    scores = reading.scaling * torch.einsum("hgcd,htd->hgct", queries, reading.keys[row].float())
    n_new, total = queries.shape[2], reading.keys.shape[2]
    key_positions = torch.arange(total, device=scores.device)
    query_positions = torch.arange(total - n_new, total, device=scores.device)[:, None]
    hidden = key_positions > query_positions
    if reading.window is not None:
        hidden = hidden | (key_positions <= query_positions - reading.window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)
