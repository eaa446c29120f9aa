"""The target's first layer, which is exact without attention, as an input of the maps of a spec with `lexical_lags`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model.first_layer import first_layer as compute_first_layer
from kvfit.runtime.checks import check_first_layer, check_ids
from kvfit.runtime.features import Angles, Buffers, Pairs, Part, Tables, moved_to
from kvfit.runtime.known import KnownModels
from kvfit.spec import KINDS, MapperSpec


@dataclass(frozen=True)
class FreeLayer:
    """The source of the target's first layer: arguments of `Mapper.transfer`.

    Attributes:
        model: the target; None for the one that the mapper is bound to.
        input_ids: (B, T), ids of the tokens in the source's cache.
        given: keys and values of the layer, (B, H, T, D), in place of the other two.
    """

    model: Any
    input_ids: Tensor | None
    given: tuple[Tensor, Tensor] | None

    def read(
        self, spec: MapperSpec, models: KnownModels, pairs: Pairs, positions: Tensor, start: int
    ) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the last T' tokens, (B, H, T', D): those that the maps of tokens `start` to T - 1 read.

        Returns:
            The keys and values; None for a mapper that does not read them.

        Raises:
            MismatchError: an argument does not fit the source's cache, or one is missing.
        """
        batch, _, total, _ = pairs[0][0].shape
        input_ids = None if self.input_ids is None else check_ids(self.input_ids, batch, total)
        given = None if self.given is None else check_first_layer(spec.target, self.given, batch, total)
        if not spec.lexical_lags:
            return None
        # The longest lag of the first mapped token. A token with fewer tokens before it does not read an earlier one.
        begin = max(0, min(start, total - 1) - spec.lexical_lags[-1])
        if given is not None:
            return given[0][:, :, begin:], given[1][:, :, begin:]
        model = models.bound() if self.model is None else self.model
        if model is None or input_ids is None:
            missing = "input_ids" if input_ids is None else "target_model"
            raise MismatchError(
                f"{missing}: found none, needed the ids of the source cache's tokens "
                "(input_ids=) and the target (target_model=, or mapper.bind(target_model=...)): this mapper reads the target's "
                "first layer"
            )
        models.check("target", model)
        return compute_first_layer(model, input_ids[:, begin:], positions.expand(batch, total)[:, begin:])


class Lexical:
    """The lexical inputs of one transfer: un-rotated keys and values of the target's first layer, and an index per lag.

    A token reads the token `lag` places before it. If there are fewer tokens before it, it reads the first token of its
    sequence. Their number is the difference of its position and the smallest position, so that left padding is never read.
    """

    def __init__(
        self,
        spec: MapperSpec,
        tables: Tables,
        pair: tuple[Tensor, Tensor],
        positions: Tensor,
        start: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Un-rotate the first layer once, for all lags.

        Args:
            spec: the mapper's spec.
            tables: the mapper's rotary tables.
            pair: keys and values of the target's first layer for the last tokens of the sequence, (B, H, T - offset, D). The
                offset is 0, or leaves enough tokens before `start` for the longest lag.
            positions: (T,) or (B, T), positions of all tokens.
            start: the first token that is mapped.
            dtype: dtype of the inputs.
            device: device of the inputs.
        """
        keys, values = (moved_to(half, device) for half in pair)
        batch, _, held, _ = keys.shape
        total = positions.shape[-1]
        offset = total - held
        self._rows = torch.empty(batch, held, spec.target.first_width, dtype=dtype, device=device)
        parts = torch.split(self._rows, [spec.target.width_of(kind, 0) for kind in KINDS], -1)
        seen_keys, seen_values = (
            part.view(batch, held, *spec.target.shape(kind, 0)).transpose(1, 2) for kind, part in zip(KINDS, parts, strict=True)
        )
        seen_values.copy_(values)
        number = tables.target[0]
        if number is None:
            seen_keys.copy_(keys)
        else:
            wide = torch.promote_types(dtype, torch.float32)
            turned = torch.empty(keys.shape, dtype=wide, device=device)
            Angles(tables, positions[..., offset:]).turn(turned, keys.to(wide), number, inverse=True)
            seen_keys.copy_(turned)
        self._rows = self._rows.view(batch * held, -1)
        positions = moved_to(positions, device).expand(batch, total)
        earlier = (positions - positions.amin(-1, keepdim=True))[:, start:]  # number of tokens before each one in its sequence
        own = torch.arange(start - offset, held, device=device)
        first_row = torch.arange(batch, device=device)[:, None] * held
        # (lags, B, T - start), row numbers of the matrix above
        self._index = torch.stack([first_row + (own - earlier.clamp(max=lag)).clamp(min=0) for lag in spec.lexical_lags])

    def write(self, out: Tensor, part: Part, buffers: Buffers) -> None:
        """Write the inputs of one chunk of n tokens into `out`, (n, lags * `first_width`) with any strides."""
        width = self._rows.shape[1]
        for place, index in enumerate(self._index):
            index = index[part.rows, part.tokens].reshape(-1)
            found = buffers.take("lexical", (len(index), width), out.dtype, out.device)
            torch.index_select(self._rows, 0, index, out=found)
            out[:, place * width : (place + 1) * width] = found
