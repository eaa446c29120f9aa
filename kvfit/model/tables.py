"""The rotary tables that a loaded model holds, read from its own modules and never computed from a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SINES = "embed_positions"  # what families without inverse frequencies call their table of sines and cosines


def rotary_tables(model: Any) -> list[tuple[tuple[float, ...], float]]:
    """Inverse frequencies and attention scaling of every rotary module of a model, distinct, in order; nothing is run."""
    found: list[tuple[tuple[float, ...], float]] = []
    for module, name, frequencies in _frequency_buffers(model):
        prefix = name.removesuffix("inv_freq")
        scaling = getattr(module, f"{prefix}attention_scaling", None)
        entry = (tuple(frequencies.detach().float().cpu().tolist()), 1.0 if scaling is None else float(scaling))
        if entry not in found:
            found.append(entry)
    for table in _sine_tables(model):
        recovered = frequencies_of_sines(table)
        if recovered is not None and (recovered, 1.0) not in found:
            found.append((recovered, 1.0))
    return found


def longest_position(model: Any) -> int | None:
    """The last position that every table of sines of a model has; None for a model that computes its sines as it runs."""
    return min((table.shape[0] - 1 for table in _sine_tables(model)), default=None)


def _sine_tables(model: Any) -> list[Tensor]:
    """Distinct tables of sines and cosines; each layer may hold the same one."""
    tables: dict[int, Tensor] = {}
    for module in model.modules():
        table = getattr(module, _SINES, None)
        if isinstance(table, Tensor) and table.dim() == 2 and not table.is_meta:
            tables.setdefault(table.data_ptr(), table.detach())
    return list(tables.values())


def frequencies_of_sines(table: Tensor) -> tuple[float, ...] | None:
    """The inverse frequencies behind a table of sines and cosines, each a float32; None for a table of another kind.

    The angle of position 1 gives a frequency f to about 1e-7. The angles of positions 2, 4, 8, ... are exact multiples of it,
    known up to whole turns. The estimate so far resolves those, so each step halves the error.

    Args:
        table: (positions, R): R/2 sines, then R/2 cosines.
    """
    if table.dim() != 2 or table.shape[0] < 2 or table.shape[1] % 2 or not table.is_floating_point():
        return None
    sines, cosines = table.double().cpu().chunk(2, 1)  # (positions, R/2)
    if not bool((sines[0] == 0).all() and (cosines[0] == 1).all()):
        return None
    found = torch.atan2(sines[1], cosines[1])
    position = 2
    while position < table.shape[0]:
        angle = torch.atan2(sines[position], cosines[position])
        turns = ((found * position - angle) / (2 * math.pi)).round()
        found = (angle + 2 * math.pi * turns) / position
        position *= 2
    return tuple(found.float().tolist())


def frequency_dtype(model: Any) -> torch.dtype | None:
    """The dtype that a whole model was cast to, its inverse frequencies included; None where they are as they should be.

    `from_pretrained(dtype=...)` keeps them in float32; ``model.half()`` and ``model.to(torch.bfloat16)`` round them.
    """
    narrow = (value.dtype for _, _, value in _frequency_buffers(model) if value.dtype in (torch.float16, torch.bfloat16))
    return next(narrow, None)


def _frequency_buffers(model: Any) -> Iterator[tuple[Any, str, Tensor]]:
    for module in model.modules():
        for name, value in module._buffers.items():
            # The others are copies that dynamic scaling falls back to, or frequencies of another length.
            unused = "original" in name or "long" in name or "short" in name
            if name.endswith("inv_freq") and not unused and value is not None and value.dim() == 1 and not value.is_meta:
                yield module, name, value
