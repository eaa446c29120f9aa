"""Read and write ``mapper.json``, a `MapperSpec` as a record. Its rotary tables are tensors in the weight files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfit.bundle import records
from kvfit.bundle import weights as shards
from kvfit.bundle.records import from_json, to_json
from kvfit.errors import BundleError, SpecError
from kvfit.spec import FORMAT_VERSION, MapperSpec

ROLES = ("source", "target")


def render(spec: MapperSpec) -> bytes:
    """The text of ``mapper.json``.

    Raises:
        BundleError: the spec could not be read again.
    """
    try:
        document = to_json(from_json(MapperSpec, to_json(spec)))  # refuse to write what could not be read
        for role in ROLES:
            if _is_path(document[role]["ref"]):
                raise SpecError(f"{role}.ref", f"the path {document[role]['ref']!r}", "a ref")
            for index, table in enumerate(document[role]["rope"]["tables"]):
                table["inverse_frequencies"] = shards.rope_name(role, index)
        return records.dump_json(document, sort_keys=False)
    except ValueError as error:
        raise BundleError(f"file mapper.json, {records.one_line(error)}") from None


def read_spec(document: dict[str, Any], folder: Path, tensors: Mapping[str, shards.StoredTensor]) -> MapperSpec:
    """The spec of a parsed ``mapper.json``, with its tables read from the weight files.

    Args:
        document: the parsed record. The names of the tables in it are replaced by their values.
        folder: the bundle.
        tensors: the tensors in the weight files, by name.

    Raises:
        BundleError: a field has a wrong value; names it.
    """
    for role in ROLES:
        for index, table in enumerate(_tables(document, role)):
            name = shards.rope_name(role, index)
            where = f"file mapper.json, field {role}.rope.tables[{index}].inverse_frequencies"
            if not isinstance(table, dict) or table.get("inverse_frequencies") != name:
                raise BundleError(f"{where}: needed the tensor name {name!r}")
            tensor = tensors.get(name)
            if tensor is None or tensor.spec.dtype != "F32" or len(tensor.spec.shape) != 1:
                raise BundleError(f"{where}: the weight files hold no float32 vector {name}")
            table["inverse_frequencies"] = shards.read_vector(folder / tensor.file, name)
    try:
        spec = read_mapper_spec(document)
        for role, model in zip(ROLES, (spec.source, spec.target), strict=True):
            if _is_path(model.ref):
                raise SpecError(f"{role}.ref", f"the path {model.ref[:80]!r}", "a ref")
    except SpecError as error:
        raise BundleError(f"file mapper.json, {records.one_line(error)}") from None
    return spec


def read_mapper_spec(document: Mapping[str, Any]) -> MapperSpec:
    """The mapper spec of a parsed document of any format version that this kvfit reads.

    Raises:
        SpecError: a field has a wrong value; names it.
    """
    if document.get("format_version") == 1:
        for name in ("lexical_lags", "rank"):
            if name in document:
                raise SpecError(name, "an unknown key", "only the fields of format version 1")
        for role, name in itertools.product(("source", "target"), ("content", "tokenization_digest", "encoding_digest")):
            if isinstance(document.get(role), Mapping) and name in document[role]:
                raise SpecError(f"{role}.{name}", "an unknown key", "only the fields of format version 1")
        document = {**document, "lexical_lags": [], "rank": None}
    return from_json(MapperSpec, document)


def check_version(document: dict[str, Any], where: str = "file mapper.json") -> None:
    """Refuse a format that this kvfit does not read.

    Args:
        document: a parsed spec.
        where: what the error calls the document.

    Raises:
        BundleError: the format is newer or invalid; says which kvfit wrote it.
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


def _tables(document: dict[str, Any], role: str) -> list[Any]:
    tables = records.value_at(document, role, "rope", "tables")
    return tables if isinstance(tables, list) else []  # read_mapper_spec refuses anything else by name


def _is_path(ref: str) -> bool:
    return "\\" in ref or ref.startswith(("/", ".", "~")) or ref.count("/") > 1
