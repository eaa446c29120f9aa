"""Weight files: the tensors that a mapper has, and their distribution over safetensors files.

The safetensors library reads and writes the files. The headers are also parsed here, because the library accepts duplicate keys
and headers of 100 MB, and does not say how many bytes are missing from a truncated file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfit.bundle import manifest, records
from kvfit.bundle.files import sync_file
from kvfit.errors import BundleError
from kvfit.spec import KINDS, Kind, MapperSpec, RopeSpec

MAX_HEADER = 16 << 20
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
BASIS = "basis.weight"
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorSpec:
    """Name, stored dtype and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file, and the name of the file."""

    spec: TensorSpec
    file: str


def rope_name(role: str, index: int) -> str:
    """Name of the tensor for a rotary table of the ``source`` or the ``target``."""
    return f"{role}.rope.{index}.inverse_frequencies"


def layer_name(kind: Kind, layer_index: int, part: str) -> str:
    """Name of the tensor for the ``weight`` or ``bias`` of one kind of one target layer."""
    return f"layers.{layer_index}.{kind}.{part}"


def tensor_groups(spec: MapperSpec) -> list[list[TensorSpec]]:
    """The tensors of a mapper in file order. The tensors of a group are in one file."""
    ropes: tuple[tuple[str, RopeSpec], ...] = (("source", spec.source.rope), ("target", spec.target.rope))
    groups = [
        [TensorSpec(rope_name(role, index), "F32", (len(table.inverse_frequencies),))]
        for role, rope in ropes
        for index, table in enumerate(rope.tables)
    ]
    dtype = STORED[spec.dtype]
    if spec.rank is not None:
        groups.append([TensorSpec(BASIS, dtype, spec.basis_shape)])
    for layer_index in spec.mapped_layers:
        for kind in KINDS:
            weight = TensorSpec(layer_name(kind, layer_index, "weight"), dtype, spec.weight_shape(kind, layer_index))
            bias = TensorSpec(layer_name(kind, layer_index, "bias"), "F32", (spec.target.width_of(kind, layer_index),))
            groups.append([weight, bias])
    return groups


def plan(groups: Iterable[list[TensorSpec]], shard_bytes: int) -> list[list[TensorSpec]]:
    """Distribute groups over files of at most `shard_bytes`, in order. A larger group gets a file of its own."""
    shards: list[list[TensorSpec]] = []
    size = 0
    for group in groups:
        # A tensor's header entry has its name and less than 96 bytes of JSON and numbers (shapes have at most 3 axes).
        needed = sum(tensor.nbytes + len(tensor.name) + 160 for tensor in group)
        if not shards or size + needed > shard_bytes:
            shards.append([])
            size = 64
        shards[-1].extend(group)
        size += needed
    return shards


def shard_name(number: int, total: int) -> str:
    """File name of weight file `number`, counted from 1."""
    return f"mapper-{number:05d}-of-{total:05d}.safetensors"


def write_shard(path: Path, wanted: list[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Write one weight file of named tensors, which must come in the order of `wanted`. All of them are in memory at once.

    Returns:
        The file's SHA-256 in hexadecimal.

    Raises:
        BundleError: a tensor is not the next of `wanted`.
        OSError: the disk failed.
    """
    held: dict[str, Tensor] = {}
    for expected in wanted:
        name, tensor = next(tensors)
        if name != expected.name or tuple(tensor.shape) != expected.shape:
            raise BundleError(f"tensor {name} {tuple(tensor.shape)}: needed {expected.name} {expected.shape}")
        # It is copied because the library refuses tensors that share memory, and the caller may reuse its tensor.
        held[name] = torch.empty(expected.shape, dtype=TORCH_DTYPES[expected.dtype]).copy_(tensor.detach())
    try:
        save_file(held, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(None, f"{path.name}: {records.one_line(error)}") from None
    sync_file(path)
    return manifest.file_digest(path)


def read_vector(path: Path, name: str) -> list[float]:
    """The values of a small tensor.

    Raises:
        BundleError: the file cannot be read.
    """
    with _opened(path) as stream:
        values: list[float] = stream.get_tensor(name).tolist()
        return values


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a weight file. The library checks that they fill the file without gap or overlap.

    Raises:
        BundleError: the header is too long or ambiguous, or does not match the file.
    """
    header = _parse_header(path)
    try:
        with _opened(path) as stream:
            slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
            specs = [TensorSpec(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
    except BundleError:
        described = max((entry["data_offsets"][1] for entry in header.values() if _has_end(entry)), default=0)
        size, needed = path.stat().st_size, 8 + _header_length(path) + described
        if size == needed:
            raise
        raise BundleError(
            f"file {path.name}: {size} bytes, its header describes {needed}; truncated or damaged,"
            f" {manifest.how_to_renew(path)}"
        ) from None
    return {spec.name: StoredTensor(spec, path.name) for spec in specs}


def _parse_header(path: Path) -> dict[str, Any]:
    size, length = path.stat().st_size, _header_length(path)
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise BundleError(
            f"file {path.name}: header of {length} bytes in a file of {size}, needed 2 to {MAX_HEADER} bytes that the file"
            f" holds; truncated or damaged, {manifest.how_to_renew(path)}"
        )
    with open(path, "rb") as stream:
        stream.seek(8)
        text = stream.read(length)
    try:
        header = records.parse_json(text)
    except ValueError as error:
        raise BundleError(
            f"file {path.name}: header is not strict JSON ({error}); damaged, {manifest.how_to_renew(path)}"
        ) from None
    if not isinstance(header, dict):
        raise BundleError(f"file {path.name}: header is a {type(header).__name__}, needed an object")
    return header


def _header_length(path: Path) -> int:
    with open(path, "rb") as stream:
        return int.from_bytes(stream.read(8), "little")


def _has_end(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as stream:
            yield stream
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"file {path.name}: cannot be read ({records.one_line(error)}); damaged, {manifest.how_to_renew(path)}"
        ) from None
