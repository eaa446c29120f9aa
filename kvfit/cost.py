"""What a map costs a token, against what the prefill that it replaces costs. Pure arithmetic, from shapes alone.

Only matrix products count: 2 operations per weight and token, and every weight read once per `PASS_TOKENS` tokens. Both the map
and the prefill also write the target's keys and values, which is left out on both sides, as are attention's scores, which only
the prefill has: so a share is an upper bound for long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvfit.spec import MapperSpec, ModelSpec

# Tokens that share one reading of the weights.
PASS_TOKENS = 1024
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Prefill:
    """A model's prefill.

    Attributes:
        parameters: weights of its decoder layers that a token is multiplied with; embedding and output head apart.
        item_bytes: of one weight.
        estimated: whether `parameters` was guessed from the KV geometry, because nobody counted.
    """

    parameters: float
    item_bytes: int
    estimated: bool = False


@dataclass(frozen=True)
class Cost:
    """What a map costs a token and what the target's prefill costs.

    Attributes:
        flops_per_token: of the map.
        bytes_per_token: of its weights.
        prefill_flops_per_token: of the target's decoder layers.
        prefill_bytes_per_token: of their weights.
        estimated: see `Prefill`.
    """

    flops_per_token: float
    bytes_per_token: float
    prefill_flops_per_token: float
    prefill_bytes_per_token: float
    estimated: bool

    @property
    def share(self) -> float:
        """The larger of the two shares, of FLOPs and of bytes."""
        return max(self.flops_per_token / self.prefill_flops_per_token, self.bytes_per_token / self.prefill_bytes_per_token)

    def to_json(self) -> dict[str, Any]:
        """The fields and the share."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        about = "about " if self.estimated else ""
        return f"{about}{100 * self.share:.2g} % of a prefill ({self.flops_per_token / 1e6:,.3g} MFLOP a token)"


def prefill_of(target: ModelSpec, recipe: Mapping[str, Any] | None = None) -> Prefill:
    """The prefill of a target model: counted where the recipe of its capture says it, else a guess from its KV geometry.

    Args:
        target: its spec.
        recipe: of the capture, of a store or of a bundle; its ``models[1].decoder_parameters`` counts.
    """
    item_bytes = ITEM_BYTES.get(target.dtype, 2)
    models = (recipe or {}).get("models")
    counted = models[1].get("decoder_parameters") if isinstance(models, list) and len(models) == 2 else None
    if type(counted) is int and counted > 0:
        return Prefill(counted, item_bytes)
    hidden = target.n_query_heads * target.head_dim
    # Query and output projections, keys and values, and a gated feed-forward layer three and a half times as wide.
    per_layer = 2 * hidden**2 + 2 * hidden * target.width + 3 * 3.5 * hidden**2
    return Prefill(target.n_layers * per_layer, item_bytes, estimated=True)


def lexical_flops(target: ModelSpec, n_lags: int) -> float:
    """Operations a token of the target's first layer up to its keys and values, where a map reads them."""
    hidden = target.n_query_heads * target.head_dim
    return 2.0 * hidden * (hidden + 2 * target.width) if n_lags else 0.0


def cost_of(parameters: float, dtype: str, prefill: Prefill, extra_flops: float = 0.0) -> Cost:
    """The cost of a map of so many weights.

    Args:
        parameters: weights that a token is multiplied with.
        dtype: that they are stored in.
        prefill: what it is compared with.
        extra_flops: operations a token beside them.
    """
    return Cost(
        2.0 * parameters + extra_flops,
        parameters * ITEM_BYTES[dtype] / PASS_TOKENS,
        2.0 * prefill.parameters,
        prefill.parameters * prefill.item_bytes / PASS_TOKENS,
        prefill.estimated,
    )


def map_parameters(spec: MapperSpec) -> int:
    """Weights of a mapper; biases apart."""
    return math.prod(spec.basis_shape) + sum(math.prod(spec.weight_shape(m.kind, m.layer_index)) for m in spec.layers)


def map_cost(spec: MapperSpec, prefill: Prefill | None = None) -> Cost:
    """The cost of a mapper, against its target's prefill.

    Args:
        spec: the mapper's.
        prefill: from `prefill_of` with the bundle's recipe, or counted on the loaded model; None guesses.
    """
    extra = lexical_flops(spec.target, len(spec.lexical_lags))
    return cost_of(map_parameters(spec), spec.dtype, prefill or prefill_of(spec.target), extra)


def affordable_parameters(dtype: str, prefill: Prefill, share: float, extra_flops: float = 0.0) -> int:
    """The most weights of a map that stays within a share of a prefill, in FLOPs and in bytes."""
    by_flops = (share * 2 * prefill.parameters - extra_flops) / 2
    by_bytes = share * prefill.parameters * prefill.item_bytes / ITEM_BYTES[dtype]
    return max(0, math.floor(min(by_flops, by_bytes)))
