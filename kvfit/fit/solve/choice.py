"""Choose the form of the map: a separate map per layer or a shared basis, and its size, within the allowed cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvfit.cost import Cost, Prefill, affordable_parameters, cost_of, lexical_flops
from kvfit.fit.solve.fitter import Fitted, Fitter, Sets
from kvfit.fit.solve.reduced import RankCurve, fit_reduced, rank_curve, shared_inputs, shared_penalty
from kvfit.fit.solve.regression import Basis, find_directions
from kvfit.fit.solve.select import Probe
from kvfit.fit.solve.system import InputSet, widest_layers
from kvfit.spec import Kind

LOGGER = logging.getLogger("kvfit")
# A basis must keep this share of the variance that a full one explains. A basis that kept only 90 % lost more than half of what
# the full one recovered.
KEPT_ENOUGH = 0.95


@dataclass(frozen=True)
class Choice:
    """The chosen form: either `sets`, for a separate map per target block, or `basis`.

    Attributes:
        sets: what each target block reads; None where there is a shared basis.
        basis: the shared basis, rounded to the stored dtype; None where the maps are separate.
        report: how the form was chosen, for solve.json.
    """

    sets: Sets | None
    basis: Basis | None
    report: dict[str, Any]

    @property
    def rank(self) -> int | None:
        """r; None where there is no shared basis."""
        return None if self.basis is None else self.basis.weight.shape[1]

    def fit(self, fitter: Fitter) -> Iterator[Fitted]:
        """Solve every map."""
        if self.basis is not None:
            return fit_reduced(fitter, self.basis)
        assert self.sets is not None
        return fitter.fit(self.sets)


def choose(fitter: Fitter, probes: dict[Kind, Probe], prefill: Prefill) -> Choice:
    """Choose the best map on the holdout split among those that the options and the cost allow.

    Where no useful map is within the cost, as happens with pairs of small models, the best one is taken with a warning: the
    cost that matters is time, and `evaluate` measures that.
    """
    budget = _Budget(fitter, prefill)
    if fitter.options.rank == "none":
        return _separate(fitter, probes, budget)
    return _shared(fitter, probes, budget)


class _Budget:
    """The cost that a map may have."""

    def __init__(self, fitter: Fitter, prefill: Prefill) -> None:
        self.limit = fitter.options.cost
        self._dtype, self._prefill = fitter.options.dtype, prefill
        self._extra = lexical_flops(fitter.reader.store.target, len(fitter.lags), prefill.hidden_size)

    def cost(self, parameters: float) -> Cost:
        return cost_of(parameters, self._dtype, self._prefill, self._extra)

    def affords(self, parameters: float) -> bool:
        return self.limit is None or self.cost(parameters).share <= self.limit

    def most(self) -> int | None:
        """The most weights that the cost allows; None where there is no limit."""
        return None if self.limit is None else affordable_parameters(self._dtype, self._prefill, self.limit, self._extra)

    def warn(self, cost: Cost, why: str) -> None:
        LOGGER.warning(
            "solve: %s; this map takes %s, above the %.2g %% of --cost: see whether it pays at the lengths that evaluate times",
            why, cost, 100 * (self.limit or 0),
        )  # fmt: skip


def _separate(fitter: Fitter, probes: dict[Kind, Probe], budget: _Budget) -> Choice:
    """Choose a separate map per target block, with fewer source layers where all of them would cost too much."""
    top_k, report = fitter.options.top_k, {"kind": "separate"}
    sets = fitter.sets(fitter.choose(probes))
    wanted = _parameters(fitter, sets)
    if isinstance(top_k, int) or budget.affords(wanted):
        return Choice(sets, None, report)
    source = fitter.reader.store.source
    widest = [{(kind, t): fitter.reads(kind, layers) for kind, t in fitter.targets} for layers in
              (widest_layers(source, k) for k in range(1, source.n_layers + 1))]  # fmt: skip
    affordable = sum(budget.affords(_parameters(fitter, of_size)) for of_size in widest)
    if affordable == 0:
        budget.warn(budget.cost(wanted), "no map of this pair costs less")
        return Choice(sets, None, report)
    LOGGER.info("solve: %d of %d source layers are within --cost", affordable, source.n_layers)
    if top_k == "all":
        chosen = fitter.changed(replace(fitter.options, top_k=affordable)).choose(probes)
    else:
        chosen = fitter.choose(probes, most=affordable)
    return Choice(fitter.sets(chosen), None, report | {"source_layers_within_cost": affordable})


def _shared(fitter: Fitter, probes: dict[Kind, Probe], budget: _Budget) -> Choice:
    """Choose a shared basis, or separate maps where the rank is free and separate maps cost no more."""
    options, inputs, outputs = fitter.options, shared_inputs(fitter, probes), _outputs(fitter)
    limit = options.rank if isinstance(options.rank, int) else _affordable_rank(inputs, outputs, budget)
    penalty = shared_penalty(fitter, inputs)
    found = find_directions(fitter.reader, inputs, fitter.targets, penalty, options.penalty_scale, rank=limit)
    most = min(inputs.n_inputs, outputs, found.vectors.shape[1])
    dtype: torch.dtype = getattr(torch, options.dtype)
    too_costly = False
    if isinstance(options.rank, int):
        rank = min(options.rank, most)
        if rank < options.rank:
            LOGGER.warning("solve: --rank %d is above the full rank of this pair's maps, so the rank is %d", options.rank, rank)
        curve = rank_curve(fitter, found.basis(rank))
    else:
        if limit is not None and (limit < 1 or found.kept(limit) < KEPT_ENOUGH):
            limit, too_costly = None, True
        curve = rank_curve(fitter, found.basis(most if limit is None else min(limit, most)))
        rank = curve.best()
        separate, shared = inputs.n_inputs * outputs, rank * (inputs.n_inputs + outputs)
        if too_costly:
            budget.warn(budget.cost(min(separate, shared)), "no useful map of this pair costs less")
        if separate <= shared:
            return Choice(dict.fromkeys(fitter.targets, inputs), None, _report(curve, None, found.kept(rank)))
    return Choice(None, found.basis(rank, dtype), _report(curve, rank, found.kept(rank)))


def _parameters(fitter: Fitter, sets: Sets) -> int:
    """Weights of separate maps that read these inputs."""
    target = fitter.reader.store.target
    return sum(inputs.n_inputs * target.width_of(*block) for block, inputs in sets.items())


def _outputs(fitter: Fitter) -> int:
    """Features that all maps together predict."""
    return sum(fitter.reader.store.target.width_of(*target) for target in fitter.targets)


def _affordable_rank(inputs: InputSet, outputs: int, budget: _Budget) -> int | None:
    weights = budget.most()
    return None if weights is None else weights // (inputs.n_inputs + outputs)


def _report(curve: RankCurve, rank: int | None, kept: float) -> dict[str, Any]:
    return {
        "kind": "separate" if rank is None else "shared",
        "ranks": curve.ranks,
        "holdout_errors": curve.errors,
        "variance_kept": kept,
    }
