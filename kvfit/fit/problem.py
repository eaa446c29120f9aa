"""From a store to one regression problem: which blocks make the inputs and outputs, and in which order.

The order of input features is written here once, and `Mapper` follows it: with ``inputs="same"`` the chosen source layers
ascending, each with its heads and their features; with ``inputs="both"`` first all keys in that order, then all values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.fit.ridge import Moments
from kvfit.fit.store import Block, Split, Store
from kvfit.spec import KINDS, Inputs, Kind, Support


def source_head(head: int, n_source: int, n_target: int) -> int:
    """The source head that target head `head` is matched with: ``h * H_source // H_target``, identity for equal counts."""
    return head * n_source // n_target


@dataclass(frozen=True)
class Problem:
    """Inputs and outputs of one regression.

    Attributes:
        inputs: source blocks, in feature order.
        outputs: target blocks, in output order.
        n_source_heads: of the source.
        n_target_heads: of the target.
        head: None for all heads of every block; else the target head, and the inputs are its matched source head only.
    """

    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    n_source_heads: int
    n_target_heads: int
    head: int | None = None

    @staticmethod
    def of(
        store: Store, kind: Kind, source_layers: Sequence[int], target_layers: Sequence[int], *, support: Support = "full", inputs: Inputs = "same"
    ) -> Iterator[Problem]:
        """One problem over all heads where `support` is ``full``, else one per target head."""
        kinds = (kind,) if inputs == "same" else KINDS
        blocks = tuple((k, i) for k in kinds for i in source_layers)
        outputs = tuple((kind, t) for t in target_layers)
        counts = (store.source.n_heads, store.target.n_heads)
        for head in (None,) if support == "full" else range(counts[1]):
            yield Problem(blocks, outputs, *counts, head)

    def source_columns(self, width: int) -> slice:
        """Columns of one source block that are inputs; `width` is the block's."""
        if self.head is None:
            return slice(0, width)
        size = width // self.n_source_heads
        at = source_head(self.head, self.n_source_heads, self.n_target_heads)
        return slice(at * size, (at + 1) * size)

    def target_columns(self, width: int) -> slice:
        """Columns of one target block that are outputs."""
        if self.head is None:
            return slice(0, width)
        size = width // self.n_target_heads
        return slice(self.head * size, (self.head + 1) * size)

    def per_head(self, values: Tensor) -> Tensor:
        """Sums of a per-output quantity (G,) over each head: (target layers, H), with H = 1 where one head is predicted."""
        return values.view(len(self.outputs), self.n_target_heads if self.head is None else 1, -1).sum(2)

    @property
    def head_columns(self) -> slice:
        """The target heads that are predicted."""
        return slice(None) if self.head is None else slice(self.head, self.head + 1)


class Reader:
    """Reads problems from a store, block by block in float64, and keeps the source halves that it read last.

    The source scatter of a set of layers is the large part (F x F) and serves every target layer that reads the set.
    """

    def __init__(self, store: Store, *, device: torch.device | str = "cpu", keep: int = 4) -> None:
        self.store = store
        self.device = device
        self._keep = keep
        self._scatters: dict[tuple[object, ...], Tensor] = {}

    def moments(self, problem: Problem, split: Split) -> Moments:
        """The problem's centred moments on one split. Peak memory is F*F + F*G float64 and one block."""
        store = self.store
        from_source = problem.source_columns(store.source.width)
        from_target = problem.target_columns(store.target.width)
        width, depth = from_source.stop - from_source.start, from_target.stop - from_target.start
        shape = (width * len(problem.inputs), depth * len(problem.outputs))
        cross = torch.empty(shape, dtype=torch.float64, device=self.device)
        for i, a in enumerate(problem.inputs):
            for t, b in enumerate(problem.outputs):
                block = store.cross_scatter(split, a, b)[from_source, from_target]
                cross[i * width : (i + 1) * width, t * depth : (t + 1) * depth] = block.to(self.device)

        def joined(parts: list[Tensor], columns: slice) -> Tensor:
            return torch.cat([part[columns] for part in parts]).to(self.device)

        return Moments(
            count=store.count(split),
            source_scatter=self._source_scatter(problem, split),
            cross_scatter=cross,
            target_scatter=joined([store.target_scatter(split, b) for b in problem.outputs], from_target),
            source_mean=joined([store.source_mean(split, a) for a in problem.inputs], from_source),
            target_mean=joined([store.target_mean(split, b) for b in problem.outputs], from_target),
        )

    def _source_scatter(self, problem: Problem, split: Split) -> Tensor:
        columns = problem.source_columns(self.store.source.width)
        key = (split, problem.inputs, columns.start, columns.stop)
        if key in self._scatters:
            self._scatters[key] = self._scatters.pop(key)
            return self._scatters[key]
        while len(self._scatters) >= self._keep:
            del self._scatters[next(iter(self._scatters))]
        width = columns.stop - columns.start
        f = width * len(problem.inputs)
        scatter = torch.empty(f, f, dtype=torch.float64, device=self.device)
        for i, a in enumerate(problem.inputs):
            for j, b in enumerate(problem.inputs[i:], start=i):
                block = self.store.source_scatter(split, a, b)[columns, columns].to(self.device)
                scatter[i * width : (i + 1) * width, j * width : (j + 1) * width] = block
                if j != i:
                    scatter[j * width : (j + 1) * width, i * width : (i + 1) * width] = block.T
        self._scatters[key] = scatter
        return scatter
