"""A fitted mapper as a folder in semantic-router's layout: opened, checked, read and written.

The counterpart of `kvfit.bundle.bundle` for that layout, and as strict. What its fields mean: `kvfit.interop.semantic_router`.
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

from kvfit.bundle import manifest, mapper_json, records
from kvfit.bundle import weights as shards
from kvfit.bundle.bundle import Bundle
from kvfit.bundle.files import write_file
from kvfit.errors import BundleError, MismatchError
from kvfit.interop.semantic_router import LETTERS, Statement, contradiction, state, statement_from_json, statement_to_json
from kvfit.spec import FORMAT_VERSION, Kind, MapperSpec, SpecError, read_mapper_spec, to_json

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
MAX_MANIFEST = 48 << 20  # holds a recipe.json and a solve.json of the largest size that a bundle may have


@dataclass(frozen=True)
class Artifact:
    """A folder that was opened and checked. Weights stay on disk until `weights` is read.

    Attributes:
        folder: where it is.
        statement: which map it holds.
        calibration: how it was fitted, as its author tells it.
        own: what kvfit wrote beside the layout; None in a folder that others made.
    """

    folder: Path
    statement: Statement
    calibration: dict[str, Any] = field(repr=False)
    own: dict[str, Any] | None = field(repr=False)
    _stamp: tuple[int, int, int] = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Artifact:
        """Open a folder and check all of it but whether weights are finite, which is checked when they are read.

        Raises:
            BundleError: anything that the page of the layout does not allow; names the file and the field.
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
    def _open(cls, folder: Path) -> Artifact:
        if not folder.is_dir():
            raise BundleError("no such folder")
        digests = _read_sums(manifest.read_small(folder, manifest.MANIFEST, manifest.MAX_MANIFEST))
        manifest.check_folder(folder, digests)
        text = manifest.read_small(folder, MANIFEST, MAX_MANIFEST)
        manifest.check_digest(folder / MANIFEST, hashlib.sha256(text).hexdigest(), digests)
        content = manifest.parse_record(MANIFEST, text)
        calibration, own = content.pop("calibration", {}), content.pop("kvfit", None)
        for name, value in (("calibration", calibration), ("kvfit", {} if own is None else own)):
            if not isinstance(value, dict):
                raise BundleError(f"file {MANIFEST}, field {name}: found {type(value).__name__}, needed an object")
        try:
            statement = statement_from_json(content)
        except SpecError as error:
            raise BundleError(f"file {MANIFEST}, {records.one_line(error)}") from None
        stamp = manifest.stamp(folder / WEIGHTS)
        _check_tensors(statement, shards.read_header(folder / WEIGHTS))
        manifest.check_digests(folder, (WEIGHTS,), digests)
        return cls(folder, statement, calibration, own, stamp)

    def own_spec(self) -> MapperSpec | None:
        """The spec that kvfit wrote into the folder, once it says the same as the rest; None where there is none.

        Raises:
            BundleError: it cannot be read, or contradicts the layout's own fields; names the field.
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
            needed = state(spec, self.statement.mapper_id)
        except (SpecError, MismatchError) as error:
            raise BundleError(f"{where} kvfit.mapper, {records.one_line(error)}") from None
        differing = contradiction(self.statement, needed)
        if differing is not None:
            name, found, said = (str(part)[:100] for part in differing)
            raise BundleError(f"{where} {name}: found {found}, needed {said} as field kvfit.mapper says")
        return spec

    def weights(self, spec: MapperSpec) -> Iterator[tuple[Kind, int, Tensor, Tensor]]:
        """(kind, target layer, weight, bias) in the order of ``spec.layers``, one at a time.

        The rows of ``W`` come in the order in which the folder lists the source layers; those of a weight ascend.

        Args:
            spec: of this folder's map; its dtype is what the folder's float32 become.

        Raises:
            BundleError: a value that is not finite or not one of the dtype, or a file that changed meanwhile.
        """
        where = f"semantic-router folder {self.folder}: file {WEIGHTS}"
        dtype = shards.TORCH_DTYPES[shards.STORED[spec.dtype]]
        width = self.statement.compatibility.width
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt") as stream:
                for entry in spec.layers:
                    name = f"target.{entry.layer_index}.{LETTERS[entry.kind]}"
                    stored, bias = (stream.get_tensor(f"{name}.{part}") for part in "Wb")
                    for part, tensor in (("W", stored), ("b", bias)):
                        if not torch.isfinite(tensor).all():
                            raise BundleError(f"{where}, tensor {name}.{part}: holds NaN or infinite values; fit again")
                    listed = self.statement.source_layers_per_target[entry.layer_index]
                    ascending = sorted(range(len(listed)), key=listed.__getitem__)
                    rows = stored.reshape(len(listed), width, width)[ascending].reshape(stored.shape)  # (k * H * D, H * D)
                    weight = rows.to(dtype)
                    if not torch.equal(weight.float(), rows):
                        needed = f"only {spec.dtype} as field kvfit.mapper.dtype says"
                        raise BundleError(f"{where}, tensor {name}.W: holds a value of more digits, needed {needed}")
                    yield entry.kind, entry.layer_index, weight, bias
            if manifest.stamp(self.folder / WEIGHTS) != self._stamp:
                raise BundleError(f"{where}: changed since it was opened; try again once nobody writes it")
        except (OSError, SafetensorError) as error:
            raise BundleError(f"{where}: cannot be read ({records.one_line(error, 200)})") from None


def write_artifact(folder: Path, bundle: Bundle, mapper_id: str) -> int:
    """Write the files of the layout into an empty folder.

    Returns:
        Their bytes.

    Raises:
        MismatchError: the layout cannot say this mapper; names the field.
        BundleError: the bundle cannot be read.
    """
    statement = state(bundle.spec, mapper_id)
    content = statement_to_json(statement) | {
        "calibration": bundle.recipe,
        # A version 1 spec in memory has the fields of version 2, so it is written as version 2.
        "kvfit": {"mapper": to_json(replace(bundle.spec, format_version=FORMAT_VERSION)), "solve": bundle.solve},
    }
    text = manifest.dump_record(MANIFEST, content)
    if len(text) > MAX_MANIFEST:
        raise MismatchError(
            f"file {MANIFEST}: {len(text)} bytes with recipe.json and solve.json, needed at most {MAX_MANIFEST}"
        )
    digests = {MANIFEST: write_file(folder / MANIFEST, text)}
    digests[WEIGHTS] = shards.write_shard(folder / WEIGHTS, _tensors(statement), _stream(bundle))
    sums = manifest.render(digests)
    write_file(folder / manifest.MANIFEST, sums)
    return len(text) + (folder / WEIGHTS).stat().st_size + len(sums)


def _stream(bundle: Bundle) -> Iterator[tuple[str, Tensor]]:
    for entry in bundle.spec.layers:
        # float32 holds every value of the smaller types exactly.
        weight, bias = bundle.layer(entry.kind, entry.layer_index, dtype=torch.float32)
        name = f"target.{entry.layer_index}.{LETTERS[entry.kind]}"
        yield f"{name}.W", weight
        yield f"{name}.b", bias


def _read_sums(data: bytes) -> dict[str, str]:
    digests: dict[str, str] = {}
    for number, digest, name in manifest.entries(data):
        if name not in (MANIFEST, WEIGHTS):
            raise BundleError(
                f"file {manifest.MANIFEST}, line {number}: the name {name[:100]!r} is not allowed,"
                f" needed only {MANIFEST} and {WEIGHTS}"
            )
        digests[name] = digest
    for name in (MANIFEST, WEIGHTS):
        if name not in digests:
            raise BundleError(f"file {manifest.MANIFEST}: {name} is not listed; the folder is incomplete")
    return digests


def _tensors(statement: Statement) -> list[shards.TensorSpec]:
    """The tensors of a folder in file order."""
    width = statement.compatibility.width
    return [
        shards.TensorSpec(f"target.{index}.{letter}.{part}", "F32", shape)
        for index in range(len(statement.source_layers_per_target))
        for letter in LETTERS.values()
        for part, shape in (("W", (statement.topk * width, width)), ("b", (width,)))
    ]


def _check_tensors(statement: Statement, found: Mapping[str, shards.StoredTensor]) -> None:
    wanted = _tensors(statement)
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
