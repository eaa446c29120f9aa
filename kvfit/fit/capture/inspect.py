"""The verb `inspect`: what kvfit finds in a model, and whether it can map its cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from kvfit.errors import UnsupportedModelError
from kvfit.fit.capture.models import Loaded, Options, load
from kvfit.fit.capture.selfcheck import self_check
from kvfit.model import cache as caches
from kvfit.model.decoder import family, setting, text_config
from kvfit.model.digests import quantisation
from kvfit.model.rope_probe import Probe, probe
from kvfit.spec import RopeTable

_N_TOKENS = 1200  # beyond position 1,000 a slightly wrong frequency becomes visible


@dataclass(frozen=True)
class Inspection:
    """The result for one model.

    Attributes:
        ref: the model's ref.
        family: transformers' ``model_type``.
        supported: whether kvfit can map its cache.
        reason: why it is not supported; None if it is.
        cache_argument: name of the argument for the cache.
        parameters: number of parameters.
        quantisation: name of the quantisation method; None if it is not quantised.
        seen: geometry and rotary description; None if it is not supported.
        windows: per KV layer, the sliding window or None; empty if it is not supported.
        n_query_heads: query heads per layer.
    """

    ref: str
    family: str
    supported: bool
    reason: str | None
    cache_argument: str | None
    parameters: int
    quantisation: str | None
    seen: Probe | None
    windows: tuple[int | None, ...]
    n_query_heads: int | None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values, with a list of layers and of rotary tables."""
        seen = self.seen
        return {
            "ref": self.ref,
            "family": self.family,
            "supported": self.supported,
            "reason": self.reason,
            "cache_argument": self.cache_argument,
            "parameters": self.parameters,
            "quantisation": self.quantisation,
            "dtype": None if seen is None else seen.dtype,
            "n_layers": None if seen is None else seen.n_layers,
            "n_heads": None if seen is None else seen.n_heads,
            "head_dim": None if seen is None else seen.head_dim,
            "geometry": None if seen is None or seen.geometry is None else [list(heads) for heads in seen.geometry],
            "n_query_heads": self.n_query_heads,
            "layers": [
                {"layer_index": index, "window": window, "table": None if seen is None else seen.rope.assignment[index]}
                for index, window in enumerate(self.windows)
            ],
            "tables": [] if seen is None else [_table_json(table) for table in seen.rope.tables],
        }

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The result as a few aligned lines."""
        seen = self.seen
        rows = [("model", self.ref), ("family", self.family), ("parameters", f"{self.parameters:,}")]
        if self.quantisation is not None:
            rows.append(("quantised", self.quantisation))
        if seen is not None:
            rows += [
                ("KV layers", str(seen.n_layers)),
                ("KV heads", f"{_heads(seen)}, for {self.n_query_heads} query heads"),
                ("dtype", seen.dtype),
                ("windows", _runs([_window(window) for window in self.windows])),
                ("rotation", _runs([_assigned(index) for index in seen.rope.assignment])),
            ]
            rows += [
                (f"table {index}", _table_line(table, _key_size(seen, index))) for index, table in enumerate(seen.rope.tables)
            ]
        rows.append(("verdict", "supported" if self.supported else f"not supported: {self.reason}"))
        return "\n".join(f"{name:<11} {value}" for name, value in rows)


def inspect_model(model_or_ref: Any, *, ref: str | None = None, options: Options | None = None) -> Inspection:
    """Find out what kvfit can do with a model.

    The model is loaded with its weights and run: twice on 8 tokens to find geometry and rotation, once on 1,200 (or as many as
    the model has positions for) to verify them. There is no list of known families.

    Args:
        model_or_ref: a loaded model, a result of `kvfit.fit.capture.models.load`, or a ref to load.
        ref: the name of a model that is passed loaded.
        options: how to load a ref.

    Raises:
        RefError: the ref cannot be loaded. A model that kvfit cannot map is a result and not an error.
    """
    loaded = load(model_or_ref, options=options) if isinstance(model_or_ref, str) else model_or_ref
    model = loaded.model if isinstance(loaded, Loaded) else loaded
    if isinstance(loaded, Loaded):
        ref = loaded.ref if loaded.revision is None else f"{loaded.ref}@{loaded.revision}"
    config = text_config(model)
    heads = setting(config, "num_attention_heads")
    report = Inspection(
        ref=ref or type(model).__name__,
        family=family(model),
        supported=False,
        reason=None,
        cache_argument=None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        quantisation=quantisation(model.config),
        seen=None,
        windows=(),
        n_query_heads=heads if isinstance(heads, int) else None,
    )
    try:
        argument = caches.cache_argument(model)
        seen = probe(model)
        device = model.get_input_embeddings().weight.device
        longest = min(_N_TOKENS, setting(config, "max_position_embeddings") or _N_TOKENS)
        ids = torch.arange(longest) * 5 % int(config.vocab_size)
        self_check(model, seen, ids[None].to("cpu" if device.type == "meta" else device))
    except UnsupportedModelError as error:
        return dataclasses.replace(report, reason=str(error))
    windows = caches.layer_windows(model, seen.n_layers)
    return dataclasses.replace(report, supported=True, cache_argument=argument, seen=seen, windows=windows)


def _table_json(table: RopeTable) -> dict[str, Any]:
    return {
        "pairing": table.pairing,
        "rotated_width": table.rotated_width,
        "attention_scaling": table.attention_scaling,
        "inverse_frequencies": list(table.inverse_frequencies),
    }


def _heads(seen: Probe) -> str:
    """``2 of size 16``; layer by layer where they differ, with the size of values where it is another."""
    layers = seen.geometry or ((seen.n_heads, seen.head_dim, seen.head_dim),)
    return _runs([f"{n} of size {keys}" + ("" if keys == values else f"/{values}") for n, keys, values in layers])


def _key_size(seen: Probe, index: int) -> int:
    """Of the layers that a rotary table turns."""
    geometry = seen.geometry or ()
    return next((heads[1] for heads, used in zip(geometry, seen.rope.assignment, strict=False) if used == index), seen.head_dim)


def _table_line(table: RopeTable, head_dim: int) -> str:
    width = "all" if table.rotated_width == head_dim else f"first {table.rotated_width}"
    slowest = min((value for value in table.inverse_frequencies if value), default=0.0)
    scaling = "" if table.attention_scaling == 1.0 else f", attention scaling {table.attention_scaling:.6g}"
    pairing = "half-split" if table.pairing == "half" else "interleaved"
    return f"{width} features, {pairing} pairs, {max(table.inverse_frequencies):.4g} to {slowest:.4g} radians a token{scaling}"


def _window(window: int | None) -> str:
    return "full" if window is None else f"{window:,} tokens"


def _assigned(index: int | None) -> str:
    return "no rotation" if index is None else f"table {index}"


def _runs(names: list[str]) -> str:
    """Names with equal neighbours counted and repeated patterns folded, such as ``full x3, 24 tokens, full``."""
    for period in range(1, len(names) // 2 + 1):
        if len(names) % period == 0 and names == names[:period] * (len(names) // period) and len(set(names)) > 1:
            return f"({_runs(names[:period])}) x{len(names) // period}"
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)
