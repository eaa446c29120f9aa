"""The cost of a map per token, next to the cost of the prefill that it replaces. Both follow from shapes alone.

Only matrix products are counted: 2 operations per weight and token, and one read of every weight per `PASS_TOKENS` tokens. Both
the map and the prefill also write the target's keys and values, which neither count includes. The prefill also computes
attention, which is not counted, so the share of a map is an upper bound for long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvfit.spec import KINDS, MapperSpec, ModelSpec

# Tokens that are processed per read of the weights.
PASS_TOKENS = 1024
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Prefill:
    """What a model's prefill costs.

    Attributes:
        parameters: weights of the decoder layers that a token is multiplied with, without the embedding and the output head.
        item_bytes: bytes per weight.
        estimated: whether `parameters` was estimated from the KV geometry, because no count was recorded.
        hidden_size: features of a token between two layers; None where that was not recorded.
    """

    parameters: float
    item_bytes: int
    estimated: bool = False
    hidden_size: int | None = None


@dataclass(frozen=True)
class Cost:
    """What a map and the target's prefill cost per token.

    Attributes:
        flops_per_token: operations of the map.
        bytes_per_token: bytes of the map's weights that are read.
        prefill_flops_per_token: operations of the target's decoder layers.
        prefill_bytes_per_token: bytes of the target's decoder weights that are read.
        estimated: whether the prefill was estimated; see `Prefill`.
    """

    flops_per_token: float
    bytes_per_token: float
    prefill_flops_per_token: float
    prefill_bytes_per_token: float
    estimated: bool

    @property
    def share(self) -> float:
        """The map's share of the prefill, in FLOPs or in bytes, whichever is larger."""
        return max(self.flops_per_token / self.prefill_flops_per_token, self.bytes_per_token / self.prefill_bytes_per_token)

    def to_json(self) -> dict[str, Any]:
        """The fields, and the share."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        about = "about " if self.estimated else ""
        return f"{about}{100 * self.share:.2g} % of a prefill ({self.flops_per_token / 1e6:,.3g} MFLOP a token)"


def prefill_of(target: ModelSpec, recipe: Mapping[str, Any] | None = None) -> Prefill:
    """The prefill of a target model: counted if the recipe of its capture has the count, else estimated from its KV geometry.

    Args:
        target: the target's spec.
        recipe: the recipe of a capture, a store or a bundle; ``models[1].decoder_parameters`` is the count.
    """
    item_bytes = ITEM_BYTES.get(target.dtype, 2)
    models = (recipe or {}).get("models")
    recorded = models[1] if isinstance(models, list) and len(models) == 2 else {}
    counted, width = recorded.get("decoder_parameters"), recorded.get("hidden_size")
    if type(counted) is int and counted > 0:
        return Prefill(counted, item_bytes, hidden_size=width if type(width) is int and width > 0 else None)
    hidden = target.n_query_heads * target.head_dim
    # Query and output projections, key and value projections, and a gated feed-forward layer 3.5 times as wide.
    widths = sum(target.width_of(kind, i) for kind in KINDS for i in range(target.n_layers))
    per_layer = 2 * hidden**2 + 3 * 3.5 * hidden**2
    return Prefill(target.n_layers * per_layer + hidden * widths, item_bytes, estimated=True)


def lexical_flops(target: ModelSpec, n_lags: int, hidden_size: int | None = None) -> float:
    """Operations per token to compute the keys and values of the target's first layer, if a map reads them; else 0.

    Args:
        target: the target's spec.
        n_lags: number of lags of lexical inputs.
        hidden_size: features of a token between two layers; None to estimate them as those of all query heads.
    """
    queries = target.n_query_heads * target.head_dim  # which the layer computes before it caches
    return 2.0 * (hidden_size or queries) * (queries + target.first_width) if n_lags else 0.0


def cost_of(parameters: float, dtype: str, prefill: Prefill, extra_flops: float = 0.0) -> Cost:
    """The cost of a map with a given number of weights.

    Args:
        parameters: weights that a token is multiplied with.
        dtype: dtype in which the weights are stored.
        prefill: the prefill to compare with.
        extra_flops: operations per token on top of those of the weights.
    """
    return Cost(
        2.0 * parameters + extra_flops,
        parameters * ITEM_BYTES[dtype] / PASS_TOKENS,
        2.0 * prefill.parameters,
        prefill.parameters * prefill.item_bytes / PASS_TOKENS,
        prefill.estimated,
    )


def map_parameters(spec: MapperSpec) -> int:
    """The number of weights of a mapper, without biases."""
    return math.prod(spec.basis_shape) + sum(math.prod(spec.weight_shape(m.kind, m.layer_index)) for m in spec.layers)


def map_cost(spec: MapperSpec, prefill: Prefill | None = None) -> Cost:
    """The cost of a mapper, next to its target's prefill.

    Args:
        spec: the mapper's spec.
        prefill: from `prefill_of` with the bundle's recipe, or counted on the loaded model; None to estimate it.
    """
    prefill = prefill or prefill_of(spec.target)
    extra = lexical_flops(spec.target, len(spec.lexical_lags), prefill.hidden_size)
    return cost_of(map_parameters(spec), spec.dtype, prefill, extra)


def affordable_parameters(dtype: str, prefill: Prefill, share: float, extra_flops: float = 0.0) -> int:
    """The largest number of weights with which a map stays within a share of a prefill, in FLOPs and in bytes."""
    by_flops = (share * 2 * prefill.parameters - extra_flops) / 2
    by_bytes = share * prefill.parameters * prefill.item_bytes / ITEM_BYTES[dtype]
    return max(0, math.floor(min(by_flops, by_bytes)))
