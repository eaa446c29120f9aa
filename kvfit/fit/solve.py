"""The verb `solve`: a store in, a bundle out. No model runs here.

For each kind and target layer: choose source layers, choose the penalty, solve, and fold the gain into weight and bias.
Choices are made on the holdout split, by the error of the map *as it will be used*, gain included.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

import kvfit
from kvfit.bundle import add_files, write_bundle
from kvfit.errors import MismatchError, SolveError
from kvfit.fit import ridge
from kvfit.fit.plots import r2_layers, r2_map
from kvfit.fit.problem import Problem, Reader
from kvfit.fit.ridge import Moments, PenaltyScale
from kvfit.fit.select import Chosen, Probe, Select, greedy, probe, rank, shared_scores, take
from kvfit.fit.store import Split, Store
from kvfit.spec import FORMAT_VERSION, KINDS, Inputs, Kind, LayerMap, MapperSpec, Support

Gain = Literal["variance", "head", "none"]
Dtype = Literal["float32", "bfloat16", "float16"]

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
# Penalties whose error is this close to the best are the same to the data; the smaller one keeps more of the variance.
INDIFFERENCE = 1e-3
# The holdout split estimates a prediction's variance without the optimism of the fit split, but needs rows to do so.
HOLDOUT_ENOUGH = 2048


@dataclass(frozen=True)
class Options:
    """What `solve` was asked for; recorded in the bundle.

    Attributes:
        top_k: how many source layers each target layer reads: a number, ``all``, or ``auto`` (best on the holdout split).
        select: ``independent`` or ``greedy``.
        shared_layers: keys and values read the same source layers.
        penalty: a number, or ``auto`` to choose per kind and layer from `PENALTIES` on the holdout split.
        penalty_scale: what the penalty multiplies, see `ridge.factorise`.
        support: ``full`` or ``head``.
        inputs: ``same`` or ``both``; the latter needs a store captured with both.
        gain: ``variance`` per output, ``head``, or ``none``.
        score: the split that ranks source layers; ``fit`` only to reproduce the literature.
        dtype: of the stored weights.
    """

    top_k: int | Literal["all", "auto"] = "all"
    select: Select = "independent"
    shared_layers: bool = False
    penalty: float | Literal["auto"] = "auto"
    penalty_scale: PenaltyScale = "mean-variance"
    support: Support = "full"
    inputs: Inputs = "same"
    gain: Gain = "variance"
    score: Literal["holdout", "fit"] = "holdout"
    dtype: Dtype = "float32"


# The recipe of Heo et al., arXiv:2608.03893: in-sample head-matched ranking by the mean of keys' and values' R2, layers shared
# by both, k = 8, penalty 0.01 added to the covariance (their equation adds it to an unnormalised sum, their sweep fits
# the covariance; `penalty_scale` can say either), no gain.
RECIPES = {
    "heo2026": Options(
        top_k=8, shared_layers=True, penalty=0.01, penalty_scale="covariance", gain="none", score="fit"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Solved:
    """What `solve` made: the bundle's folder and the report that `solve.json` holds."""

    bundle: Path
    report: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"bundle": str(self.bundle), **self.report}

    def __str__(self) -> str:
        found = {kind: self.report["r2"][kind]["chosen"]["holdout"] for kind in KINDS}
        return f"{self.bundle}: holdout R2 {found['keys']:.3f} keys, {found['values']:.3f} values"


def solve(
    store: str | Path,
    out: str | Path,
    *,
    options: Options | None = None,
    device: torch.device | str = "cpu",
    plots: bool = False,
    progress: bool = True,
) -> Solved:
    """Solve the maps that a store's statistics allow and write them as a bundle.

    Args:
        store: a finished store.
        out: the bundle's folder; must not exist.
        options: see `Options`.
        device: where the linear algebra runs, in float64.
        plots: also draw the R2 map and the curves per layer into the bundle.
        progress: show bars.

    Raises:
        StoreError: the store is missing, unfinished or damaged.
        SolveError: a system has no trustworthy solution, or the holdout split is empty.
        MismatchError: the options ask for what the store or the two geometries do not allow.
        BundleError: `out` exists or cannot be written.
    """
    options = options or Options()
    opened = Store.open(store)
    _check(opened, options, Path(out))
    reader = Reader(opened, device=device)
    solver = _Solver(reader, options, progress)
    probes = {kind: probe(reader, kind, support=_probe_support(opened, options), progress=progress) for kind in KINDS}
    chosen = solver.choose(probes)
    penalties = {kind: solver.penalties(kind, chosen[kind]) for kind in KINDS}
    solved = list(_layer_maps(solver, chosen, penalties))
    details = [detail for _, _, detail in solved]
    spec = MapperSpec(
        format_version=FORMAT_VERSION,
        kvfit_version=kvfit.__version__,
        source=opened.source,
        target=opened.target,
        keys_rotated=False,
        support=options.support,
        inputs=options.inputs,
        gain=options.gain,
        dtype=options.dtype,
        layers=tuple(_layer_map(detail) for detail in details),
    )
    report = _report(opened, options, probes, details)
    weights = ((m.kind, m.layer_index, weight, bias) for m, (weight, bias, _) in zip(spec.layers, solved, strict=True))
    write_bundle(out, spec, weights, recipe=opened.recipe, solve=report)
    if plots:
        add_files(out, {"r2-map.png": r2_map(report), "r2-layers.png": r2_layers(report)})
    return Solved(Path(out), report)


