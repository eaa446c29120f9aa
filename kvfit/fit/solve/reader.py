"""`Reader` reads the systems of an input set and some outputs from a store, within a memory budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfit.errors import SolveError
from kvfit.fit.solve.ridge import Precision
from kvfit.fit.solve.system import InputSet, System
from kvfit.fit.stats.layout import Block
from kvfit.fit.stats.store import CACHE_BYTES, Split, Store
from kvfit.spec import ModelSpec

ITEM = 8  # bytes of a float64
# The number of F x F matrices in memory while a set is solved: the scatters of both splits and the factor. A float32 factor
# needs the float64 matrix beside it, for refinement.
SQUARES = {"float64": 3.0, "mixed": 3.5}
# A shared basis also needs the sum over outputs that its directions come from, the eigenvectors, and the library's own copy.
BASIS_SQUARES = 6.0
# Beyond this many inputs only the leading directions are computed, which takes no further F x F matrix.
EXACT_INPUTS = 16_384
# The number of F x G matrices in memory while one batch of outputs is solved: cross scatter, weight, the scatter times the
# weight, and the previous batch with its gain folded in. The refinement of a float32 factor needs three more.
WORK = {"float64": 5, "mixed": 8}


class Reader:
    """Reads systems from a store in float64, block by block.

    The scatters (F x F) are the largest part and serve every penalty and output, so those of the last input set stay in memory.
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
        self._kept_set: InputSet | None = None
        self._kept: dict[Split, list[Tensor]] = {}

    @property
    def models(self) -> tuple[ModelSpec, ModelSpec]:
        """The source and the target."""
        return self.store.source, self.store.target

    def batches(self, inputs: InputSet, targets: Sequence[Block], *, basis: bool = False) -> list[tuple[Block, ...]]:
        """Cut the target blocks into runs of one shape, each of which can be solved at once within the budget.

        Args:
            inputs: the set that they read.
            targets: all target blocks.
            basis: whether a shared basis is solved for.

        Raises:
            SolveError: not even one block fits; the message says how much is needed.
        """
        check_budget(inputs, self.memory_budget, self.precision, basis=basis)
        spare = self.memory_budget - least_bytes(inputs, self.precision, basis=basis)
        n = 1 + spare // _block_bytes(inputs, self.precision)
        alike: dict[tuple[int, int], list[Block]] = {}
        for block in targets:
            alike.setdefault(inputs.target.shape(*block), []).append(block)
        return [tuple(run[start : start + n]) for run in alike.values() for start in range(0, len(run), n)]

    def systems(self, inputs: InputSet, targets: Sequence[Block], split: Split) -> list[System]:
        """One system per panel. Its outputs are those of the first block, then of the next; all blocks have one shape."""
        store, panels = self.store, inputs.panels
        scatters = self._scatters(inputs, split)
        source_means = [store.source_mean(split, block) for block in inputs.blocks]
        squares, means = ([read(split, block) for block in targets] for read in (store.target_scatter, store.target_mean))
        systems = []
        for scatter, cross, (rows, columns) in zip(scatters, self._crosses(inputs, targets, split), panels, strict=True):
            source_mean, square, mean = (
                torch.cat([part[of] for part in parts]).to(self.device)
                for parts, of in ((source_means, rows), (squares, columns), (means, columns))
            )
            systems.append(System(store.count(split), scatter, cross, square, source_mean, mean))
        return systems

    def _crosses(self, inputs: InputSet, targets: Sequence[Block], split: Split) -> list[Tensor]:
        """The cross scatter (F, G) of each panel."""
        panels, (heads, size) = inputs.panels, inputs.target.shape(*targets[0])
        depth = size * (heads if inputs.support == "full" else 1)
        # Column-major, as the triangular solves need it.
        crosses = [torch.empty(len(targets) * depth, inputs.n_inputs, dtype=torch.float64, device=self.device) for _ in panels]
        row = 0
        for a in inputs.blocks:
            stop = row + inputs.width(a)
            for t, b in enumerate(targets):
                block = self.store.cross_scatter(split, a, b).to(self.device)
                for cross, (rows, columns) in zip(crosses, panels, strict=True):
                    cross[t * depth : (t + 1) * depth, row:stop] = block[rows, columns].T
            row = stop
        return [cross.T for cross in crosses]

    def _scatters(self, inputs: InputSet, split: Split) -> list[Tensor]:
        """The source scatter (F, F) of each panel."""
        if inputs != self._kept_set:
            self._kept_set, self._kept = inputs, {}
        if split not in self._kept:
            self._kept[split] = self._read_scatters(inputs, split)
        return self._kept[split]

    def _read_scatters(self, inputs: InputSet, split: Split) -> list[Tensor]:
        panels, f = inputs.panels, inputs.n_inputs
        scatters = [torch.empty(f, f, dtype=torch.float64, device=self.device) for _ in panels]
        row = 0
        for i, a in enumerate(inputs.blocks):
            below = column = row
            row += inputs.width(a)
            for b in inputs.blocks[i:]:
                left, column = column, column + inputs.width(b)
                block = self.store.source_scatter(split, a, b).to(self.device)
                for scatter, (columns, _) in zip(scatters, panels, strict=True):
                    part = block[columns, columns]
                    scatter[below:row, left:column] = part
                    if a != b:
                        scatter[left:column, below:row] = part.T
        return scatters


def least_bytes(inputs: InputSet, precision: Precision, *, basis: bool = False) -> int:
    """The bytes needed to solve one output block on an input set: scatters, factor, work, and the blocks being read."""
    squares = SQUARES[precision]
    if basis:
        squares = BASIS_SQUARES if inputs.n_inputs <= EXACT_INPUTS else SQUARES["float64"] + 1
    squares *= len(inputs.panels) * inputs.n_inputs**2 * ITEM
    widest = max(inputs.source.width, inputs.target.width, *(inputs.width(block) for block in inputs.blocks))
    blocks = 6 * widest * inputs.source.width * ITEM
    return int(squares) + _block_bytes(inputs, precision) + CACHE_BYTES + blocks


def _block_bytes(inputs: InputSet, precision: Precision) -> int:
    """The bytes of work for each output block in a batch."""
    return WORK[precision] * inputs.n_inputs * inputs.target.width * ITEM


def check_budget(inputs: InputSet, memory_budget: int, precision: Precision, *, basis: bool = False) -> None:
    """Refuse an input set that cannot be solved within a memory budget.

    Raises:
        SolveError: says how much it needs.
    """
    least = least_bytes(inputs, precision, basis=basis)
    if least > memory_budget:
        what, others = ("find a shared basis of", "--rank none") if basis else ("factor", "--support head")
        raise SolveError(
            f"--memory-budget: found {memory_budget / 2**30:.2f} GiB, needed {least / 2**30:.2f} GiB to {what}"
            f" {inputs.n_inputs} inputs ({len(inputs.source_layers)} source layers): raise it, use a smaller --top-k"
            f" or {others}"
        )
