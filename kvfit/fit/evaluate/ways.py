"""Make one row per way of moving a context, with its quality, its time and its share of the target's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfit.cost import ITEM_BYTES, Prefill, map_cost
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.clock import at_length, shown
from kvfit.fit.evaluate.options import Options
from kvfit.model.decoder import decoder_parameters, hidden_size
from kvfit.runtime.recompute import DRAFT_TOKENS, QUESTION_TOKENS
from kvfit.spec import KINDS, MapperSpec

CONTROLS = ("no_context", "mean", "shuffled", "raw")
# Names of the timings. Ways without one take no time before the target continues.
TIMES = {"native": "prefill", "transfer": "transfer", "handoff": "handoff", "auto": "auto"}


def label(way: str, options: Options) -> str:
    """A description of a way of moving."""
    return {
        "native": "target, its own cache (full prefill)",
        "transfer": "target, mapped cache alone",
        "handoff": f"target, handoff ({options.handoff})",
        "auto": f"target, handoff ({options.handoff_auto})",
        "source": "source alone, nothing moved",
        "no_context": "target without the context",
        "mean": "control: mean keys and values, no content",
        "shuffled": "control: another document's mapped cache",
        "raw": "control: the source's cache unmapped",
    }[way]


def rows(
    table: Mapping[str, Mapping[str, Any]],
    recall: Mapping[str, Any],
    times: Mapping[str, Any],
    work: Mapping[str, float],
    options: Options,
    tokens: int,
) -> list[dict[str, Any]]:
    """The list `ways` of `evaluation.json`.

    Args:
        table: likelihood and pooled recall by arm.
        recall: kinds of questions, as `recall_table` returns them.
        times: the result of `milliseconds`; empty if nothing was timed.
        work: the result of `work_shares`.
        options: options of the evaluation.
        tokens: number of moved tokens.
    """
    timed = at_length(dict(times), tokens) or {}
    prefill = timed.get("prefill", {}).get("median")
    out = []
    for way, scores in table.items():
        taken = timed.get(TIMES.get(way, ""), {}).get("median")
        out.append(
            {
                "way": way,
                "label": label(way, options),
                "judged": way == "handoff",
                "control": way in CONTROLS,
                **scores,
                "recall_by_kind": {
                    kind: {name: entry["arms"][way][name] for name in ("recall", "log_probability")}
                    for kind, entry in recall.items()
                    if entry["judges"] and way in entry["arms"]
                },
                "milliseconds": taken,
                "speed": prefill / taken if taken and prefill else None,
                "share_of_work": work.get(way),
                "breaks_even": times.get("breaks_even", {}).get(way) if times else None,
            }
        )
    return out


def work_shares(pair: arms.Pair, tokens: int, recomputed: Mapping[str, float]) -> dict[str, float]:
    """Operations of each way as a share of the target's prefill of `tokens` tokens, counting matrix products only.

    A prefill multiplies each token with every weight of the decoder layers and attends to the tokens before it. The source's
    own prefill is not counted, because it happens before anything is moved. Its passes as a guide are counted.

    Args:
        pair: models and mapper.
        tokens: number of tokens that are moved.
        recomputed: by way, the measured share of them that the target ran again. A way that is not named is not returned.
    """
    spec = pair.mapper.spec
    item_bytes, width = ITEM_BYTES.get(spec.target.dtype, 2), hidden_size(pair.target)
    weights = Prefill(decoder_parameters(pair.target), item_bytes, hidden_size=width)
    prefill = tokens * 2.0 * weights.parameters + _attention(spec, tokens)
    mapped = tokens * map_cost(spec, weights).flops_per_token
    n_exact = min(tokens, pair.exact_head + pair.exact_tail)
    guide = 2.0 * (QUESTION_TOKENS + DRAFT_TOKENS) * decoder_parameters(pair.source)

    def moved(way: str, guided: bool) -> float:
        return (mapped + (n_exact / tokens + recomputed[way]) * prefill + guided * guide) / prefill

    found = {"native": 1.0, "transfer": mapped / prefill, "source": 0.0, "no_context": 0.0}
    guided = {"handoff": bool(pair.recompute), "auto": True}
    return found | {way: moved(way, used) for way, used in guided.items() if way in recomputed}


def _attention(spec: MapperSpec, tokens: int) -> float:
    """Operations for scores and weighted sums of a causal prefill, in which each token reads half of the others on average."""
    target = spec.target
    sizes = sum(target.shape(kind, layer_index)[1] for kind in KINDS for layer_index in range(target.n_layers))
    return float(target.n_query_heads * sizes * tokens**2)


def speed_text(row: Mapping[str, Any], tokens: int) -> str:
    """The speed of a way of moving and the length from which on it pays, as text; empty if nothing was timed."""
    if row["speed"] is None:
        return ""
    found = f"{shown(row['milliseconds'])} for {tokens} tokens, {row['speed']:.2g} x as fast as a prefill"
    if row["breaks_even"] is None:
        return f"{found}; does not pay at any length that was timed"
    return f"{found}; breaks even at {row['breaks_even']} tokens"
