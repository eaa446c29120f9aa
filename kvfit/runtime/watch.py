"""Read the attention weights of a running model, whichever backend it uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)


class Watch(TorchFunctionMode):
    """Reads the attention weights of a pass over a few tokens.

    A function mode belongs to the thread that entered it, so nothing changes for other threads: neither the model, nor its
    configuration, nor a registry of attention functions.

    Attributes:
        rows: number of tokens of the pass.
    """

    def __init__(self, take: Callable[[int | None, Tensor], None], *, sharing: bool = False) -> None:
        """Call ``take(layer_index, weights)``, weights (B, Hq, rows, T), for every layer.

        Args:
            take: gets None as the index of a layer without keys of its own.
            sharing: whether the model has such layers, which read what an earlier layer has cached.
        """
        super().__init__()
        self.take, self.sharing = take, sharing
        self.rows = 1
        self.layer_index: int | None = None

    def expect(self, layer_index: int | None) -> None:
        """Expect the attention of a layer next, because it has cached its keys; None before the first layer."""
        self.layer_index = layer_index

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record softmaxes and fused attention. Only the latter is computed here, from the recorded weights."""
        kwargs = kwargs or {}
        if self.layer_index is None and not self.sharing:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            weights, attended = attention(self.rows, *args, **kwargs)
            self._seen(weights)
            return attended
        result = func(*args, **kwargs)
        if func in _SOFTMAXES and isinstance(result, Tensor) and result.dim() == 4 and result.shape[2] == self.rows:
            self._seen(result)
        return result

    def _seen(self, weights: Tensor) -> None:
        layer_index, self.layer_index = self.layer_index, None
        self.take(layer_index, weights)


def attention(
    rows: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Attention weights, and the result of `scaled_dot_product_attention`, from its arguments.

    A fused kernel does not give the weights, and for a few queries it takes longer than this.

    Args:
        rows: number of query tokens.
        query: (B, Hq, rows, D), or for a single token, packed by groups, (B, H, Hq / H, D).
        key: (B, H, T, D), with as many heads or fewer.
        value: (B, H, T, Dv).
        attn_mask: a mask of booleans, or an additive one.
        dropout_p: not used; a guide draws nothing at random.
        is_causal: whether query i sees only the first i + 1 keys.
        scale: scale of the scores; None for the default.
        enable_gqa: not used.

    Returns:
        The weights, (B, Hq, rows, T) float32, and what they read, of the query's shape with Dv features. A query whose mask
        hides everything, on padding, has no weights and reads zeros.
    """
    batch, heads, found_rows, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = grouped @ key.transpose(2, 3) * (head_dim**-0.5 if scale is None else scale)
    scores = scores.view(batch, heads, found_rows, -1).float()
    if is_causal and found_rows > 1:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    attended = weights.view(*grouped.shape[:3], -1).to(value.dtype) @ value
    return weights.view(batch, -1, rows, scores.shape[3]), attended.view(*query.shape[:3], -1)
