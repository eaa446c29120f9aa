"""Write a bundle, completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfit.bundle import manifest, mapper_json
from kvfit.bundle import weights as shards
from kvfit.bundle.files import require_free, whole_folder, write_file
from kvfit.errors import BundleError
from kvfit.spec import FORMAT_VERSION, Kind, MapperSpec


def write_bundle(
    folder: str | Path,
    spec: MapperSpec,
    weights: Iterable[tuple[Kind, int, Tensor, Tensor]],
    *,
    recipe: dict[str, Any],
    solve: dict[str, Any],
    basis: Tensor | None = None,
    card: str | None = None,
    shard_bytes: int = 2 << 30,
) -> None:
    """Write a bundle completely or not at all. The same inputs give the same bytes.

    Args:
        folder: the new folder, which must not exist. Its parents are created.
        spec: the mapper's spec.
        weights: (kind, target layer, weight, bias) in the order of ``spec.layers``, with a weight of shape
            ``spec.weight_shape(kind, layer)`` and a bias (G,). They are consumed one at a time.
        recipe: how the statistics were captured, as JSON values.
        solve: how the weights were solved, as JSON values.
        basis: the shared basis, ``spec.basis_shape``; None if ``spec.rank`` is None.
        card: text of ``README.md``; None for no card.
        shard_bytes: maximal size of a weight file in bytes.

    Raises:
        BundleError: the folder exists, or an argument does not fit the spec. Nothing is left behind.
    """
    destination = Path(folder)
    require_free(destination)
    if spec.format_version != FORMAT_VERSION:
        raise BundleError(f"field format_version: found {spec.format_version}, needed {FORMAT_VERSION}")
    if (basis is None) != (spec.rank is None):
        found = "none" if basis is None else f"one of shape {tuple(basis.shape)}"
        raise BundleError(f"tensor {shards.BASIS}: found {found}, but the spec has rank {spec.rank}")
    documents = {
        "mapper.json": mapper_json.render(spec),
        "recipe.json": manifest.dump_record("recipe.json", recipe),
        "solve.json": manifest.dump_record("solve.json", solve),
    }
    if card is not None:
        documents["README.md"] = card.encode("utf-8")
    plan = shards.plan(shards.tensor_groups(spec), shard_bytes)
    with whole_folder(destination) as temporary:
        digests = {name: write_file(temporary / name, data) for name, data in documents.items()}
        tensors = _stream(spec, basis, weights)
        for number, wanted in enumerate(plan, 1):
            name = shards.shard_name(number, len(plan))
            digests[name] = shards.write_shard(temporary / name, wanted, tensors)
        for extra, _ in tensors:
            raise BundleError(f"weights: found {extra} after the last layer of the spec, needed no more")
        write_file(temporary / manifest.MANIFEST, manifest.render(digests))


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, in one pass and without a temporary of the tensor's size."""
    # aminmax returns NaN if there is one, and an infinity is the minimum or the maximum.
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _stream(
    spec: MapperSpec, basis: Tensor | None, weights: Iterable[tuple[Kind, int, Tensor, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor in file order, each checked when it is yielded."""
    for role, model in (("source", spec.source), ("target", spec.target)):
        for index, table in enumerate(model.rope.tables):
            values = torch.tensor(table.inverse_frequencies, dtype=torch.float64)
            if not torch.equal(values.float().double(), values):
                raise BundleError(f"field {role}.rope.tables[{index}].inverse_frequencies: a value that is not a float32")
            yield shards.rope_name(role, index), values.float()
    stored_dtype = shards.TORCH_DTYPES[shards.STORED[spec.dtype]]
    if basis is not None:
        _check_values(shards.BASIS, basis, stored_dtype)
        yield shards.BASIS, basis
    count = 0
    for kind, layer_index, weight, bias in weights:
        name = f"layers.{layer_index}.{kind}"
        if count >= len(spec.layers):
            yield name, weight
        entry = spec.layers[min(count, len(spec.layers) - 1)]
        if (kind, layer_index) != (entry.kind, entry.layer_index):
            raise BundleError(f"weights: found {name}, needed layers.{entry.layer_index}.{entry.kind} next")
        for part, tensor, dtype in (("weight", weight, stored_dtype), ("bias", bias, None)):
            _check_values(f"{name}.{part}", tensor, dtype)
            yield f"{name}.{part}", tensor
        count += 1
    if count < len(spec.layers):
        entry = spec.layers[count]
        raise BundleError(
            f"weights: ended after {count} of {len(spec.layers)}, needed layers.{entry.layer_index}.{entry.kind} next"
        )


def _check_values(name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    if dtype is not None and tensor.dtype != dtype:
        raise BundleError(f"tensor {name}: found {tensor.dtype}, needed {dtype} as the spec says")
    if not is_finite(tensor):
        raise BundleError(f"tensor {name}: holds NaN or infinite values; a larger penalty or another dtype may help")
