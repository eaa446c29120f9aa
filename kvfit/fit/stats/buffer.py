"""`TokenBuffer` collects shifted activations of both splits until they are multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.fit.stats import moments
from kvfit.fit.stats.layout import SPLITS, Group, Layout, Part, vector_of
from kvfit.fit.stats.record import Array, BadValue
from kvfit.spec import KINDS, ModelSpec

# For each group, one tensor (N, features) per layer, or per lag where the group is ``lexical``.
Activations = Mapping[Group, Sequence[Tensor]]

LARGEST_VALUE = 1e15  # relative to the shift; the float32 sum of 1e8 squares of it is still finite


class _Columns(NamedTuple):
    """Where one block of activations comes from, and its columns. The blocks of a group lie side by side in this order."""

    model: Literal["source", "target"]  # lexical inputs come with the source's, as all other inputs do
    group: Group
    number: int  # the layer or the lag
    at: slice
    width: int


class TokenBuffer:
    """Rows of shifted activations in float32.

    For each kind a row holds the features of all source layers and then of all target layers. Every layer of a model has the
    columns of its widest one, as in the store's arrays; those that it does not need hold zeros. `fit` rows fill the buffer from
    the front and `holdout` rows from the back, so that each split's rows lie together and neither needs a fixed share.

    Attributes:
        capacity: the number of tokens that fit.
        n_rows: the number of tokens in the buffer, per split.
        shift: per group, (features,) float32; empty until the first good batch fixes it.
        device: the buffer's device.
    """

    def __init__(self, layout: Layout, capacity: int, device: torch.device | None) -> None:
        self.capacity = capacity
        self.n_rows: dict[Part, int] = dict.fromkeys(SPLITS, 0)
        self.shift: dict[Group, Tensor] = {}
        self.device = device
        self._layout = layout
        self._rows: dict[Group, Tensor] = {}
        self._columns: dict[Group, list[_Columns]] = {kind: [] for kind in KINDS}
        self._widths: dict[Group, int] = dict.fromkeys(KINDS, sum(layout.widths))
        for kind in KINDS:
            models: tuple[tuple[Literal["source", "target"], ModelSpec, int], ...] = (
                ("source", layout.source, 0),
                ("target", layout.target, layout.widths[0]),
            )
            for name, model, first in models:
                for index in range(model.n_layers):
                    start, width = first + index * model.width, model.width_of(kind, index)
                    self._columns[kind].append(_Columns(name, kind, index, slice(start, start + width), width))
        if layout.lexical_lags:
            width, lags = layout.lexical_width, range(len(layout.lexical_lags))
            places = [slice(index * width, (index + 1) * width) for index in lags]
            self._columns["lexical"] = [_Columns("source", "lexical", index, places[index], width) for index in lags]
            self._widths["lexical"] = len(lags) * width

    @property
    def used(self) -> int:
        """The number of tokens in the buffer."""
        return sum(self.n_rows.values())

    def rows(self, split: Part) -> dict[Group, Tensor]:
        """Views of the rows of a split, per group."""
        n_rows = self.n_rows[split]
        first = 0 if split == "fit" else self.capacity - n_rows
        return {group: rows[first : first + n_rows] for group, rows in self._rows.items()}

    def clear(self, split: Part) -> None:
        """Forget the rows of a split."""
        self.n_rows[split] = 0

    def check(self, split: str, source: Activations, target: Activations) -> int:
        """Check a batch and return its number of tokens.

        Raises:
            MismatchError: shapes do not fit the models, or token counts differ between layers.
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
            for model, _, index, _, width in columns:
                rows = given[model][group][index]
                n_tokens = rows.shape[0] if n_tokens is None and rows.ndim == 2 else n_tokens
                if tuple(rows.shape) != (n_tokens, width) or not rows.is_floating_point():
                    raise MismatchError(
                        f"{model} {group} of layer {index} are {rows.dtype} {tuple(rows.shape)}, "
                        f"needs floats ({n_tokens}, {width})"
                    )
        return n_tokens or 0

    def fix_shift(self, source: Activations, target: Activations) -> None:
        """Take the shift from a batch's means and the device from its tensors, unless they are fixed already."""
        if not self._rows:
            device = source["keys"][0].device
            self.device = self.device or (device if device.type != "mps" else torch.device("cpu"))  # mps has no float64
            for group, columns in self._columns.items():
                # Columns that no layer needs stay zero, because nothing writes to them.
                make = torch.empty if sum(one.width for one in columns) == self._widths[group] else torch.zeros
                self._rows[group] = make(self.capacity, self._widths[group], dtype=torch.float32, device=self.device)
        if not self.shift:
            given = {"source": source, "target": target}
            for group, columns in self._columns.items():
                self.shift[group] = torch.zeros(self._widths[group], device=self.device)
                for one in columns:
                    self.shift[group][one.at] = moments.shift_of(given[one.model][group][one.number].to(self.device))
        self.shift = {group: shift.to(self.device) for group, shift in self.shift.items()}

    def load(self, split: Part, source: Activations, target: Activations, start: int, stop: int) -> BadValue | None:
        """Copy tokens start..stop of a batch, less the shift, next to the split's rows, without counting them yet.

        Returns:
            Where the first value lies that is not finite or too large to be squared; None for a good batch.
        """
        kept = self.n_rows[split]
        first = kept if split == "fit" else self.capacity - kept - (stop - start)
        peaks, given = [], {"source": source, "target": target}
        for group, columns in self._columns.items():
            rows = self._rows[group][first : first + stop - start]
            for model, _, index, at, _ in columns:
                layer = given[model][group][index]
                place, shift = rows[:, at], self.shift[group][at]
                if layer.dtype == torch.float64:
                    place.copy_(layer[start:stop].to(self.device) - shift)
                else:
                    place.copy_(layer[start:stop]).sub_(shift)
                low, high = place.aminmax()
                peaks.append(torch.maximum(-low, high))
        good = torch.stack(peaks) < LARGEST_VALUE  # false for NaN; one synchronisation with the device per batch
        return None if bool(good.all()) else self._place(int(good.to(torch.int8).argmin()))

    def shifts(self) -> dict[str, Array]:
        """The shift in the shapes of the store's arrays, by name."""
        arrays = {array.name: torch.zeros(array.shape) for array in self._layout.shifts}
        for place, part in self._places(arrays):
            place.copy_(part)
        return {name: tensor.numpy() for name, tensor in arrays.items()}

    def set_shifts(self, shifts: Mapping[str, Array]) -> None:
        """Set the shift from the arrays that `shifts` returned."""
        self.shift = {group: torch.zeros(width) for group, width in self._widths.items()}
        for place, part in self._places({name: torch.from_numpy(array) for name, array in shifts.items()}):
            part.copy_(place)

    def _places(self, arrays: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each block, views of its features in the store's arrays of shifts and in `shift`."""
        for group, columns in self._columns.items():
            for model, _, index, at, width in columns:
                name, place = vector_of(model, group)
                yield arrays[f"shift/{name}"][place, index, :width], self.shift[group][at]

    def sums(self, split: Part, into: Mapping[str, Tensor]) -> None:
        """Add the sums and squares of a split's rows to the store's small arrays, by name."""
        for group, columns in self._columns.items():
            rows = self.rows(split)[group]
            for model, _, index, at, width in columns:
                name, place = vector_of(model, group)
                into[f"{name}_sum"][place, index, :width] += moments.sums(rows[:, at]).cpu()
                if name == "target":
                    into["target_square"][place, index, :width] += moments.squares(rows[:, at]).cpu()

    def free(self) -> None:
        """Free the memory."""
        self._rows = {}

    def _place(self, number: int) -> BadValue:
        model, group, index, *_ = [one for columns in self._columns.values() for one in columns][number]
        return BadValue(model, group, index)
