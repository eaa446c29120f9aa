"""From a store to regressions: which blocks make the inputs and outputs, in which order, and what of them fits in memory.

The order of input features is written here once, and `Mapper` follows it: with ``inputs="same"`` the chosen source layers
ascending, each with its heads and their features; with ``inputs="both"`` first all keys in that order, then all values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.errors import SolveError
from kvfit.fit.solve.ridge import Outputs, Precision
from kvfit.fit.stats.store import CACHE_BYTES, Block, Split, Store
from kvfit.spec import KINDS, Inputs, Kind, ModelSpec, Support

ITEM = 8  # bytes of a float64
# Matrices of F x G that are in memory at a time while one batch of target layers is solved: cross scatter, weight, the scatter
# times the weight, and the batch before with its gain folded in. A float32 factor refines with three more.
WORK = {"float64": 5, "mixed": 8}


def source_head(head: int, n_source: int, n_target: int) -> int:
    """The source head that target head `head` is matched with: ``h * H_source // H_target``, identity for equal counts."""
    return head * n_source // n_target


@dataclass(frozen=True)
class Problem:
    """Regressions of one kind of some target layers on one set of source layers.

    With support ``full`` it is one regression, with ``head`` one per target head: its panels.

    Attributes:
        source, target: the models.
        kind: what is predicted.
        source_layers: the source layers read, ascending.
        target_layers: the target layers predicted.
        support: ``full`` or ``head``.
        inputs: ``same`` or ``both``.
    """

    source: ModelSpec
    target: ModelSpec
    kind: Kind
    source_layers: tuple[int, ...]
    target_layers: tuple[int, ...]
    support: Support = "full"
    inputs: Inputs = "same"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds read."""
        return (self.kind,) if self.inputs == "same" else KINDS

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Source blocks in feature order."""
        return tuple((kind, i) for kind in self.kinds for i in self.source_layers)

    @property
    def panels(self) -> list[tuple[slice, slice]]:
        """Columns of a source block and of a target block, per regression."""
        if self.support == "full":
            return [(slice(0, self.source.width), slice(0, self.target.width))]
        d, e = self.source.head_dim, self.target.head_dim
        found = []
        for head in range(self.target.n_heads):
            at = source_head(head, self.source.n_heads, self.target.n_heads)
            found.append((slice(at * d, (at + 1) * d), slice(head * e, (head + 1) * e)))
        return found

    @property
    def n_inputs(self) -> int:
        """F of one regression."""
        return len(self.blocks) * (self.source.width if self.support == "full" else self.source.head_dim)

    @property
    def scatter_bytes(self) -> int:
        """Bytes of the source scatters of all panels, float64."""
        return len(self.panels) * self.n_inputs**2 * ITEM

    def layer_bytes(self, precision: Precision) -> int:
        """Bytes of work per target layer that is solved at the same time."""
        return WORK[precision] * self.n_inputs * self.target.width * ITEM

    def least_bytes(self, precision: Precision) -> int:
        """The memory that solving one target layer of this problem needs: the factor, the holdout scatter, the work.

        A float32 factor lies beside the matrix that it was made from.
        """
        factor = self.scatter_bytes * (1.5 if precision == "mixed" else 1.0)
        blocks = 6 * max(self.source.width, self.target.width) * self.source.width * ITEM
        return int(factor) + self.scatter_bytes + self.layer_bytes(precision) + CACHE_BYTES + blocks

    def for_layers(self, target_layers: Sequence[int]) -> Problem:
        """The same for other target layers."""
        return Problem(self.source, self.target, self.kind, self.source_layers, tuple(target_layers), self.support, self.inputs)

    def by_output(self, panels: Sequence[Tensor]) -> Tensor:
        """Per-panel vectors over (target layers x outputs of the panel) as (target layers, H * D)."""
        n = len(self.target_layers)
        return torch.stack([panel.view(n, -1) for panel in panels], 1).view(n, -1)

    def weight(self, panels: Sequence[Tensor], position: int) -> Tensor:
        """The weight of one target layer, (F, G) or (H_target, F, D_target), out of per-panel weights."""
        parts = [panel.T.reshape(len(self.target_layers), -1, self.n_inputs)[position].T for panel in panels]
        return parts[0] if self.support == "full" else torch.stack(parts)


