"""The verb `plan`: disk, memory and arithmetic that a capture and a solve will take, before anything runs.

Only configurations and tokenizers are read, never weights. Sizes are exact; arithmetic counts the products and leaves the
rest out.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from kvfit.errors import KvfitError
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import LEXICAL_LAGS, check_batch_size
from kvfit.fit.capture.capture import Options as CaptureOptions
from kvfit.fit.capture.geometry import Geometry, is_built_in, read_geometry
from kvfit.fit.solve.options import Options as SolveOptions
from kvfit.fit.solve.reader import least_bytes
from kvfit.fit.solve.system import input_set
from kvfit.fit.stats.accumulate import buffer_tokens, check_budget
from kvfit.fit.stats.layout import Layout, StatsDtype
from kvfit.fit.stats.moments import precise_matmul
from kvfit.spec import Inputs, ModelSpec, RopeSpec, Support

# Of a machine's bare matrix products; the benchmarks of capture and of solve measure both shares.
STATISTICS_SHARE, SOLVE_SHARE = 0.8, 0.6
MANY_COMMITS = 8


@dataclass(frozen=True)
class Rates:
    """Bare matrix products of a machine, in operations per second.

    Attributes:
        device: where they were measured.
        forward: in the dtype that models run in there: bfloat16 on a graphics card, float32 on a processor.
        float32: without TF32, as statistics need.
        float64: as solving needs.
    """

    device: str
    forward: float
    float32: float
    float64: float


def measure_rates(device: str | None = None, seconds: float = 0.2) -> Rates:
    """Time a square product of each dtype, `seconds` each.

    Args:
        device: None for the first GPU, else the CPU.
        seconds: how long to measure each.

    Raises:
        OptionError: no such device here.
    """
    place = models.find_device(device)
    size = 4096 if place.type == "cuda" else 1024

    def rate(dtype: torch.dtype) -> float:
        matrix = torch.ones(size, size, dtype=dtype, device=place)
        (matrix @ matrix).sum().item()
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            (matrix @ matrix)[0, 0].item()  # waits for it
            count += 1
        return 2.0 * size**3 * count / (time.perf_counter() - started)

    forward = torch.bfloat16 if place.type == "cuda" else torch.float32
    with precise_matmul():
        return Rates(str(place), rate(forward), rate(torch.float32), rate(torch.float64))


@dataclass(frozen=True)
class Plan:
    """What a capture and a solve will take.

    Attributes:
        source: the source's shape.
        target: the target's shape.
        tokens: pooled tokens of both splits.
        store_bytes: of the finished store.
        store_bytes_peak: while a commit is being written.
        model_bytes: both models in bfloat16.
        memory_bytes: peak beyond the models, at most: the budget and 1 GiB.
        commits: times that every block is read, updated and written.
        traffic_bytes: read from and written to the disk by all commits together.
        forward_flops: of both models over all tokens that are run: 2 per parameter and token.
        statistics_flops: of the products that make the statistics.
        solve_flops: of the probes, and of one factorisation per distinct set of layers and penalty with its solves and scores.
        solve_bytes: the least memory budget of `solve`.
        bundle_bytes: weights and biases.
        rates: of the machine that `seconds` are of; None for none.
    """

    source: Geometry
    target: Geometry
    tokens: int
    store_bytes: int
    store_bytes_peak: int
    model_bytes: int
    memory_bytes: int
    commits: int
    traffic_bytes: int
    forward_flops: float
    statistics_flops: float
    solve_flops: float
    solve_bytes: int
    bundle_bytes: int
    rates: Rates | None = None

    @property
    def seconds(self) -> dict[str, float] | None:
        """What the arithmetic takes on a machine of these `rates`; the forward passes at least, disk apart."""
        if self.rates is None:
            return None
        return {
            "forward": self.forward_flops / self.rates.forward,
            "statistics": self.statistics_flops / (STATISTICS_SHARE * self.rates.float32),
            "solve": self.solve_flops / (SOLVE_SHARE * self.rates.float64),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}

    def __str__(self) -> str:
        commits = f"{self.commits:,}, {_size(self.traffic_bytes)} read and written"
        if self.commits > MANY_COMMITS:
            commits += "; a larger --memory-budget makes them fewer"
        rows = (
            ("source", _shape(self.source)),
            ("target", _shape(self.target)),
            ("pooled tokens", f"{self.tokens:,}"),
            ("store on disk", f"{_size(self.store_bytes)}, {_size(self.store_bytes_peak)} while it is written"),
            ("models in bfloat16", _size(self.model_bytes)),
            ("memory beyond the models", f"at most {_size(self.memory_bytes)}"),
            ("commits", commits),
            ("forward passes", _flops(self.forward_flops) + self._time("forward", "at least")),
            ("statistics", _flops(self.statistics_flops) + self._time("statistics", "about")),
            (
                "solve",
                f"{_flops(self.solve_flops)} in float64{self._time('solve', 'about')}; in at least "
                f"{_size(self.solve_bytes)} of memory",
            ),
            ("bundle", _size(self.bundle_bytes)),
        )
        lines = [f"{name:<26}{value}" for name, value in rows]
        if self.rates is not None:
            lines.append(
                f"{'times':<26}on {self.rates.device}: bare products run at {self.rates.forward / 1e9:,.0f} (forward), "
                f"{self.rates.float32 / 1e9:,.0f} (float32) and {self.rates.float64 / 1e9:,.0f} GFLOP/s (float64); disk apart"
            )
        return "\n".join(lines)

    def _time(self, what: str, qualifier: str) -> str:
        return "" if self.seconds is None else f", {qualifier} {_duration(self.seconds[what])}"


def plan(
    source: str,
    target: str,
    *,
    num_sequences: int = 500,
    seq_len: int = 1024,
    token_stride: int = 4,
    skip_tokens: int = 1,
    top_k: int | Literal["all", "auto"] = "all",
    support: Support = "full",
    inputs: Inputs = "both",
    stats_dtype: StatsDtype = "float32",
    lexical: tuple[int, ...] | Literal["auto"] = "auto",
    weight_bytes: int = 4,
    penalties: int = 6,
    memory_budget: int = 2 << 30,
    revisions: tuple[str | None, str | None] = (None, None),
    batch_size: int = 8,
    trust_remote_code: bool = False,
    rates: Rates | None = None,
) -> Plan:
    """Count what `capture` and `solve` with these options will take.

    Args:
        source: ref of the source, or the name of a geometry in `kvfit.fit.capture.geometry.GEOMETRIES`.
        target: likewise.
        num_sequences, seq_len, token_stride, skip_tokens, inputs, stats_dtype, memory_budget, batch_size: as for `capture`.
        lexical: as for `capture`; ``auto`` counts as the lags that it stands for.
        top_k, support: as for `solve`; ``auto`` counts as ``all``.
        weight_bytes: of one stored weight.
        penalties: tried on the holdout split; 1 for a fixed penalty.
        revisions: of source and target.
        trust_remote_code: read configurations that carry code.
        rates: of a machine, from `measure_rates`; without them there are no times.

    Raises:
        OptionError: an option that `capture` or `solve` would refuse.
        MismatchError: more source layers are asked for than there are, or a memory budget that is too small; or the
            tokenizers differ.
        RefError: no such model.
        UnsupportedModelError: a configuration that does not say its geometry, or not of a causal language model.
    """
    capturing = CaptureOptions(
        num_sequences=num_sequences,
        seq_len=seq_len,
        token_stride=token_stride,
        skip_tokens=skip_tokens,
        inputs=inputs,
        stats_dtype=stats_dtype,
        lexical=lexical,
    )
    check_batch_size(batch_size)
    solving = SolveOptions(top_k=top_k, support=support, inputs=inputs)
    pair = [read_geometry(ref, revision, trust_remote_code) for ref, revision in zip((source, target), revisions, strict=True)]
    if not any(map(is_built_in, (source, target))):
        _check_tokenizers((source, target), revisions, trust_remote_code)
    a, b = pair
    layout = Layout(_spec(a), _spec(b), inputs, stats_dtype, LEXICAL_LAGS if lexical == "auto" else lexical)
    solving.check_layers(a.n_layers)
    kept = len(capturing.kept)
    tokens = num_sequences * kept
    kinds = 2 if inputs == "both" else 1
    f1, g1 = a.n_heads * a.head_dim, b.n_heads * b.head_dim
    chosen = top_k if isinstance(top_k, int) else a.n_layers
    # Features of one map, and how many systems it takes: one per target layer, or one for all that read every layer.
    f = chosen * kinds * (f1 if support == "full" else a.head_dim)
    systems = 2 * (1 if chosen == a.n_layers else b.n_layers) * (1 if support == "full" else b.n_heads)
    outputs = 2 * b.n_layers * (g1 if support == "full" else b.head_dim * b.n_heads)
    read = input_set((layout.source, layout.target), "keys", range(chosen), support, inputs)
    one = f / chosen
    probes = a.n_layers * ((2 if support == "full" else 2 * b.n_heads) * one**3 / 3 + 4.0 * one * one * outputs)
    per_token = sum(2.0 * array.n_pairs * array.rows * array.columns for array in layout.blocks)
    split_bytes = layout.split_bytes
    shifts = sum(array.chunk_bytes for array in layout.shifts)
    check_budget(layout, memory_budget)
    # The buffer is emptied when the next batch does not fit.
    capacity, batch = buffer_tokens(layout, memory_budget), batch_size * kept
    commits = max(1, -(-tokens // max(capacity // batch * batch, min(capacity, batch))))
    return Plan(
        source=a,
        target=b,
        tokens=tokens,
        store_bytes=2 * split_bytes + shifts,
        store_bytes_peak=4 * split_bytes + shifts,
        model_bytes=int(2 * (a.parameters + b.parameters)),
        memory_bytes=memory_budget + (1 << 30),
        commits=commits,
        traffic_bytes=(2 * commits - 1) * 2 * split_bytes,
        forward_flops=2.0 * (a.parameters + b.parameters) * num_sequences * seq_len,
        statistics_flops=per_token * tokens,
        # Every penalty is solved on the way to the best, which is then solved for good.
        solve_flops=probes + (penalties + (penalties > 1)) * (systems * f**3 / 3 + 4.0 * f * f * outputs),
        solve_bytes=least_bytes(read, "float64"),
        bundle_bytes=weight_bytes * (f * outputs + 2 * b.n_layers * g1),
        rates=rates,
    )


def _check_tokenizers(refs: tuple[str, str], revisions: tuple[str | None, str | None], trust_remote_code: bool) -> None:
    """Refuse a pair that `capture` would refuse; configurations without tokenizers can be planned for all the same."""
    try:
        tokenizers = [
            models.load_tokenizer(ref, revision, trust_remote_code=trust_remote_code)
            for ref, revision in zip(refs, revisions, strict=True)
        ]
    except KvfitError:
        return
    models.check_tokenizers(*tokenizers)


def _spec(geometry: Geometry) -> ModelSpec:
    """Only the geometry counts for sizes; the rest says that it is not known."""
    n = geometry.n_layers
    return ModelSpec(
        ref=geometry.name, revision=None, family="", n_layers=n, n_heads=geometry.n_heads, head_dim=geometry.head_dim,
        n_query_heads=geometry.n_heads, windows=(None,) * n, rope=RopeSpec((), (None,) * n), tokenizer_fingerprint="",
        config_digest="", weight_fingerprint="", dtype="", quantisation=None,
    )  # fmt: skip


def _shape(geometry: Geometry) -> str:
    shape = f"{geometry.n_layers} layers x {geometry.n_heads} KV heads x {geometry.head_dim}"
    return f"{geometry.name}: {shape}, {_count(geometry.parameters)} parameters"


def _count(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} B"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 60.0), ("min", 60.0), ("h", 48.0)):
        if seconds < size:
            return f"{seconds:.2g} {unit}"
        seconds /= 60 if unit != "h" else 24
    return f"{seconds:,.3g} days"


def _flops(count: float) -> str:
    return f"{count / 1e12:,.3g} TFLOP"
