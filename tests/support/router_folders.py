"""Mappers that semantic-router's layout can hold, and folders in that layout as the router's own fitter writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from bundle_factory import RECIPE, SOLVE, rewrite_sums
from made_mappers import mapper_spec, model_spec

from kvfit.bundle.bundle import write_bundle
from kvfit.spec import Kind, MapperSpec, ModelSpec, RopeSpec, RopeTable

THETAS = (10000.0, 500000.0)
COMMITS = ("a1" * 20, "b2" * 20)
SETS = ((0, 2), (1, 2), (0, 1), (1, 2))
FOREIGN_SETS = ([2, 0], [1, 2], [0, 1], [2, 1])


def plain(n_layers: int, theta: float, head_dim: int = 4, **changes: Any) -> RopeSpec:
    """One plain table for all layers, computed in float32 as models do."""
    angles = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    values = {
        "inverse_frequencies": tuple(angles.tolist()),
        "rotated_width": head_dim,
        "pairing": "half",
        "attention_scaling": 1.0,
    }
    return RopeSpec((RopeTable(**(values | changes)),), (0,) * n_layers)


def side(role: int, **changes: Any) -> ModelSpec:
    """The source (0) or the target (1) of the pair: 3 and 4 layers, both 2 heads x 4."""
    n_layers, n_heads, head_dim = (3, 4)[role], changes.pop("n_heads", 2), changes.pop("head_dim", 4)
    values = {
        "rope": plain(n_layers, THETAS[role], head_dim),
        "ref": ("org/small", "org/Large")[role],
        "revision": COMMITS[role],
    }
    return model_spec(n_layers, n_heads, head_dim, **(values | changes))


def pair(sets: Any = SETS, source: ModelSpec | None = None, target: ModelSpec | None = None, **changes: Any) -> MapperSpec:
    """The spec of a mapper that the layout can hold, before `changes`."""
    spec = mapper_spec(source or side(0), target or side(1), sets)
    layers = tuple(
        dataclasses.replace(layer, penalty=0.01 * (1 + number), r2_fit=0.5 + number / 32, r2_holdout=0.25 + number / 32)
        for number, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(spec, **({"gain": "variance", "layers": layers} | changes))


def make(folder: Path, spec: MapperSpec) -> Path:
    """A bundle with random weights."""
    generator = torch.Generator().manual_seed(1)

    def weights() -> Iterator[tuple[Kind, int, torch.Tensor, torch.Tensor]]:
        for layer in spec.layers:
            weight = torch.randn(spec.weight_shape(layer.kind, layer.layer_index), generator=generator)
            bias = torch.randn(spec.target.width, generator=generator)
            yield layer.kind, layer.layer_index, weight.to(getattr(torch, spec.dtype)), bias

    basis = None if spec.rank is None else torch.randn(spec.basis_shape, generator=generator)
    write_bundle(folder, spec, weights(), recipe=RECIPE, solve=SOLVE, basis=basis)
    return folder


def foreign(folder: Path, *, heads: int = 2, head_dim: int = 16, **changes: Any) -> Path:
    """A folder as the router's fitter writes it: best layers first, no word of rotation or fingerprints."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    width = heads * head_dim
    tensors = {}
    for layer_index in range(4):
        for letter in "kv":
            tensors[f"target.{layer_index}.{letter}.W"] = torch.randn(2 * width, width, generator=generator) / 8
            tensors[f"target.{layer_index}.{letter}.b"] = torch.randn(width, generator=generator)
    safetensors.torch.save_file(tensors, folder / "weights.safetensors")
    lists = {str(index): chosen for index, chosen in enumerate(FOREIGN_SETS)}
    manifest = {
        "mapper_id": "tiny-b1", "topk": 2, "ridge_alpha": 0.5, "centered_inputs": True, "rope_stripped_on_keys": True,
        "source_layers_per_target": {"k": lists, "v": lists}, "calibration": {"corpus": "some/corpus", "seed": 2},
        "evaluation_report": "report.json", "schema_version": 1,
        "compatibility": {
            "source_model": "org/tiny-source", "source_revision": COMMITS[0], "target_model": "org/tiny-target",
            "target_revision": COMMITS[1], "variant": "full_head", "precision": "fp32", "source_tp": 1, "target_tp": 1,
            "head_order": "contiguous", "num_kv_heads": heads, "head_dim": head_dim,
        },
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest | changes, indent=2, sort_keys=True))
    rewrite_sums(folder)
    return folder


def edit(folder: Path, change: Any) -> None:
    """Change the manifest, and nothing else."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
