"""``mapper.json``: a `MapperSpec` as a document whose rotary tables are tensors of the weight files."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from kvfit.bundle import strict_json
from kvfit.bundle import weights as shards
from kvfit.errors import BundleError
from kvfit.spec import FORMAT_VERSION, MapperSpec, SpecError, from_json, read_mapper_spec, to_json


def render(spec: MapperSpec) -> bytes:
    """The text of ``mapper.json``.

    Raises:
        BundleError: a spec that could not be read again.
    """
    try:
        document = to_json(from_json(MapperSpec, to_json(spec)))  # what cannot be read again is not written
    except SpecError as error:
        raise BundleError(f"file mapper.json, {error}") from None
    for role in ("source", "target"):
        if _is_path(document[role]["ref"]):
            raise BundleError(f"file mapper.json, field {role}.ref: found the path {document[role]['ref']!r}, needed a ref")
        for index, table in enumerate(document[role]["rope"]["tables"]):
            table["inverse_frequencies"] = shards.rope_name(role, index)
    return dump("mapper.json", document, sort_keys=False)


def read_spec(folder: Path, document: dict[str, Any], tensors: Mapping[str, shards.StoredTensor]) -> MapperSpec:
    """The spec of a parsed ``mapper.json``, its tables read from the weight files.

    Raises:
        BundleError: names the field.
    """
    document = deepcopy(document)
    for role in ("source", "target"):
        for index, table in enumerate(_tables(document, role)):
            name = shards.rope_name(role, index)
            where = f"{role}.rope.tables[{index}].inverse_frequencies"
            if not isinstance(table, dict) or table.get("inverse_frequencies") != name:
                raise BundleError(f"file mapper.json, field {where}: needed the tensor name {name!r}")
            tensor = tensors.get(name)
            if tensor is None or tensor.spec.dtype != "F32" or len(tensor.spec.shape) != 1:
                raise BundleError(f"file mapper.json, field {where}: the weight files hold no float32 vector {name}")
            with open(folder / tensor.file, "rb") as stream:
                stream.seek(tensor.start)
                data = stream.read(tensor.end - tensor.start)
            table["inverse_frequencies"] = list(struct.unpack(f"<{len(data) // 4}f", data))
    try:
        spec = read_mapper_spec(document)
    except SpecError as error:
        raise BundleError(f"file mapper.json, {_one_line(str(error))}") from None
    for role, model in (("source", spec.source), ("target", spec.target)):
        if _is_path(model.ref):
            raise BundleError(f"file mapper.json, field {role}.ref: found the path {model.ref[:80]!r}, needed a ref")
    return spec


def check_version(document: dict[str, Any], where: str = "file mapper.json") -> None:
    """Refuse a format that this kvfit does not read.

    Args:
        document: a parsed spec.
        where: what it was read from, for the message.

    Raises:
        BundleError: says which kvfit wrote it.
    """
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise BundleError(f"{where}, field format_version: found {repr(version)[:40]}, needed an integer of at least 1")
    if version > FORMAT_VERSION:
        writer = repr(document.get("kvfit_version"))[:40]
        raise BundleError(
            f"{where}, field format_version: found {version}, this kvfit reads up to {FORMAT_VERSION};"
            f" kvfit {writer} wrote it and reads it: pip install -U kvfit-mappers"
        )


def parse(name: str, data: bytes) -> dict[str, Any]:
    """A strict JSON object.

    Raises:
        BundleError: anything else; names the file.
    """
    try:
        document = strict_json.loads(data)
    except ValueError as error:
        raise BundleError(f"file {name}: no strict JSON ({_one_line(str(error))})") from None
    if not isinstance(document, dict):
        raise BundleError(f"file {name}: found a {type(document).__name__}, needed an object")
    return document


def dump(name: str, value: dict[str, Any], *, sort_keys: bool = True) -> bytes:
    """The text of a JSON file.

    Raises:
        BundleError: a value that strict JSON has not; names the file.
    """
    try:
        return strict_json.dumps(value, sort_keys=sort_keys)
    except ValueError as error:
        raise BundleError(f"file {name}: cannot be written as strict JSON ({_one_line(str(error))})") from None


def _tables(document: dict[str, Any], role: str) -> list[Any]:
    value: Any = document
    for key in (role, "rope", "tables"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, list) else []  # anything else is for from_json to name


def _is_path(ref: str) -> bool:
    return "\\" in ref or ref.startswith(("/", ".", "~")) or ref.count("/") > 1


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
