"""Whether a map pays: the cost of each kind of map for a pair, and from which context length on it beats a prefill.

Everything here is computed from shapes. Times are rooflines: the maximum of the times for multiplying and for reading the
weights once per pass. A handoff is the map over the context and one pass of the target over the few tokens that it runs itself.
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import Any

from kvfit.cost import ITEM_BYTES, Cost, Prefill, cost_of, lexical_flops
from kvfit.fit.hardware import Rates
from kvfit.fit.solve.options import Options
from kvfit.fit.solve.system import input_set, widest_layers
from kvfit.runtime import EXACT_HEAD
from kvfit.spec import KINDS, Inputs, Kind, ModelSpec

# Tokens that the target runs itself in a handoff: the first ones, and the last 32.
EXACT_TOKENS = EXACT_HEAD + 32
# Tokens per pass on a GPU; weights are read once per pass.
CHUNK_TOKENS = 8192
LONGEST = 1 << 20
RANKS = (4096, 2048, 1024)


@dataclass(frozen=True)
class MapOption:
    """One kind of map for a pair.

    Attributes:
        name: a description.
        parameters: number of weights.
        dtype: dtype of the weights.
        cost: cost per token, next to the target's prefill.
        break_even: context length from which on a handoff beats a prefill; None if that is above a million tokens, or if no
            rates are known.
        milliseconds: times of the map and of the prefill for 8,192 tokens; None if no rates are known.
    """

    name: str
    parameters: int
    dtype: str
    cost: Cost
    break_even: int | None = None
    milliseconds: tuple[float, float] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return self.parameters * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """The fields and the size as JSON values."""
        return {**asdict(self), "nbytes": self.nbytes, "cost": self.cost.to_json()}


def seconds(flops: float, nbytes: float, tokens: int, rates: Rates, dtype: str) -> float:
    """Roofline time of a pass over tokens.

    Args:
        flops: operations per token.
        nbytes: size of all weights, which are read once per `CHUNK_TOKENS`.
        tokens: number of tokens.
        rates: rates of the machine.
        dtype: dtype of the products.
    """
    rate = rates.float32 if dtype == "float32" else rates.forward
    passes = -(-tokens // CHUNK_TOKENS)
    return max(flops * tokens / rate, passes * nbytes / rates.bandwidth)


def break_even(map_seconds: Any, prefill_seconds: Any) -> int | None:
    """The shortest context for which a handoff is faster than a prefill; None if there is none.

    Args:
        map_seconds: function from a number of tokens to the time of the map.
        prefill_seconds: function from a number of tokens to the time of a prefill.
    """
    exact = prefill_seconds(EXACT_TOKENS)
    lengths = range(EXACT_TOKENS, LONGEST)
    found = bisect.bisect_left(lengths, True, key=lambda tokens: map_seconds(tokens) + exact < prefill_seconds(tokens))
    return lengths[found] if found < len(lengths) else None


def map_options(
    source: ModelSpec,
    target: ModelSpec,
    prefill: Prefill,
    *,
    options: Options | None = None,
    n_lags: int = 0,
    rates: Rates | None = None,
) -> list[MapOption]:
    """The kinds of map that `solve` can make of a pair, the most expensive first.

    Args:
        source: shape of the source.
        target: shape of the target.
        prefill: the target's prefill.
        options: options of `solve`; ``auto`` for ``inputs`` counts as ``both``. Where they leave the dtype, the number of
            source layers or the rank to `solve`, several are listed.
        n_lags: number of lags of lexical inputs; 0 for none.
        rates: rates of a machine, for times and break-even lengths.
    """
    asked = options or Options()
    inputs: Inputs = "same" if asked.inputs == "same" else "both"
    mapped = range(1 if n_lags else 0, target.n_layers)
    outputs = {kind: sum(target.width_of(kind, i) for i in mapped) for kind in KINDS}

    def widths(count: int) -> dict[Kind, int]:
        """F per kind, where maps read the `count` widest source layers."""
        layers, lags = widest_layers(source, count), range(n_lags)
        return {kind: input_set((source, target), kind, layers, asked.support, inputs, lags).n_inputs for kind in KINDS}

    def separate(count: int) -> int:
        return sum(outputs[kind] * width for kind, width in widths(count).items())

    dtypes = ("float32", "bfloat16") if asked.dtype == "auto" else (asked.dtype,)
    n_layers = asked.top_k if isinstance(asked.top_k, int) else source.n_layers
    rows = []
    if not isinstance(asked.rank, int):
        name = f"{n_layers} layers each" if isinstance(asked.top_k, int) else f"all {n_layers} layers"
        rows += [(name, separate(n_layers), dtype) for dtype in dtypes]
        if not isinstance(asked.top_k, int) and n_layers > 8:
            rows.append(("8 layers each", separate(8), dtypes[-1]))
    width, made = widths(n_layers)["keys"], sum(outputs.values())
    ranks = _ranks(asked, min(width, made)) if asked.may_share(inputs) else []
    rows += [(f"shared basis, rank {rank}", rank * (width + made), dtypes[-1]) for rank in ranks]
    extra = lexical_flops(target, n_lags, prefill.hidden_size)
    return [_option(*row, prefill, extra, rates) for row in rows]


def _ranks(options: Options, most: int) -> list[int]:
    """The ranks to list, up to `most`."""
    if isinstance(options.rank, int):
        return [min(options.rank, most)]
    return [rank for rank in RANKS if rank < most] or [most // 4]


def _option(name: str, parameters: int, dtype: str, prefill: Prefill, extra: float, rates: Rates | None) -> MapOption:
    cost = cost_of(parameters, dtype, prefill, extra)
    name += "" if dtype == "bfloat16" else f", {dtype}"
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
    """The lines of a Markdown table of map options."""
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
