"""Read the rotary tables of a loaded model from its own modules; nothing is computed from the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SINES = "embed_positions"  # the name of the table of sines and cosines in families without inverse frequencies


def rotary_tables(model: Any) -> list[tuple[tuple[float, ...], float]]:
    """The distinct inverse frequencies and attention scalings of a model's rotary modules, in order. The model is not run."""
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
    """The last position that all of a model's tables of sines cover; None for a model that computes its sines as it runs."""
    return min((table.shape[0] - 1 for table in _sine_tables(model)), default=None)


def _sine_tables(model: Any) -> list[Tensor]:
    """The distinct tables of sines and cosines. Several layers may hold the same one."""
    tables: dict[int, Tensor] = {}
    for module in model.modules():
        table = getattr(module, _SINES, None)
        if isinstance(table, Tensor) and table.dim() == 2 and not table.is_meta:
            tables.setdefault(table.data_ptr(), table.detach())
    return list(tables.values())


def frequencies_of_sines(table: Tensor) -> tuple[float, ...] | None:
    """The inverse frequencies of a table of sines and cosines, each a float32; None for another kind of table.

    The angle at position 1 gives a frequency f to about 1e-7. The angles at positions 2, 4, 8, ... are exact multiples of f,
    known up to whole turns. The estimate so far determines the turns, so each step halves the error.

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
    """The 16-bit dtype that a model's inverse frequencies were cast to; None if they are in float32 as they should be.

    `from_pretrained(dtype=...)` keeps them in float32; ``model.half()`` and ``model.to(torch.bfloat16)`` round them.
    """
    narrow = (value.dtype for _, _, value in _frequency_buffers(model) if value.dtype in (torch.float16, torch.bfloat16))
    return next(narrow, None)


def _frequency_buffers(model: Any) -> Iterator[tuple[Any, str, Tensor]]:
    for module in model.modules():
        for name, value in module._buffers.items():
            # These are copies for dynamic scaling to return to, or frequencies for another context length.
            unused = "original" in name or "long" in name or "short" in name
            if name.endswith("inv_freq") and not unused and value is not None and value.dim() == 1 and not value.is_meta:
                yield module, name, value
