"""A small linear correction of every map, which is folded into weights and biases at the end.

    output = inputs @ weight + bias + spread * (((inputs - mean) @ whitener) @ matrix + offset)

The whitener is fixed: it projects the inputs on their strongest directions, each scaled to unit variance, so that one learning
rate suits all of them. For the same reason, outputs are in units of their standard deviation, `spread`. Matrix and offset start
at zero, which gives the original map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfit.runtime import EXACT_HEAD
from kvfit.runtime.features import Columns, Runs
from kvfit.runtime.maps import Weights
from kvfit.spec import Kind, MapperSpec

LEAST_SPREAD = 1e-3
SAMPLE_ROWS = 4096  # number of tokens for the whiteners; many more than there are directions


def whitener(inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The mean of inputs and the projection on their strongest directions.

    Args:
        inputs: (N, F), float32.
        rank: maximal number of directions.

    Returns:
        Mean (F,) and projection (F, r): (inputs - mean) @ projection has mean zero and covariance one.
    """
    mean = inputs.mean(0)
    centred = inputs - mean
    rank = min(rank, *inputs.shape)
    # The decomposition is exact up to twice the rank, and randomised above.
    if inputs.shape[1] <= 2 * rank:
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(inputs))
        values, vectors = values[-rank:].clamp(min=0).sqrt(), vectors[:, -rank:]
    else:
        _, scales, vectors = torch.svd_lowrank(centred, q=rank, niter=3)
        values = scales / len(inputs) ** 0.5
    kept = values > LEAST_SPREAD * values.max()  # smaller values are rounding errors of float32
    return mean, vectors[:, kept] / values[kept]


class Correction:
    """The maps of a mapper, each with a correction.

    Attributes:
        matrices: the trained parameters per (kind, target layer), (r + 1, G): the matrix (r, G), and the offset in the last
            row.
    """

    def __init__(self, spec: MapperSpec, weights: Weights, inputs: Sequence[Tensor], rank: int) -> None:
        """Fit the whiteners, and start with corrections of zero.

        Args:
            spec: the mapper's spec, with support ``full``.
            weights: per (kind, target layer), weight and bias in float32, all on one device.
            inputs: inputs of examples, (T, F) each, which determine the whiteners.
            rank: rank of each correction.
        """
        self.weights = dict(weights)
        self.device = next(iter(self.weights.values()))[1].device
        self._runs = _runs(spec)
        rows = torch.cat([part[EXACT_HEAD:] for part in inputs])  # the target runs the others itself
        every = max(1, len(rows) // SAMPLE_ROWS)
        sample = rows[::every].to(self.device, torch.float32)
        self._whiteners: dict[Runs, tuple[Tensor, Tensor]] = {}
        self.matrices: dict[tuple[Kind, int], Tensor] = {}
        self._spread: dict[tuple[Kind, int], Tensor] = {}
        for key, (weight, bias) in self.weights.items():
            runs = self._runs[key]
            read = _columns(sample, runs)
            if runs not in self._whiteners:
                self._whiteners[runs] = whitener(read, rank)
            self._spread[key] = (read @ weight + bias).std(0).clamp(min=1e-6)
            n_rows = self._whiteners[runs][1].shape[1] + 1
            self.matrices[key] = torch.zeros(n_rows, len(bias), device=bias.device, requires_grad=True)

    def outputs(self, inputs: Tensor) -> dict[tuple[Kind, int], Tensor]:
        """The corrected outputs of every map, (B, T, G), for inputs (B, T, F). They are differentiable in `matrices`."""
        seen = inputs.to(self.device, torch.float32)
        whitened: dict[Runs, Tensor] = {}
        out = {}
        for key, (weight, bias) in self.weights.items():
            runs, matrix = self._runs[key], self.matrices[key]
            read = _columns(seen, runs)
            if runs not in whitened:
                mean, projection = self._whiteners[runs]
                whitened[runs] = (read - mean) @ projection
            out[key] = read @ weight + bias + (whitened[runs] @ matrix[:-1] + matrix[-1]) * self._spread[key]
        return out

    @torch.no_grad()
    def folded(self) -> dict[tuple[Kind, int], tuple[Tensor, Tensor]]:
        """Weights and biases of equivalent maps without a correction."""
        out = {}
        for key, (weight, bias) in self.weights.items():
            mean, projection = self._whiteners[self._runs[key]]
            matrix = self.matrices[key]
            change = (projection @ matrix[:-1]) * self._spread[key]
            out[key] = (weight + change, bias + matrix[-1] * self._spread[key] - mean @ change)
        return out


def _runs(spec: MapperSpec) -> Mapping[tuple[Kind, int], Runs]:
    """The columns of an example's inputs that each map reads."""
    if spec.rank is None:
        return Columns(spec, spec.mapped_layers).runs
    return {(entry.kind, entry.layer_index): ((0, spec.rank),) for entry in spec.layers}


def _columns(inputs: Tensor, runs: Runs) -> Tensor:
    if len(runs) == 1:
        return inputs[..., runs[0][0] : runs[0][1]]
    return torch.cat([inputs[..., start:stop] for start, stop in runs], -1)
