"""The parts of a regression: the blocks that a map reads, and the second moments of one split.

The order of a map's inputs is defined here, and `Mapper` follows it: the keys of the chosen source layers ascending, then (with
``inputs="both"``) their values, then the lexical inputs lag by lag. With ``inputs="same"`` a map reads only its own kind, then
the lexical inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvfit.fit.stats.layout import InputBlock
from kvfit.spec import KINDS, Inputs, Kind, ModelSpec, Support

Layers = tuple[int, ...]


def source_head(head: int, n_source: int, n_target: int) -> int:
    """The source head that matches target head `head`: ``h * H_source // H_target``, which is `head` for equal counts."""
    return head * n_source // n_target


@dataclass(frozen=True)
class System:
    """The second moments of one regression on one split, all float64. Solutions, scores and gains follow from it alone.

    With N rows, inputs x (F,) and outputs y (G,):

    Attributes:
        count: N.
        scatter: ``sum (x - mean x)(x - mean x)'``, (F, F).
        cross: ``sum (x - mean x)(y - mean y)'``, (F, G).
        target_square: ``sum (y - mean y)^2``, (G,).
        source_mean: (F,).
        target_mean: (G,).
    """

    count: int
    scatter: Tensor
    cross: Tensor
    target_square: Tensor
    source_mean: Tensor
    target_mean: Tensor


@dataclass(frozen=True)
class InputSet:
    """The blocks that a map reads.

    Attributes:
        source, target: the two models.
        blocks: the blocks, in the order of the map's inputs.
        support: ``full``: one regression reads all heads of the blocks. ``head``: one regression per target head reads only the
            matched source head.
    """

    source: ModelSpec
    target: ModelSpec
    blocks: tuple[InputBlock, ...]
    support: Support = "full"

    @cached_property
    def source_layers(self) -> Layers:
        """The source layers that are read, ascending."""
        return tuple(sorted({index for kind, index in self.blocks if kind in KINDS}))

    @property
    def panels(self) -> list[tuple[slice, slice]]:
        """For each regression, its columns of a source block and of a target block."""
        if self.support == "full":
            return [(slice(None), slice(None))]
        d, e = self.source.head_dim, self.target.head_dim
        heads = [source_head(head, self.source.n_heads, self.target.n_heads) for head in range(self.target.n_heads)]
        return [(slice(a * d, (a + 1) * d), slice(head * e, (head + 1) * e)) for head, a in enumerate(heads)]

    def width(self, block: InputBlock) -> int:
        """The number of inputs that one regression takes from a block."""
        group, index = block
        if group == "lexical":
            return self.target.first_width
        heads, size = self.source.shape(group, index)
        return size * (heads if self.support == "full" else 1)

    @cached_property
    def n_inputs(self) -> int:
        """F, the number of inputs of one regression."""
        return sum(map(self.width, self.blocks))

    @property
    def groups(self) -> tuple[int, ...]:
        """The lengths of the runs of inputs that share a scale: source keys, source values, and each lag's keys and values.

        Their variances differ by orders of magnitude, so the penalty of each run is relative to the run's own variance.
        """
        lengths: list[int] = []
        for kind, run in itertools.groupby(self.blocks, key=lambda block: block[0]):
            widths = [self.width(block) for block in run]
            of_lag = [self.target.width_of(half, 0) for half in KINDS]
            lengths += [sum(widths)] if kind in KINDS else of_lag * len(widths)
        return tuple(lengths)

    @property
    def name(self) -> str:
        """What is read, for error messages."""
        kinds = [kind for kind in KINDS if any(block[0] == kind for block in self.blocks)]
        layers = "layer " if len(self.source_layers) == 1 else "layers "
        return f"{' and '.join(kinds)} of source {layers}{', '.join(map(str, self.source_layers))}"


def input_set(
    models: tuple[ModelSpec, ModelSpec],
    kind: Kind,
    source_layers: Sequence[int],
    support: Support = "full",
    inputs: Inputs = "same",
    lexical: Sequence[int] = (),
) -> InputSet:
    """Make the input set of a map.

    Args:
        models: source and target.
        kind: ``keys`` or ``values``.
        source_layers: the source layers that are read, ascending.
        support: ``full`` or ``head``.
        inputs: ``same`` or ``both``.
        lexical: the lags that are read, as indices into `Store.lexical_lags`.
    """
    kinds = (kind,) if inputs == "same" else KINDS
    blocks: list[InputBlock] = [(kind, i) for kind in kinds for i in source_layers]
    blocks += [("lexical", n) for n in lexical]
    return InputSet(*models, tuple(blocks), support)


def widest_layers(source: ModelSpec, count: int) -> tuple[int, ...]:
    """The `count` widest layers, ascending: the most that a map of so many layers can read, before they are chosen."""
    widths = [sum(source.width_of(kind, layer_index) for kind in KINDS) for layer_index in range(source.n_layers)]
    return tuple(sorted(sorted(range(source.n_layers), key=lambda i: -widths[i])[:count]))
