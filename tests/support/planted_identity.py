"""A mapper of every kind at once that must change nothing: a model to itself, with inputs that cancel.

Each layer's map is the identity on its own layer, plus any matrix times the source's first layer, minus the same matrix
times the lexical inputs of lag 0. Those are the first layer of the target, which is the same model: so the two cancel if, and
only if, they are read, un-rotated and placed right. All of it goes through a shared basis that is a rotation of the inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bundle_factory import RECIPE, SOLVE
from made_mappers import mapper_spec, spec_of

from kvfit.bundle.bundle import write_bundle


def write_identity(folder: Path, model: Any, *, cancel: bool = True) -> Path:
    """The bundle; with ``cancel=False`` the lexical inputs are added instead of taken off, so that everything changes."""
    side = spec_of(model)
    generator = torch.Generator().manual_seed(0)
    width, n_layers = side.width, side.n_layers
    spec = mapper_spec(
        side, side, [list(range(n_layers))] * n_layers, inputs="both", lexical_lags=(0,), rank=2 * width * (n_layers + 1)
    )
    n_inputs = spec.basis_shape[0]
    basis = torch.linalg.qr(torch.randn(n_inputs, n_inputs, generator=generator, dtype=torch.float64)).Q
    weights = []
    for layer in spec.layers:
        weight = torch.zeros(n_inputs, width, dtype=torch.float64)
        of_values = layer.kind == "values"
        own = (n_layers * of_values + layer.layer_index) * width
        weight[own : own + width] = torch.eye(width)
        for half in range(2):
            mixed = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
            weight[half * n_layers * width :][:width] += mixed
            weight[(2 * n_layers + half) * width :][:width] += -mixed if cancel else mixed
        weights.append((layer.kind, layer.layer_index, (basis.T @ weight).float(), torch.zeros(width)))
    write_bundle(folder, spec, weights, recipe=RECIPE, solve=SOLVE, basis=basis.float())
    return folder
