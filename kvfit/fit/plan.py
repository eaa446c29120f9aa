"""The verb `plan`: the disk, memory and time that capture, solve and evaluate will take, and whether a map will pay.

Only configurations and tokenizers are read, never weights. Sizes are exact, or the most that they can be where `top_k` chooses
among source layers whose heads differ. Operations are those of matrix products alone. Times name their machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvfit.cost import ITEM_BYTES, Prefill
from kvfit.errors import KvfitError
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import LEXICAL_LAGS, check_batch_size
from kvfit.fit.capture.capture import Options as CaptureOptions
from kvfit.fit.capture.geometry import Geometry, is_built_in, read_geometry
from kvfit.fit.hardware import EFFICIENCY, Rates
from kvfit.fit.payoff import MapOption, map_options, table
from kvfit.fit.solve.options import PENALTIES
from kvfit.fit.solve.options import Options as SolveOptions
from kvfit.fit.solve.reader import least_bytes
from kvfit.fit.solve.system import InputSet, input_set, widest_layers
from kvfit.fit.stats.budget import buffer_tokens, check_budget, fits_in_memory
from kvfit.fit.stats.layout import Block, Layout
from kvfit.spec import KINDS, ModelSpec, RopeSpec

# Shares of the rate of plain matrix products; the benchmarks of capture and solve measure both.
STATISTICS_SHARE, SOLVE_SHARE = 0.8, 0.6
MANY_COMMITS = 8
# Tokens that an evaluation with default options runs through both models: documents and questions in every arm.
EVALUATION_TOKENS = 48 * 512 * 8 + 48 * 400 * 4


@dataclass(frozen=True)
class Options:
    """Options of the planned run.

    Attributes:
        capture: options of `capture`; ``auto`` for ``lexical`` counts as the lags that it stands for.
        solve: options of `solve`; ``auto`` for ``top_k`` counts as ``all``.
        memory_budget: memory for statistics in bytes, as for `capture`.
        batch_size: sequences per forward pass, as for `capture`.
        revisions: revisions of source and target.
        trust_remote_code: run code from the models' repositories to read configurations.
        gpus: number of GPUs that share capture and evaluation.
    """

    capture: CaptureOptions = field(default_factory=CaptureOptions)
    solve: SolveOptions = field(default_factory=SolveOptions)
    memory_budget: int = 2 << 30
    batch_size: int = 8
    revisions: tuple[str | None, str | None] = (None, None)
    trust_remote_code: bool = False
    gpus: int = 1


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        source: the source's shape.
        target: the target's shape.
        tokens: pooled tokens of both splits.
        store_bytes: size of the finished store.
        store_bytes_peak: size of the store while a commit is written.
        model_bytes: size of both models' weights.
        memory_bytes: upper bound of the peak memory besides the models: the budget and 1 GiB.
        commits: number of times that every block is read, updated and written.
        traffic_bytes: bytes read from and written to the disk by all commits.
        forward_flops: operations of both models on all tokens: 2 per parameter and token.
        statistics_flops: operations of the products that make the statistics.
        solve_flops: operations of the probes, and of one factorisation per distinct set of layers and penalty with its solves
            and scores.
        solve_bytes: the smallest memory budget for `solve`.
        bundle_bytes: size of weights and biases.
        evaluate_flops: operations of an evaluation with default options.
        maps: what each kind of map costs, and from which length on it pays.
        gpus: number of GPUs that share capture and evaluation.
        rates: rates of the machine for `seconds`; None if there is none.
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
    evaluate_flops: float
    maps: list[MapOption]
    gpus: int = 1
    rates: Rates | None = None

    @property
    def seconds(self) -> dict[str, float] | None:
        """Times of each part on a machine with these `rates`, without the disk; those of forward passes are lower bounds."""
        if self.rates is None:
            return None
        return {
            "forward": self.forward_flops / self.rates.forward / self.gpus,
            "statistics": self.statistics_flops / (STATISTICS_SHARE * self.rates.float32) / self.gpus,
            "solve": self.solve_flops / (SOLVE_SHARE * self.rates.float64),
            "evaluate": self.evaluate_flops / self.rates.forward / self.gpus,
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds, "maps": [option.to_json() for option in self.maps]}

    def __str__(self) -> str:
        commits = f"{self.commits:,}, {_size(self.traffic_bytes)} read and written"
        if self.commits > MANY_COMMITS:
            commits += "; a larger --memory-budget makes them fewer"
        rows = (
            ("source", _shape(self.source)),
            ("target", _shape(self.target)),
            ("pooled tokens", f"{self.tokens:,}"),
            ("store on disk", f"{_size(self.store_bytes)}, {_size(self.store_bytes_peak)} while it is written"),
            ("models", _size(self.model_bytes)),
            ("memory beyond the models", f"at most {_size(self.memory_bytes)}"),
            ("commits", commits),
            ("forward passes", _flops(self.forward_flops) + self._time("forward", "at least")),
            ("statistics", _flops(self.statistics_flops) + self._time("statistics", "about")),
            (
                "solve",
                f"{_flops(self.solve_flops)} in float64{self._time('solve', 'about')}; in at least "
                f"{_size(self.solve_bytes)} of memory",
            ),
            ("evaluate", _flops(self.evaluate_flops) + self._time("evaluate", "at least")),
            ("bundle, all layers", _size(self.bundle_bytes)),
        )
        lines = [f"{name:<26}{value}" for name, value in rows]
        if self.rates is not None:
            rates, how = self.rates, "measured here"
            if rates.published:
                how = f"{EFFICIENCY:.0%} of the published peaks"
            machine = rates.device if self.gpus == 1 else f"{self.gpus} x {rates.device}"
            lines.append(
                f"{'times':<26}on {machine}, {how}: {rates.forward / 1e9:,.0f} (forward), {rates.float32 / 1e9:,.0f} (float32) "
                f"and {rates.float64 / 1e9:,.0f} GFLOP/s (float64); disk apart"
            )
        lines += ["", "cost of a map per token, in bfloat16 unless stated otherwise (computed, not measured):"]
        return "\n".join(lines + table(self.maps))

    def _time(self, what: str, qualifier: str) -> str:
        return "" if self.seconds is None else f", {qualifier} {_duration(self.seconds[what])}"


def plan(source: str, target: str, options: Options | None = None, rates: Rates | None = None) -> Plan:
    """Estimate what `capture`, `solve` and `evaluate` will take, and what maps of this pair cost.

    Args:
        source: ref of the source, or the name of a geometry in `kvfit.fit.capture.geometry.GEOMETRIES`.
        target: ref or geometry of the target.
        options: options of the planned run.
        rates: rates of a machine, from `kvfit.fit.hardware`; without them there are no times.

    Raises:
        OptionError: `capture` or `solve` would refuse an option.
        MismatchError: there are fewer source layers than requested, the memory budget is too small, or the tokenizers
            differ.
        RefError: a model does not exist or cannot be reached.
        UnsupportedModelError: a configuration has no geometry, or is not that of a causal language model.
    """
    options = options or Options()
    capture, solve = options.capture, options.solve
    check_batch_size(options.batch_size)
    a, b = (
        read_geometry(ref, revision, options.trust_remote_code)
        for ref, revision in zip((source, target), options.revisions, strict=True)
    )
    if not any(map(is_built_in, (source, target))):
        _check_tokenizers((source, target), options.revisions, options.trust_remote_code)
    lags = LEXICAL_LAGS if capture.lexical == "auto" else capture.lexical
    layout = Layout(_spec(a), _spec(b), capture.inputs, capture.stats_dtype, lags)
    solve.check_layers(a.n_layers)
    pair = layout.source, layout.target
    solve.check_heads(*pair)
    check_budget(layout, options.memory_budget)
    kept = len(capture.kept)
    tokens = capture.num_sequences * kept
    read_lags = solve.lags(lags)
    inputs = capture.inputs if solve.inputs == "auto" else solve.inputs
    chosen = solve.top_k if isinstance(solve.top_k, int) else a.n_layers
    layers = widest_layers(pair[0], chosen)
    reads = {kind: input_set(pair, kind, layers, solve.support, inputs, range(len(read_lags))) for kind in KINDS}
    targets: list[Block] = [(kind, layer_index) for kind in KINDS for layer_index in range(1 if read_lags else 0, b.n_layers)]
    read = reads["keys"]
    split_bytes, shifts = layout.split_bytes, sum(array.chunk_bytes for array in layout.shifts)
    # The buffer is emptied when the next batch does not fit in.
    capacity, batch = buffer_tokens(layout, options.memory_budget), options.batch_size * kept
    # Statistics in memory are written once at the end. Snapshots in between are written while the models run.
    flushes = max(1, -(-tokens // max(capacity // batch * batch, min(capacity, batch))))
    commits = 1 if fits_in_memory(layout, options.memory_budget) else flushes
    prefill = Prefill(b.decoder_parameters or b.parameters, b.item_bytes, hidden_size=b.hidden_size)
    item = b.item_bytes if solve.dtype == "auto" else ITEM_BYTES[solve.dtype]
    per_token = sum(2.0 * array.n_pairs * array.rows * array.columns for array in layout.blocks)
    return Plan(
        source=a,
        target=b,
        tokens=tokens,
        store_bytes=2 * split_bytes + shifts,
        store_bytes_peak=4 * split_bytes + shifts,
        model_bytes=int(a.item_bytes * a.parameters + b.item_bytes * b.parameters),
        memory_bytes=options.memory_budget + (1 << 30),
        commits=commits,
        traffic_bytes=(2 * commits - 1) * 2 * split_bytes,
        forward_flops=2.0 * (a.parameters + b.parameters) * capture.num_sequences * capture.seq_len,
        statistics_flops=per_token * tokens,
        solve_flops=_solve_flops(read, targets, chosen == a.n_layers, 1 if solve.penalty != "auto" else len(PENALTIES)),
        solve_bytes=least_bytes(read, "float64", basis=solve.may_share(inputs)),
        bundle_bytes=sum(layout.target.width_of(*block) * (item * reads[block[0]].n_inputs + 4) for block in targets),
        evaluate_flops=2.0 * (a.parameters + b.parameters) * EVALUATION_TOKENS,
        maps=map_options(*pair, prefill, options=replace(solve, inputs=inputs), n_lags=len(read_lags), rates=rates),
        gpus=options.gpus,
        rates=rates,
    )


def _solve_flops(read: InputSet, targets: list[Block], shared: bool, penalties: int) -> float:
    """Operations of probing single layers, and of one factorisation per distinct set and penalty with solves and scores."""
    f, outputs, panels = float(read.n_inputs), sum(read.target.width_of(*block) for block in targets), len(read.panels)
    one = f / len(read.source_layers)
    probes = read.source.n_layers * (2 * panels * one**3 / 3 + 4.0 * one * one * outputs)
    systems = panels * (2 if shared else len(targets))
    # Every penalty is solved once to find the best, which is then solved again for the result.
    return probes + (penalties + (penalties > 1)) * (systems * f**3 / 3 + 4.0 * f * f * outputs)


def _check_tokenizers(refs: tuple[str, str], revisions: tuple[str | None, str | None], trust_remote_code: bool) -> None:
    """Refuse a pair whose tokenizers `capture` would refuse. Models without tokenizers are accepted."""
    try:
        tokenizers = [
            models.load_tokenizer(ref, revision, trust_remote_code=trust_remote_code)
            for ref, revision in zip(refs, revisions, strict=True)
        ]
    except KvfitError:
        return
    models.check_tokenizers(*tokenizers)


def _spec(geometry: Geometry) -> ModelSpec:
    """A spec of a geometry. Sizes depend on nothing else, so the other fields are empty."""
    n = geometry.n_layers
    # Current decoder layers have about 12.5 weights per squared width, which gives the width.
    hidden = ((geometry.decoder_parameters or geometry.parameters) / (12.5 * n)) ** 0.5
    n_query = geometry.n_query_heads or max(geometry.n_heads, round(hidden / geometry.head_dim))
    return ModelSpec(
        ref=geometry.name, revision=None, family="", n_layers=n, n_heads=geometry.n_heads, head_dim=geometry.head_dim,
        n_query_heads=n_query, windows=(None,) * n, rope=RopeSpec((), (None,) * n), tokenizer_fingerprint="",
        config_digest="", weight_fingerprint="", dtype="", quantisation=None, geometry=geometry.layers,
    )  # fmt: skip


def _shape(geometry: Geometry) -> str:
    alike = ((geometry.n_heads, geometry.head_dim, geometry.head_dim),) * geometry.n_layers
    shape = " and ".join(
        f"{count} layers x {heads} KV heads x {size}" + ("" if value == size else f" (values {value})")
        for (heads, size, value), count in Counter(geometry.layers or alike).items()
    )
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
