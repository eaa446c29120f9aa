"""TokenBuffer: shifted activations of both splits, waiting to be multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.fit.stats import moments
from kvfit.fit.stats.layout import SPLITS, Group, Layout, Part, vector_of
from kvfit.fit.stats.record import Array, BadValue
from kvfit.spec import KINDS

# Per group, one tensor (N, features) per layer, or per lag where the group is ``lexical``.
Activations = Mapping[Group, Sequence[Tensor]]

LARGEST_VALUE = 1e15  # about the shift; the float32 sum of 1e8 squares of it is still finite


class _Columns(NamedTuple):
    """Where one block of activations comes from; blocks of a group lie side by side in this order."""

    model: Literal["source", "target"]  # that gives it; lexical inputs come with the source's, as the other inputs
    group: Group
    number: int  # of the layer or the lag
    width: int


class TokenBuffer:
    """Rows of shifted activations, float32: per kind all source layers' and then all target layers' features; lexical inputs.

    `fit` rows fill it from the front and `holdout` rows from the back, so that each split's rows lie together and neither
    needs a share of its own.

    Attributes:
        capacity: tokens that fit.
        n_rows: tokens in it, per split.
        shift: per group, (features,) float32; empty until the first good batch fixed it.
        device: where it is.
    """

    def __init__(self, layout: Layout, capacity: int, device: torch.device | None) -> None:
        self.capacity = capacity
        self.n_rows: dict[Part, int] = dict.fromkeys(SPLITS, 0)
        self.shift: dict[Group, Tensor] = {}
        self.device = device
        self._layout = layout
        self._rows: dict[Group, Tensor] = {}
        source, target = range(layout.source.n_layers), range(layout.target.n_layers)
        self._columns: dict[Group, list[_Columns]] = {
            kind: [_Columns("source", kind, index, layout.source.width) for index in source]
            + [_Columns("target", kind, index, layout.target.width) for index in target]
            for kind in KINDS
        }
        if layout.lexical_lags:
            lags = range(len(layout.lexical_lags))
            self._columns["lexical"] = [_Columns("source", "lexical", index, layout.lexical_width) for index in lags]

    @property
    def used(self) -> int:
        """Tokens in it, both splits together."""
        return sum(self.n_rows.values())

    def rows(self, split: Part) -> dict[Group, Tensor]:
        """The rows of a split per group, views."""
        n_rows = self.n_rows[split]
        first = 0 if split == "fit" else self.capacity - n_rows
        return {group: rows[first : first + n_rows] for group, rows in self._rows.items()}

    def clear(self, split: Part) -> None:
        """Forget the rows of a split."""
        self.n_rows[split] = 0

    def check(self, split: str, source: Activations, target: Activations) -> int:
        """The tokens of a batch.

        Raises:
            MismatchError: shapes that are not those of the models, or token counts that differ between layers.
        """
        if split not in SPLITS:
            raise MismatchError(f"split {split!r}, needs fit or holdout")
        given, n_tokens = {"source": source, "target": target}, None
        for group, columns in self._columns.items():
            for name in ("source", "target") if group in KINDS else ("source",):
                found, needed = len(given[name].get(group, ())), sum(one.model == name for one in columns)
                if found != needed:
                    what = "lags" if group == "lexical" else "layers"
                    raise MismatchError(f"{name} gave {group} of {found} {what}, the store needs {needed}")
            for model, _, index, width in columns:
                rows = given[model][group][index]
                n_tokens = rows.shape[0] if n_tokens is None and rows.ndim == 2 else n_tokens
                if tuple(rows.shape) != (n_tokens, width) or not rows.is_floating_point():
                    raise MismatchError(
                        f"{model} {group} of layer {index} are {rows.dtype} {tuple(rows.shape)}, "
                        f"needs floats ({n_tokens}, {width})"
                    )
        return n_tokens or 0

    def fix_shift(self, source: Activations, target: Activations) -> None:
        """Take the means of a batch as the shift and its device as the buffer's, unless they are fixed already."""
        if not self._rows:
            found = source["keys"][0].device
            self.device = self.device or (found if found.type != "mps" else torch.device("cpu"))  # mps has no float64
            self._rows = {
                group: torch.empty(self.capacity, sum(one.width for one in columns), dtype=torch.float32, device=self.device)
                for group, columns in self._columns.items()
            }
        if not self.shift:
            given = {"source": source, "target": target}
            self.shift = {
                group: torch.cat([moments.shift_of(given[one.model][group][one.number].to(self.device)) for one in columns])
                for group, columns in self._columns.items()
            }
        self.shift = {group: shift.to(self.device) for group, shift in self.shift.items()}

    def load(self, split: Part, source: Activations, target: Activations, start: int, stop: int) -> BadValue | None:
        """Copy tokens start..stop of a batch behind the split's rows, less the shift, without counting them yet.

        Returns:
            Where the first value is that is not finite or too large to be squared, None for a good batch.
        """
        kept = self.n_rows[split]
        first = kept if split == "fit" else self.capacity - kept - (stop - start)
        peaks, given = [], {"source": source, "target": target}
        for group, columns in self._columns.items():
            rows, column = self._rows[group][first : first + stop - start], 0
            for model, _, index, width in columns:
                layer = given[model][group][index]
                place, shift = rows[:, column : column + width], self.shift[group][column : column + width]
                if layer.dtype == torch.float64:
                    place.copy_(layer[start:stop].to(self.device) - shift)
                else:
                    place.copy_(layer[start:stop]).sub_(shift)
                low, high = place.aminmax()
                peaks.append(torch.maximum(-low, high))
                column += width
        good = torch.stack(peaks) < LARGEST_VALUE  # false for NaN; one look at the device per batch
        return None if bool(good.all()) else self._place(int(good.to(torch.int8).argmin()))

    def shifts(self) -> dict[str, Array]:
        """The shift as the store's arrays hold it, by name."""
        found = {array.name: torch.zeros(array.shape) for array in self._layout.shifts}
        for place, part in self._places(found):
            place.copy_(part)
        return {name: tensor.numpy() for name, tensor in found.items()}

    def set_shifts(self, shifts: Mapping[str, Array]) -> None:
        """Take back what `shifts` gave."""
        self.shift = {group: torch.empty(sum(one.width for one in columns)) for group, columns in self._columns.items()}
        for place, part in self._places({name: torch.from_numpy(array) for name, array in shifts.items()}):
            part.copy_(place)

    def _places(self, arrays: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each block's features in the store's arrays of shifts, and the same in `shift`, as views."""
        for group, columns in self._columns.items():
            column = 0
            for model, _, index, width in columns:
                name, place = vector_of(model, group)
                yield arrays[f"shift/{name}"][place, index], self.shift[group][column : column + width]
                column += width

    def sums(self, split: Part, into: Mapping[str, Tensor]) -> None:
        """Add the sums and squares of a split's rows to the store's small arrays, by name."""
        for group, columns in self._columns.items():
            rows, column = self.rows(split)[group], 0
            for model, _, index, width in columns:
                name, place = vector_of(model, group)
                block = rows[:, column : column + width]
                into[f"{name}_sum"][place, index] += moments.sums(block).cpu()
                if name == "target":
                    into["target_square"][place, index] += moments.squares(block).cpu()
                column += width

    def free(self) -> None:
        """Give the memory back."""
        self._rows = {}

    def _place(self, number: int) -> BadValue:
        model, group, index, _ = [one for columns in self._columns.values() for one in columns][number]
        return BadValue(model, group, index)
