"""TokenBuffer: shifted activations of both splits, waiting to be multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.fit.stats import moments
from kvfit.fit.stats.layout import SPLITS, Layout, Part
from kvfit.fit.stats.record import Array, BadValue
from kvfit.spec import KINDS, Kind

Activations = Mapping[Kind, Sequence[Tensor]]

LARGEST_VALUE = 1e15  # about the shift; the float32 sum of 1e8 squares of it is still finite


class TokenBuffer:
    """Rows of shifted activations, per kind (capacity, all source layers' and then all target layers' features) float32.

    `fit` rows fill it from the front and `holdout` rows from the back, so that each split's rows lie together and neither
    needs a share of its own.

    Attributes:
        capacity: tokens that fit.
        n_rows: tokens in it, per split.
        shift: per kind, (features,) float32; empty until the first good batch fixed it.
        device: where it is.
    """

    def __init__(self, layout: Layout, capacity: int, device: torch.device | None) -> None:
        self.capacity = capacity
        self.n_rows: dict[Part, int] = dict.fromkeys(SPLITS, 0)
        self.shift: dict[Kind, Tensor] = {}
        self.device = device
        self._layout = layout
        self._rows: dict[Kind, Tensor] = {}

    @property
    def used(self) -> int:
        """Tokens in it, both splits together."""
        return sum(self.n_rows.values())

    def rows(self, split: Part) -> dict[Kind, Tensor]:
        """The rows of a split per kind, views."""
        n_rows = self.n_rows[split]
        first = 0 if split == "fit" else self.capacity - n_rows
        return {kind: self._rows[kind][first : first + n_rows] for kind in KINDS}

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
        n_tokens: int | None = None
        for name, model, given in (("source", self._layout.source, source), ("target", self._layout.target, target)):
            for kind in KINDS:
                layers = given.get(kind, ())
                if len(layers) != model.n_layers:
                    raise MismatchError(f"{name} gave {kind} of {len(layers)} layers, the store needs {model.n_layers}")
                for layer_index, rows in enumerate(layers):
                    n_tokens = rows.shape[0] if n_tokens is None and rows.ndim == 2 else n_tokens
                    if tuple(rows.shape) != (n_tokens, model.width) or not rows.is_floating_point():
                        raise MismatchError(
                            f"{name} {kind} of layer {layer_index} are {rows.dtype} {tuple(rows.shape)}, "
                            f"needs floats ({n_tokens}, {model.width})"
                        )
        return n_tokens or 0

    def fix_shift(self, source: Activations, target: Activations) -> None:
        """Take the means of a batch as the shift and its device as the buffer's, unless they are fixed already."""
        if not self._rows:
            found = source["keys"][0].device
            self.device = self.device or (found if found.type != "mps" else torch.device("cpu"))  # mps has no float64
            width = sum(self._layout.widths)
            self._rows = {k: torch.empty(self.capacity, width, dtype=torch.float32, device=self.device) for k in KINDS}
        if not self.shift:
            self.shift = {k: torch.cat([moments.shift_of(x.to(self.device)) for x in (*source[k], *target[k])]) for k in KINDS}
        self.shift = {kind: shift.to(self.device) for kind, shift in self.shift.items()}

    def load(self, split: Part, source: Activations, target: Activations, start: int, stop: int) -> BadValue | None:
        """Copy tokens start..stop of a batch behind the split's rows, less the shift, without counting them yet.

        Returns:
            Where the first value is that is not finite or too large to be squared, None for a good batch.
        """
        kept = self.n_rows[split]
        first = kept if split == "fit" else self.capacity - kept - (stop - start)
        peaks = []
        for kind in KINDS:
            rows, column = self._rows[kind][first : first + stop - start], 0
            for layer in (*source[kind], *target[kind]):
                place = rows[:, column : column + layer.shape[1]]
                shift = self.shift[kind][column : column + layer.shape[1]]
                if layer.dtype == torch.float64:
                    place.copy_(layer[start:stop].to(self.device) - shift)
                else:
                    place.copy_(layer[start:stop]).sub_(shift)
                low, high = place.aminmax()
                peaks.append(torch.maximum(-low, high))
                column += layer.shape[1]
        good = torch.stack(peaks) < LARGEST_VALUE  # false for NaN; one look at the device per batch
        return None if bool(good.all()) else self._place(int(good.to(torch.int8).argmin()))

    def shifts(self) -> dict[str, Array]:
        """The shift as the store's arrays hold it, by name."""
        n_source = self._layout.widths[0]
        both = torch.stack([self.shift[kind] for kind in KINDS]).cpu()  # (2, source and target features)
        source, target = (array.shape for array in self._layout.shifts)
        return {
            "shift/source": both[:, :n_source].reshape(source).numpy(),
            "shift/target": both[:, n_source:].reshape(target).numpy(),
        }

    def set_shifts(self, shifts: Mapping[str, Array]) -> None:
        """Take back what `shifts` gave."""
        source, target = torch.from_numpy(shifts["shift/source"]), torch.from_numpy(shifts["shift/target"])
        self.shift = {kind: torch.cat([source[i].flatten(), target[i].flatten()]) for i, kind in enumerate(KINDS)}

    def free(self) -> None:
        """Give the memory back."""
        self._rows = {}

    def _place(self, number: int) -> BadValue:
        n_source, n_target = self._layout.source.n_layers, self._layout.target.n_layers
        kind, layer_index = KINDS[number // (n_source + n_target)], number % (n_source + n_target)
        if layer_index < n_source:
            return BadValue("source", kind, layer_index)
        return BadValue("target", kind, layer_index - n_source)
