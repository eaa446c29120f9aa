"""Weight files: which tensors a mapper has, which file each is in, and how to write and check the files.

The files are safetensors. They are written here, tensor by tensor, because the library's writer wants all tensors of a
file in memory; and headers are read here first, because the library does not refuse duplicate keys.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfit.bundle import strict_json
from kvfit.errors import BundleError
from kvfit.spec import KINDS, Kind, MapperSpec, RopeSpec

MAX_HEADER = 16 << 20
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorSpec:
    """Name, stored type and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor found in a file; its data are the bytes from `start` up to `end` of the file."""

    spec: TensorSpec
    file: str
    start: int
    end: int


BASIS = "basis.weight"


def rope_name(role: str, index: int) -> str:
    """Name of the tensor of a rotary table of the ``source`` or the ``target``."""
    return f"{role}.rope.{index}.inverse_frequencies"


def layer_name(kind: Kind, layer_index: int, part: str) -> str:
    """Name of the ``weight`` or ``bias`` of one kind of one target layer."""
    return f"layers.{layer_index}.{kind}.{part}"


def tensor_groups(spec: MapperSpec) -> list[list[TensorSpec]]:
    """The tensors of a mapper in file order; those of a group stay in one file."""
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
            bias = TensorSpec(layer_name(kind, layer_index, "bias"), "F32", (spec.target.width,))
            groups.append([weight, bias])
    return groups


def plan(groups: Iterable[list[TensorSpec]], shard_bytes: int) -> list[list[TensorSpec]]:
    """Put groups into files of at most `shard_bytes`, in order; a group that is larger gets a file of its own."""
    shards: list[list[TensorSpec]] = []
    size = 0
    for group in groups:
        # A tensor's header entry is its name plus less than 96 bytes of JSON and numbers (shapes have at most 3 axes).
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
    """Write one weight file from a stream of named tensors, which must come in the order of `wanted`.

    Returns:
        The file's SHA-256 in hexadecimal.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in wanted:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin on 8 bytes, so that a float32 is aligned in a mapped file
    digest = hashlib.sha256()
    with open(path, "xb") as stream:
        for data in _pieces(struct.pack("<Q", len(text)) + text, wanted, tensors):
            digest.update(data)
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _pieces(head: bytes, wanted: list[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    yield head
    for expected in wanted:
        name, tensor = next(tensors)
        stored = tensor.detach().to("cpu", TORCH_DTYPES[expected.dtype]).contiguous()
        if name != expected.name or tuple(stored.shape) != expected.shape:
            raise BundleError(f"tensor {name} {tuple(stored.shape)}: needed {expected.name} {expected.shape}")
        if expected.nbytes:
            # Through the address rather than NumPy, which the run time does not need and which has no bfloat16.
            yield memoryview((ctypes.c_char * expected.nbytes).from_address(stored.data_ptr())).cast("B")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a weight file, after checking that the file holds exactly them.

    Raises:
        BundleError: a header that is too long, is no strict JSON, overlaps, leaves gaps, or a file of another size.
    """
    size = path.stat().st_size
    with open(path, "rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if len(head) < 8 or length < 2 or length > min(MAX_HEADER, size - 8):
            raise BundleError(
                f"file {path.name}: header of {length} bytes in a file of {size}, needed 2 to {MAX_HEADER} bytes that the file"
                " holds; the file is truncated or damaged, fetch it again"
            )
        text = stream.read(length)
    try:
        header = strict_json.loads(text)
    except ValueError as error:
        raise BundleError(f"file {path.name}: header is no strict JSON ({error}); fetch it again") from None
    if not isinstance(header, dict):
        raise BundleError(f"file {path.name}: header is a {type(header).__name__}, needed an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BundleError(f"file {path.name}, field __metadata__: found {_short(metadata)}, needed an object of strings")
    found = {name: _stored(path.name, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda item: (item.start, item.end)):
        if tensor.start != end:
            raise BundleError(
                f"file {path.name}, tensor {_short(tensor.spec.name)}: begins at byte {tensor.start},"
                f" needed {end} (no gap, no overlap)"
            )
        end = tensor.end
    if end != size:
        raise BundleError(
            f"file {path.name}: {size} bytes, its header describes {end}; the file is truncated or damaged, fetch it again"
        )
    return found


def _stored(file: str, name: str, entry: Any, begin: int) -> StoredTensor:
    where = f"file {file}, tensor {_short(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BundleError(f"{where}: needed an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BundleError(f"{where}, field dtype: found {_short(dtype)}, needed one of {', '.join(ITEM_BYTES)}")
    if not (isinstance(shape, list) and len(shape) <= 3 and all(type(axis) is int and 0 <= axis < 1 << 40 for axis in shape)):
        raise BundleError(f"{where}, field shape: found {_short(shape)}, needed up to 3 axes")
    if not (
        isinstance(offsets, list) and len(offsets) == 2 and all(type(item) is int and 0 <= item < 1 << 62 for item in offsets)
    ):
        raise BundleError(f"{where}, field data_offsets: found {_short(offsets)}, needed two byte offsets")
    spec = TensorSpec(name, dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        raise BundleError(
            f"{where}, field data_offsets: {offsets[1] - offsets[0]} bytes, needed {spec.nbytes} for {dtype} {tuple(shape)}"
        )
    return StoredTensor(spec, file, begin + offsets[0], begin + offsets[1])


def _short(value: Any) -> str:
    return repr(value)[:80]
