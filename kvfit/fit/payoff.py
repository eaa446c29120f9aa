"""Whether a map beats the prefill that it replaces: cost of each kind of map for a pair, and from which length on it pays.

Everything here is computed from shapes. Times are rooflines: the longer of multiplying and of reading the weights once per
pass. A handoff is the map over the context and one pass of the target over the few tokens that it runs itself.
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import Any

from kvfit.cost import ITEM_BYTES, Cost, Prefill, cost_of, lexical_flops
from kvfit.fit.hardware import Rates
from kvfit.spec import ModelSpec

# Tokens that the target runs itself in a handoff by default: the first one and the last 32.
EXACT_TOKENS = 33
# Tokens of a pass on a graphics card; weights are read once per pass.
CHUNK_TOKENS = 8192
LONGEST = 1 << 20
RANKS = (4096, 2048, 1024)


@dataclass(frozen=True)
class MapOption:
    """One kind of map for a pair.

    Attributes:
        name: in words.
        parameters: weights.
        dtype: of them.
        cost: a token, against the target's prefill.
        break_even: context length from which on a handoff beats a prefill; None for never up to a million tokens, or where
            no machine was named.
        milliseconds: of the map and of the prefill for 8,192 tokens; None where no machine was named.
    """

    name: str
    parameters: int
    dtype: str
    cost: Cost
    break_even: int | None = None
    milliseconds: tuple[float, float] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {**asdict(self), "nbytes": self.nbytes, "cost": self.cost.to_json()}


def seconds(flops: float, nbytes: float, tokens: int, rates: Rates, dtype: str) -> float:
    """Roofline time of a pass over tokens.

    Args:
        flops: a token.
        nbytes: of all weights, read once per `CHUNK_TOKENS`.
        tokens: T.
        rates: of the machine.
        dtype: that the products run in.
    """
    rate = rates.float32 if dtype == "float32" else rates.forward
    passes = -(-tokens // CHUNK_TOKENS)
    return max(flops * tokens / rate, passes * nbytes / rates.bandwidth)


def break_even(map_seconds: Any, prefill_seconds: Any) -> int | None:
    """The shortest context that a handoff is faster for than a prefill.

    Args:
        map_seconds: time of the map by tokens.
        prefill_seconds: time of a prefill by tokens.
    """
    exact = prefill_seconds(EXACT_TOKENS)
    lengths = range(EXACT_TOKENS, LONGEST)
    found = bisect.bisect_left(lengths, True, key=lambda tokens: map_seconds(tokens) + exact < prefill_seconds(tokens))
    return lengths[found] if found < len(lengths) else None


def map_options(
    source: ModelSpec, target: ModelSpec, prefill: Prefill, *, n_lags: int = 0, rates: Rates | None = None
) -> list[MapOption]:
    """The kinds of map that a pair can have, dearest first.

    Args:
        source: its shape.
        target: its shape.
        prefill: of the target.
        n_lags: lags of lexical inputs; 0 for none.
        rates: of a machine, for times and break-even lengths.
    """
    lexical = n_lags * 2 * target.width
    mapped = target.n_layers - (1 if n_lags else 0)
    outputs = 2 * mapped * target.width
    inputs = 2 * source.n_layers * source.width + lexical
    rows = [(f"all {source.n_layers} layers, float32", inputs * outputs, "float32")]
    rows.append((f"all {source.n_layers} layers", inputs * outputs, "bfloat16"))
    if source.n_layers > 8:
        rows.append(("8 layers each", (16 * source.width + lexical) * outputs, "bfloat16"))
    ranks = [rank for rank in RANKS if rank < min(inputs, outputs)] or [min(inputs, outputs) // 4]
    rows += [(f"shared basis, rank {rank}", rank * (inputs + outputs), "bfloat16") for rank in ranks]
    return [_option(*row, prefill, lexical_flops(target, n_lags), rates) for row in rows]


def _option(name: str, parameters: int, dtype: str, prefill: Prefill, extra: float, rates: Rates | None) -> MapOption:
    cost = cost_of(parameters, dtype, prefill, extra)
    if rates is None:
        return MapOption(name, parameters, dtype, cost)

    def moving(tokens: int) -> float:
        return seconds(cost.flops_per_token, parameters * ITEM_BYTES[dtype], tokens, rates, dtype)

    def prefilling(tokens: int) -> float:
        weights = prefill.parameters * prefill.item_bytes
        return seconds(cost.prefill_flops_per_token, weights, tokens, rates, "bfloat16")

    times = (1e3 * moving(CHUNK_TOKENS), 1e3 * prefilling(CHUNK_TOKENS))
    return MapOption(name, parameters, dtype, cost, break_even(moving, prefilling), times)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def table(options: list[MapOption]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| map | weights | GFLOP a token | share of a prefill | 8,192 tokens | pays from |",
        "|---|---|---|---|---|---|",
    ]
    for option in options:
        times = (
            "-"
            if option.milliseconds is None
            else " against ".join(f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms" for ms in option.milliseconds)
        )
        pays = "never" if option.break_even is None else f"{option.break_even:,} tokens"
        lines.append(
            f"| {option.name} | {_size(option.nbytes)} | {option.cost.flops_per_token / 1e9:.3g} "
            f"| {100 * option.cost.share:.2g} % | {times} | {pays if option.milliseconds else '-'} |"
        )
    return lines