class Reader:
    """Reads problems from a store in float64, block by block, and keeps within a memory budget.

    Scatters of a set of source layers are the large part (F x F) and serve every penalty and target layer; as many as fit are
    kept.
    """

    def __init__(
        self,
        store: Store,
        *,
        device: torch.device | str = "cpu",
        memory_budget: int = 4 << 30,
        precision: Precision = "float64",
    ) -> None:
        self.store = store
        self.device = torch.device(device)
        self.memory_budget = memory_budget
        self.precision: Precision = precision
        self._room = 0
        self._kept: OrderedDict[tuple[object, ...], list[Tensor]] = OrderedDict()

    def problem(
        self,
        kind: Kind,
        source_layers: Sequence[int],
        target_layers: Sequence[int],
        support: Support = "full",
        inputs: Inputs = "same",
    ) -> Problem:
        """A problem of this store's pair."""
        return Problem(self.store.source, self.store.target, kind, tuple(source_layers), tuple(target_layers), support, inputs)

    def batches(self, problem: Problem) -> Iterator[Problem]:
        """The problem cut into runs of target layers that can be solved at a time within the budget.

        Raises:
            SolveError: not even one fits; says what is needed.
        """
        least = problem.least_bytes(self.precision)
        check_budget(problem, self.memory_budget, self.precision)
        spare = self.memory_budget - least
        per_layer = problem.layer_bytes(self.precision)
        # Half of what is left widens the batches, the rest keeps scatters from being read again.
        n = min(len(problem.target_layers), 1 + int(spare // 2 // per_layer))
        self._room = problem.scatter_bytes + spare - (n - 1) * per_layer
        self._evict(0)
        for start in range(0, len(problem.target_layers), n):
            yield problem.for_layers(problem.target_layers[start : start + n])

    def scatters(self, problem: Problem, split: Split, *, to_change: bool = False) -> list[Tensor]:
        """Source scatter of each panel on one split, (F, F).

        Args:
            problem: whose.
            split: ``fit`` or ``holdout``.
            to_change: give tensors that nobody else holds.
        """
        key = (split, problem.blocks, problem.support)
        if key in self._kept:
            self._kept.move_to_end(key)
            kept = self._kept[key]
            return [scatter.clone() for scatter in kept] if to_change else kept
        # A copy to change and one to keep must both fit.
        keep = problem.scatter_bytes * (2 if to_change else 1) <= self._room
        self._evict(problem.scatter_bytes if keep else 0)
        read = self._read_scatters(problem, split)
        if keep:
            self._kept[key] = read
            return [scatter.clone() for scatter in read] if to_change else read
        return read

    def source_means(self, problem: Problem, split: Split) -> list[Tensor]:
        """Mean of the inputs of each panel on one split, (F,)."""
        means = [self.store.source_mean(split, block) for block in problem.blocks]
        return [torch.cat([mean[columns] for mean in means]).to(self.device) for columns, _ in problem.panels]

    def outputs(self, problem: Problem, split: Split) -> list[Outputs]:
        """Cross scatter (F, G), target scatter and mean of each panel on one split; G is layer-major."""
        store, blocks, panels = self.store, problem.blocks, problem.panels
        n = len(problem.target_layers)
        width, depth = (problem.n_inputs // len(blocks), panels[0][1].stop - panels[0][1].start)
        # Column-major, which is what the triangular solves work on.
        crosses = [torch.empty(n * depth, problem.n_inputs, dtype=torch.float64, device=self.device) for _ in panels]
        for i, a in enumerate(blocks):
            for t, layer_index in enumerate(problem.target_layers):
                block = store.cross_scatter(split, a, (problem.kind, layer_index)).to(self.device)
                for cross, (rows, columns) in zip(crosses, panels, strict=True):
                    cross[t * depth : (t + 1) * depth, i * width : (i + 1) * width] = block[rows, columns].T
        targets = [(problem.kind, layer_index) for layer_index in problem.target_layers]
        scatters = [store.target_scatter(split, b) for b in targets]
        means = [store.target_mean(split, b) for b in targets]
        return [
            Outputs(cross.T, *(torch.cat([part[columns] for part in parts]).to(self.device) for parts in (scatters, means)))
            for cross, (_, columns) in zip(crosses, panels, strict=True)
        ]

    def _read_scatters(self, problem: Problem, split: Split) -> list[Tensor]:
        blocks, panels, f = problem.blocks, problem.panels, problem.n_inputs
        width = f // len(blocks)
        scatters = [torch.empty(f, f, dtype=torch.float64, device=self.device) for _ in panels]
        for i, a in enumerate(blocks):
            for j, b in enumerate(blocks[i:], start=i):
                block = self.store.source_scatter(split, a, b).to(self.device)
                for scatter, (columns, _) in zip(scatters, panels, strict=True):
                    part = block[columns, columns]
                    scatter[i * width : (i + 1) * width, j * width : (j + 1) * width] = part
                    if j != i:
                        scatter[j * width : (j + 1) * width, i * width : (i + 1) * width] = part.T
        return scatters

    def _evict(self, coming: int) -> None:
        """Drop what was used longest ago until the rest and `coming` bytes fit the room."""
        while self._kept and coming + sum(s.nbytes for kept in self._kept.values() for s in kept) > self._room:
            self._kept.popitem(last=False)


def check_budget(problem: Problem, memory_budget: int, precision: Precision) -> None:
    """Refuse a problem that cannot be solved within a memory budget.

    Raises:
        SolveError: says how much it needs.
    """
    least = problem.least_bytes(precision)
    if least > memory_budget:
        raise SolveError(
            f"--memory-budget: found {memory_budget / 2**30:.2f} GiB, needed {least / 2**30:.2f} GiB to factor"
            f" {problem.n_inputs} inputs ({len(problem.source_layers)} source layers): raise it, use a smaller --top-k"
            " or --support head"
        )