def _check(store: Store, options: Options, out: Path) -> None:
    if out.exists():
        raise MismatchError(f"found {out} already there, needed a new folder: choose another --out or remove it")
    if store.count("holdout") < 2:
        raise SolveError(
            f"{store.path}: found {store.count('holdout')} holdout tokens, needed at least 2: capture with --holdout above 0"
        )
    if options.inputs == "both" and store.inputs != "both":
        raise MismatchError(f"{store.path}: found statistics of like kinds only, needed keys by values: capture with --inputs both")
    if options.support == "head" and store.source.head_dim != store.target.head_dim and store.source.n_heads != store.target.n_heads:
        raise MismatchError(
            f"--support head: found {store.source.n_heads} heads x {store.source.head_dim} to {store.target.n_heads} x "
            f"{store.target.head_dim}, needed matching heads: use --support full"
        )
    if isinstance(options.top_k, int) and options.top_k < 1:
        raise MismatchError(f"--top-k: found {options.top_k}, needed at least 1")


def _probe_support(store: Store, options: Options) -> Support:
    """The literature ranks by matched heads; a full map is ranked by what a full map reads."""
    return "head" if options.score == "fit" and store.source.n_heads == store.target.n_heads else options.support


class _Solver:
    """The regressions of one store under one set of options."""

    def __init__(self, reader: Reader, options: Options, progress: bool) -> None:
        self.reader = reader
        self.store = reader.store
        self.options = options
        self.bar = None if progress else True
        self.progress = progress
        self.details: dict[tuple[Kind, int], dict[str, Any]] = {}

    def problems(self, kind: Kind, source_layers: Sequence[int], target_layers: Sequence[int]) -> Iterator[Problem]:
        return Problem.of(
            self.store, kind, source_layers, target_layers, support=self.options.support, inputs=self.options.inputs
        )

    # -- choosing ----------------------------------------------------------------------------------------------

    def choose(self, probes: dict[Kind, Probe]) -> Chosen:
        n_source = self.store.source.n_layers
        top_k = self.options.top_k
        if top_k == "all" or (isinstance(top_k, int) and top_k >= n_source):
            everything = tuple(range(n_source))
            return {kind: [everything] * self.store.target.n_layers for kind in KINDS}
        rankings = self._rankings(probes, n_source if top_k == "auto" else top_k)
        if top_k != "auto":
            return {kind: take(rankings[kind], top_k) for kind in KINDS}
        sizes = sorted({k for k in (1, 2, 4, 8, 12, 16, 20) if k < n_source} | {n_source})
        return {kind: self._best_size(kind, [take(rankings[kind], k) for k in sizes]) for kind in KINDS}

    def _rankings(self, probes: dict[Kind, Probe], k: int) -> dict[Kind, list[list[int]]]:
        score = self.options.score
        if self.options.select == "greedy":
            sizes = (self.store.source.n_layers, self.store.target.n_layers, k)
            if self.options.shared_layers:
                shared = greedy(*sizes, lambda chosen: (self.scores("keys", chosen) + self.scores("values", chosen)) / 2, progress=self.progress)
                return dict.fromkeys(KINDS, shared)
            return {kind: greedy(*sizes, lambda chosen, kind=kind: self.scores(kind, chosen), progress=self.progress) for kind in KINDS}  # type: ignore[misc]
        if self.options.shared_layers:
            scores = shared_scores(probes, score)
        else:
            scores = {kind: probes[kind].holdout_layers if score == "holdout" else probes[kind].fit_layers for kind in KINDS}
        return {kind: rank(scores[kind]) for kind in KINDS}

    def scores(self, kind: Kind, source_layers: tuple[int, ...]) -> Tensor:
        """Holdout R2 (L_target,) of one set of source layers at the middle penalty."""
        penalty = self.options.penalty if self.options.penalty != "auto" else 1e-2
        errors, totals = self._errors(kind, source_layers, range(self.store.target.n_layers), (penalty,))
        return 1 - errors[0] / totals

    def _best_size(self, kind: Kind, options: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """Per target layer, the set (one per size) with the lowest holdout error; near-ties go to the smaller set."""
        found = [self._best_errors(kind, sets) for sets in options]
        best: list[tuple[int, ...]] = []
        for layer_index in range(self.store.target.n_layers):
            errors = [by_layer[layer_index] for by_layer in found]
            limit = min(errors) * (1 + INDIFFERENCE)
            best.append(next(sets[layer_index] for sets, error in zip(options, errors, strict=True) if error <= limit))
        return best

    def _best_errors(self, kind: Kind, sets: list[tuple[int, ...]]) -> list[float]:
        grid = self._grid()
        errors = [0.0] * len(sets)
        for source_layers, members in self._groups(sets).items():
            by_penalty, _ = self._errors(kind, source_layers, members, grid)
            for position, layer_index in enumerate(members):
                errors[layer_index] = float(by_penalty[:, position].min())
        return errors

    def penalties(self, kind: Kind, sets: list[tuple[int, ...]]) -> list[float]:
        """The penalty of each target layer."""
        grid = self._grid()
        if len(grid) == 1:
            return [grid[0]] * len(sets)
        chosen = [0.0] * len(sets)
        for source_layers, members in tqdm(self._groups(sets).items(), desc=f"penalty {kind}", disable=self.bar):
            errors, _ = self._errors(kind, source_layers, members, grid)
            for position, layer_index in enumerate(members):
                column = errors[:, position]
                near = (column <= column.min() * (1 + INDIFFERENCE)).nonzero()[0, 0]
                chosen[layer_index] = grid[int(near)]
        return chosen

    def _grid(self) -> tuple[float, ...]:
        return PENALTIES if self.options.penalty == "auto" else (self.options.penalty,)

    def _groups(self, sets: list[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
        """Target layers by the set that they read: one factorisation serves a group."""
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for layer_index, chosen in enumerate(sets):
            groups[chosen].append(layer_index)
        return dict(groups)

    def _errors(
        self, kind: Kind, source_layers: Sequence[int], target_layers: Sequence[int], penalties: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Holdout errors (penalties, target layers) of the map as used, and the holdout scatter (target layers,)."""
        errors = torch.zeros(len(penalties), len(target_layers), dtype=torch.float64)
        totals = torch.zeros(len(target_layers), dtype=torch.float64)
        for problem in self.problems(kind, source_layers, target_layers):
            fit, holdout = self.reader.moments(problem, "fit"), self.reader.moments(problem, "holdout")
            totals += problem.per_head(holdout.target_scatter).sum(1).cpu()
            for row, penalty in enumerate(penalties):
                weight = self._solve(fit, penalty, f"{kind} of target layers {list(target_layers)}")[0]
                weight, bias = self._gained(fit, holdout, weight, problem)
                errors[row] += problem.per_head(ridge.squared_error(holdout, weight, bias)).sum(1).cpu()
        return errors, totals

    # -- solving -----------------------------------------------------------------------------------------------

    def _solve(self, fit: Moments, penalty: float, name: str) -> tuple[Tensor, ridge.Factor]:
        factor = ridge.factorise(fit.source_scatter, fit.count, penalty, scale=self.options.penalty_scale, name=name)
        return ridge.solve(factor, fit.cross_scatter), factor

    def _gained(self, fit: Moments, holdout: Moments, weight: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """Weight and bias with the gain folded in: outputs are scaled about their mean."""
        if self.options.gain != "none":
            on = holdout if holdout.count >= HOLDOUT_ENOUGH else fit
            groups = None
            if self.options.gain == "head":
                groups = len(problem.outputs) * (problem.n_target_heads if problem.head is None else 1)
            weight = weight * ridge.variance_gain(
                on.target_scatter, ridge.prediction_scatter(on.source_scatter, weight), groups
            )
        return weight, ridge.bias(fit, weight)

    def layer(self, kind: Kind, layer_index: int, source_layers: tuple[int, ...], penalty: float) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Weight, bias and report of one kind of one target layer."""
        weights, biases, heads = [], [], []
        error: dict[Split, float] = defaultdict(float)
        total: dict[Split, float] = defaultdict(float)
        used = 0.0
        damping = condition = 0.0
        gains = []
        for problem in self.problems(kind, source_layers, (layer_index,)):
            name = f"{kind} of target layer {layer_index}"
            found = {split: self.reader.moments(problem, split) for split in ("fit", "holdout")}
            plain, factor = self._solve(found["fit"], penalty, name)
            plain_bias = ridge.bias(found["fit"], plain)
            for split, moments in found.items():
                by_head = problem.per_head(ridge.squared_error(moments, plain, plain_bias))[0]
                of_head = problem.per_head(moments.target_scatter)[0]
                error[split] += float(by_head.sum())
                total[split] += float(of_head.sum())
                if split == "holdout":
                    heads += (1 - by_head / of_head).tolist()
            weight, bias = self._gained(found["fit"], found["holdout"], plain, problem)
            used += float(ridge.squared_error(found["holdout"], weight, bias).sum())
            scale = plain.norm(dim=0)
            gains.append(torch.where(scale > 0, weight.norm(dim=0) / torch.where(scale > 0, scale, 1.0), 1.0))
            damping, condition = max(damping, factor.damping), max(condition, factor.condition)
            weights.append(weight)
            biases.append(bias)
        gain = torch.cat(gains)
        detail = {
            "kind": kind,
            "layer_index": layer_index,
            "source_layers": list(source_layers),
            "penalty": penalty,
            "r2_fit": 1 - error["fit"] / total["fit"],
            "r2_holdout": 1 - error["holdout"] / total["holdout"],
            "r2_holdout_with_gain": 1 - used / total["holdout"],
            "r2_holdout_heads": heads,
            "gain": {"min": float(gain.min()), "median": float(gain.median()), "max": float(gain.max())},
            "condition": condition,
            "damping": damping,
        }
        weight = weights[0] if self.options.support == "full" else torch.stack(weights)
        return weight, torch.cat(biases), detail


def _layer_maps(solver: _Solver, chosen: Chosen, penalties: dict[Kind, list[float]]) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Weight and bias in the stored dtype, and the report, of each layer map in the spec's order."""
    dtype: torch.dtype = getattr(torch, solver.options.dtype)
    order = [(layer_index, kind) for layer_index in range(solver.store.target.n_layers) for kind in KINDS]
    for layer_index, kind in tqdm(order, desc="solve", disable=solver.bar):
        weight, bias, detail = solver.layer(kind, layer_index, chosen[kind][layer_index], penalties[kind][layer_index])
        weight, bias = weight.to(dtype).cpu().contiguous(), bias.to(dtype).cpu().contiguous()
        if not (bool(torch.isfinite(weight).all()) and bool(torch.isfinite(bias).all())):
            raise SolveError(
                f"{kind} of target layer {layer_index}: found weights beyond {solver.options.dtype}, needed finite ones: use --dtype float32"
            )
        yield weight, bias, detail


def _layer_map(detail: dict[str, Any]) -> LayerMap:
    names = (field.name for field in dataclasses.fields(LayerMap))
    return LayerMap(**{name: tuple(detail[name]) if name == "source_layers" else detail[name] for name in names})


def _report(store: Store, options: Options, probes: dict[Kind, Probe], details: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of solve.json."""

    def summary(kind: Kind) -> dict[str, Any]:
        of_kind = [detail for detail in details if detail["kind"] == kind]
        holdout, fit = probes[kind].holdout_layers, probes[kind].fit_layers
        best = holdout.argmax(1, keepdim=True)
        mean = {split: sum(d[f"r2_{split}"] for d in of_kind) / len(of_kind) for split in ("fit", "holdout")}
        return {
            "single": {"fit": float(fit.gather(1, best).mean()), "holdout": float(holdout.gather(1, best).mean())},
            "chosen": mean,
            "chosen_with_gain": {"holdout": sum(d["r2_holdout_with_gain"] for d in of_kind) / len(of_kind)},
        }

    return {
        "options": dataclasses.asdict(options),
        "tokens": {split: store.count(split) for split in ("fit", "holdout")},
        "r2": {kind: summary(kind) for kind in KINDS},
        "layers": details,
        "probe": {
            kind: {"fit": probes[kind].fit_layers.tolist(), "holdout": probes[kind].holdout_layers.tolist()} for kind in KINDS
        },
    }
