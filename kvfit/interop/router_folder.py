"""Read and write a mapper as a folder in semantic-router's layout, with the same checks as for a bundle.

`kvfit.interop.semantic_router` defines the fields of its ``manifest.json``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfit.bundle import manifest as sums
from kvfit.bundle import mapper_json, records
from kvfit.bundle import weights as shards
from kvfit.bundle.bundle import Bundle
from kvfit.bundle.files import write_file
from kvfit.bundle.mapper_json import read_mapper_spec
from kvfit.bundle.records import to_json
from kvfit.errors import BundleError, MismatchError, SpecError
from kvfit.interop.semantic_router import (
    LETTERS,
    RouterManifest,
    first_difference,
    read_router_manifest,
    router_manifest,
    router_manifest_to_json,
)
from kvfit.spec import FORMAT_VERSION, Kind, MapperSpec

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
MAX_MANIFEST = 48 << 20  # enough for the largest recipe.json and solve.json that a bundle may have


@dataclass(frozen=True)
class RouterFolder:
    """An open folder that has been checked. Its weights stay on disk until `weights` is called.

    Attributes:
        folder: the folder.
        manifest: the description of the map.
        calibration: how the map was fitted, in a form of the author's choice.
        own: the fields that kvfit added to the layout; None for a folder of another program.
    """

    folder: Path
    manifest: RouterManifest
    calibration: dict[str, Any] = field(repr=False)
    own: dict[str, Any] | None = field(repr=False)
    _stamp: tuple[int, int, int] = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> RouterFolder:
        """Open a folder and check everything except that the weights are finite, which is checked when they are read.

        Raises:
            BundleError: the layout does not allow something; names the file and the field.
        """
        path = Path(folder)
        try:
            return cls._open(path)
        except BundleError as error:
            raise BundleError(f"semantic-router folder {path}: {error}") from None
        except OSError as error:
            where = f"semantic-router folder {path}: {error.filename or ''}"
            raise BundleError(f"{where} cannot be read ({error.strerror})") from None

    @classmethod
    def _open(cls, folder: Path) -> RouterFolder:
        if not folder.is_dir():
            raise BundleError("no such folder")
        digests = _read_sums(sums.read_small(folder, sums.MANIFEST, sums.MAX_MANIFEST))
        sums.check_folder(folder, digests)
        text = sums.read_small(folder, MANIFEST, MAX_MANIFEST)
        sums.check_digest(folder / MANIFEST, hashlib.sha256(text).hexdigest(), digests)
        content = sums.parse_record(MANIFEST, text)
        calibration, own = content.pop("calibration", {}), content.pop("kvfit", None)
        for name, value in (("calibration", calibration), ("kvfit", {} if own is None else own)):
            if not isinstance(value, dict):
                raise BundleError(f"file {MANIFEST}, field {name}: found {type(value).__name__}, needed an object")
        try:
            manifest = read_router_manifest(content)
        except SpecError as error:
            raise BundleError(f"file {MANIFEST}, {records.one_line(error)}") from None
        stamp = sums.stamp(folder / WEIGHTS)
        _check_tensors(manifest, shards.read_header(folder / WEIGHTS))
        sums.check_digests(folder, (WEIGHTS,), digests)
        return cls(folder, manifest, calibration, own, stamp)

    def own_spec(self) -> MapperSpec | None:
        """The spec that kvfit has written to the folder, checked against the layout's own fields.

        Returns:
            The spec; None for a folder of another program.

        Raises:
            BundleError: the spec cannot be read, or differs from the layout's own fields; names the field.
        """
        if self.own is None:
            return None
        where = f"semantic-router folder {self.folder}: file {MANIFEST}, field"
        for name in sorted(set(self.own) - {"mapper", "solve"}):
            raise BundleError(f"{where} kvfit.{name[:80]}: found an unknown key, needed only mapper and solve")
        for name in ("mapper", "solve"):
            if not isinstance(self.own.get(name), dict):
                raise BundleError(f"{where} kvfit.{name}: found {type(self.own.get(name)).__name__}, needed an object")
        mapper_json.check_version(self.own["mapper"], f"{where} kvfit.mapper")
        try:
            spec = read_mapper_spec(self.own["mapper"])
            needed = router_manifest(spec, self.manifest.mapper_id)
        except (SpecError, MismatchError) as error:
            raise BundleError(f"{where} kvfit.mapper, {records.one_line(error)}") from None
        differing = first_difference(self.manifest, needed)
        if differing is not None:
            name, found, wanted = (str(part)[:100] for part in differing)
            raise BundleError(f"{where} {name}: found {found}, needed {wanted} as field kvfit.mapper says")
        return spec

    def weights(self, spec: MapperSpec) -> Iterator[tuple[Kind, int, Tensor, Tensor]]:
        """Yield (kind, target layer, weight, bias) in the order of ``spec.layers``.

        The rows of ``W`` in the folder follow its list of source layers; in a bundle they are ascending by source layer.

        Args:
            spec: spec of this folder's map; the float32 values are converted to its dtype.

        Raises:
            BundleError: a value is not finite, the dtype cannot hold it exactly, or the file has changed.
        """
        where = f"semantic-router folder {self.folder}: file {WEIGHTS}"
        dtype = shards.TORCH_DTYPES[shards.STORED[spec.dtype]]
        width = self.manifest.compatibility.width
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt") as stream:
                for entry in spec.layers:
                    name = f"target.{entry.layer_index}.{LETTERS[entry.kind]}"
                    stored, bias = (stream.get_tensor(f"{name}.{part}") for part in "Wb")
                    for part, tensor in (("W", stored), ("b", bias)):
                        if not torch.isfinite(tensor).all():
                            raise BundleError(f"{where}, tensor {name}.{part}: holds NaN or infinite values; fit again")
                    listed = self.manifest.source_layers_per_target[entry.layer_index]
                    ascending = sorted(range(len(listed)), key=listed.__getitem__)
                    rows = stored.reshape(len(listed), width, width)[ascending].reshape(stored.shape)  # (k * H * D, H * D)
                    weight = rows.to(dtype)
                    if not torch.equal(weight.float(), rows):
                        needed = f"only {spec.dtype} as field kvfit.mapper.dtype says"
                        raise BundleError(f"{where}, tensor {name}.W: holds a value of more digits, needed {needed}")
                    yield entry.kind, entry.layer_index, weight, bias
            if sums.stamp(self.folder / WEIGHTS) != self._stamp:
                raise BundleError(f"{where}: changed since it was opened; try again once nobody writes it")
        except (OSError, SafetensorError) as error:
            raise BundleError(f"{where}: cannot be read ({records.one_line(error, 200)})") from None


def write_router_folder(folder: Path, bundle: Bundle, mapper_id: str) -> int:
    """Write the files of the layout to an empty folder. There is only one weight file, so all weights are in memory at once.

    Returns:
        The size of all files in bytes.

    Raises:
        MismatchError: the layout cannot hold this mapper; names the field.
        BundleError: the bundle cannot be read.
    """
    manifest = router_manifest(bundle.spec, mapper_id)
    content = router_manifest_to_json(manifest) | {
        "calibration": bundle.recipe,
        # In memory, a version 1 spec has the fields of version 2, so it is written as version 2.
        "kvfit": {"mapper": to_json(replace(bundle.spec, format_version=FORMAT_VERSION)), "solve": bundle.solve},
    }
    text = sums.dump_record(MANIFEST, content)
    if len(text) > MAX_MANIFEST:
        raise MismatchError(
            f"file {MANIFEST}: {len(text)} bytes with recipe.json and solve.json, needed at most {MAX_MANIFEST}"
        )
    digests = {MANIFEST: write_file(folder / MANIFEST, text)}
    digests[WEIGHTS] = shards.write_shard(folder / WEIGHTS, _tensors(manifest), _stream(bundle))
    listed = sums.render(digests)
    write_file(folder / sums.MANIFEST, listed)
    return len(text) + (folder / WEIGHTS).stat().st_size + len(listed)


def _stream(bundle: Bundle) -> Iterator[tuple[str, Tensor]]:
    for entry in bundle.spec.layers:
        # float32 can represent every value of the smaller types.
        weight, bias = bundle.layer(entry.kind, entry.layer_index, dtype=torch.float32)
        name = f"target.{entry.layer_index}.{LETTERS[entry.kind]}"
        yield f"{name}.W", weight
        yield f"{name}.b", bias


def _read_sums(data: bytes) -> dict[str, str]:
    digests: dict[str, str] = {}
    for number, digest, name in sums.entries(data):
        if name not in (MANIFEST, WEIGHTS):
            raise BundleError(
                f"file {sums.MANIFEST}, line {number}: the name {name[:100]!r} is not allowed,"
                f" needed only {MANIFEST} and {WEIGHTS}"
            )
        digests[name] = digest
    for name in (MANIFEST, WEIGHTS):
        if name not in digests:
            raise BundleError(f"file {sums.MANIFEST}: {name} is not listed; the folder is incomplete")
    return digests


def _tensors(manifest: RouterManifest) -> list[shards.TensorSpec]:
    """The tensors of a folder in file order."""
    width = manifest.compatibility.width
    return [
        shards.TensorSpec(f"target.{index}.{letter}.{part}", "F32", shape)
        for index in range(len(manifest.source_layers_per_target))
        for letter in LETTERS.values()
        for part, shape in (("W", (manifest.topk * width, width)), ("b", (width,)))
    ]


def _check_tensors(manifest: RouterManifest, found: Mapping[str, shards.StoredTensor]) -> None:
    wanted = _tensors(manifest)
    for tensor in wanted:
        stored = found.get(tensor.name)
        if stored is None:
            raise BundleError(f"file {WEIGHTS}, tensor {tensor.name}: missing; fetch the folder again")
        if stored.spec != tensor:
            raise BundleError(
                f"file {WEIGHTS}, tensor {tensor.name}: {stored.spec.dtype} {stored.spec.shape}, needed {tensor.dtype}"
                f" {tensor.shape} by {MANIFEST}"
            )
    for name in sorted(set(found) - {tensor.name for tensor in wanted}):
        raise BundleError(f"file {WEIGHTS}, tensor {name[:80]!r}: not a tensor of this mapper")
