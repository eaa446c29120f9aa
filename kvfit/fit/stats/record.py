"""The commit record, and the chunk files whose digests it holds.

A chunk file holds the numbers of one Zarr chunk and nothing else. It is read and written here rather than through Zarr, so that
one pass computes the digest and writes or reads the bytes, and the bytes that were checked are the bytes that are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfit.bundle.files import sync_folder
from kvfit.bundle.records import dump_json, from_json, parse_json, to_json
from kvfit.errors import SpecError, StoreError
from kvfit.fit.stats.layout import SPLITS, BlockArray, Generation, Group, Layout, Part, StatsDtype, VectorArray, array_path
from kvfit.spec import Inputs, ModelSpec

FORMAT_VERSION = 2
RECORD_NAME = "commit.json"
QUARANTINE_SHARE = 0.01
QUARANTINE_FROM = 100  # with fewer batches, the share means little
PART_FIELD = "part"  # the recipe's field that says which portion of the text a store saw

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tokens:
    """The number of tokens in the sums of each split."""

    fit: int
    holdout: int


@dataclass(frozen=True)
class BadValue:
    """Where the first value was found that is not finite."""

    model: str
    kind: Group
    layer_index: int


@dataclass(frozen=True)
class Batches:
    """How many batches were added, and how many of them were set aside."""

    seen: int
    quarantined: int
    first: BadValue | None

    def and_one(self, bad: BadValue | None) -> Batches:
        """The counts after one more batch, which is set aside where it holds a bad value."""
        return Batches(self.seen + 1, self.quarantined + (bad is not None), self.first or bad)

    def check(self, *, at_end: bool = False) -> None:
        """Refuse a run in which too many batches hold values that are not finite.

        Raises:
            StoreError: more than 1 % of the batches were set aside; the message names the layer of the first bad value.
        """
        enough = at_end or self.seen >= QUARANTINE_FROM
        if self.first is not None and enough and self.quarantined > QUARANTINE_SHARE * self.seen:
            raise StoreError(
                f"{self.quarantined} of {self.seen} batches hold values that are not finite, first the {self.first.kind} of "
                f"{self.first.model} layer {self.first.layer_index}; at most 1 % may; run the models in bfloat16 or float32"
            )


@dataclass(frozen=True)
class Live:
    """The live generation of each split, None where the split has no tokens; and whether the shift is written."""

    shift: bool
    fit: Generation | None
    holdout: Generation | None

    def of(self, split: Part) -> Generation | None:
        """The live generation of a split."""
        return self.fit if split == "fit" else self.holdout


@dataclass(frozen=True)
class Record:
    """One commit: everything that is needed to read a store, and to continue its capture."""

    format_version: int
    kvfit_version: str
    commit: int
    finished: bool
    cursor: Any
    source: ModelSpec
    target: ModelSpec
    inputs: Inputs
    stats_dtype: StatsDtype
    lexical_lags: tuple[int, ...]
    recipe: dict[str, Any]
    buffer_tokens: int | None
    tokens: Tokens
    batches: Batches
    live: Live
    digests: dict[str, tuple[str, ...]]

    @property
    def layout(self) -> Layout:
        """The arrays of the store."""
        return Layout(self.source, self.target, self.inputs, self.stats_dtype, self.lexical_lags)

    def live_arrays(self) -> dict[str, BlockArray | VectorArray]:
        """The live arrays by path."""
        layout = self.layout
        arrays: dict[str, BlockArray | VectorArray] = {a.name: a for a in layout.shifts} if self.live.shift else {}
        for split in SPLITS:
            generation = self.live.of(split)
            if generation is not None:
                arrays.update({array_path(split, generation, a): a for a in layout.arrays})
        return arrays


def read_record(root: Path) -> Record:
    """The commit record of a store.

    Raises:
        StoreError: there is no store, its record is damaged, or its format is newer.
    """
    path = root / RECORD_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        what = "has no commit.json, so it is not a kvfit store" if root.is_dir() else "does not exist"
        raise StoreError(f"{root} {what}; make one with: kvfit capture SOURCE TARGET --out {root}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    try:
        outer = parse_json(raw)
        version = outer["record"]["format_version"]
    except (ValueError, TypeError, KeyError):
        raise StoreError(f"{path} is damaged: it is not a commit record; capture again or restore the file") from None
    if type(version) is int and version > FORMAT_VERSION:
        writer = outer["record"].get("kvfit_version")
        raise StoreError(f"{path} has format version {version}; this kvfit reads {FORMAT_VERSION}; update to kvfit {writer}")
    if set(outer) != {"digest", "record"} or outer["digest"] != _record_digest(outer["record"]):
        raise StoreError(f"{path} is damaged: its content does not match its digest; capture again or restore the file")
    try:
        return _checked(_parse(outer["record"]))
    except SpecError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def write_record(root: Path, record: Record) -> None:
    """Commit: from then on the store is as the record says, even after a power failure.

    Raises:
        StoreError: the cursor or the recipe is not strict JSON.
        OSError: the disk failed; the earlier record is still valid.
    """
    value = to_json(record)
    try:
        data = dump_json({"digest": _record_digest(value), "record": value}, sort_keys=False)
    except ValueError as error:
        raise StoreError(f"{root}: the commit record holds {error}, needed strict JSON") from None
    partial = root / f"{RECORD_NAME}.partial"
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, root / RECORD_NAME)
    sync_folder(root)


def write_chunk(path: Path, numbers: Array) -> str:
    """Write one chunk file, wait until it is on the disk, and return its digest."""
    data = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def read_chunk(root: Path, array_path: str, array: BlockArray | VectorArray, number: int, digest: str) -> Array:
    """Read one chunk and check it against its digest; the result is read-only and has the array's chunk shape.

    Raises:
        StoreError: the chunk is missing, has another length, or was altered; the message names the array and the chunk.
    """
    chunk = array.chunks[number]
    place = f"{root}: chunk {chunk.key} of {array_path}"
    try:
        data = (root / array_path / chunk.key).read_bytes()
    except FileNotFoundError:
        raise StoreError(f"{place} is missing; the store is incomplete, restore it or capture again") from None
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error}") from error
    if len(data) != array.chunk_bytes:
        raise StoreError(f"{place} has {len(data)} bytes, needs {array.chunk_bytes}; restore it or capture again")
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(f"{place} does not match its digest; the file was altered, restore it or capture again")
    return np.frombuffer(data, dtype=np.dtype(array.dtype).newbyteorder("<")).reshape(array.chunk_shape)


def first_difference(stored: Any, given: Any, field: str = "recipe") -> tuple[str, Any, Any] | None:
    """The first difference of two JSON values: dotted path, stored value, given value. A missing value is ``<nothing>``."""
    if isinstance(stored, Mapping) and isinstance(given, Mapping):
        for key in [*stored, *(key for key in given if key not in stored)]:
            difference = first_difference(stored.get(key, "<nothing>"), given.get(key, "<nothing>"), f"{field}.{key}")
            if difference is not None:
                return difference
        return None
    if isinstance(stored, list) and isinstance(given, list) and len(stored) == len(given):
        for index, (one, other) in enumerate(zip(stored, given, strict=True)):
            difference = first_difference(one, other, f"{field}[{index}]")
            if difference is not None:
                return difference
        return None
    return None if stored == given and type(stored) is type(given) else (field, stored, given)


def require_same(path: str | Path, stored: Any, given: Any, field: str) -> None:
    """Refuse to continue a store that was made with another recipe or layout.

    Raises:
        StoreError: names the field that differs, with both values.
    """
    difference = first_difference(stored, given, field)
    if difference is not None:
        name, old, new = difference
        raise StoreError(f"{path} was made with {name} = {old!r}, this run has {new!r}; use the same value or another --out")


def as_json(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe as a store would return it.

    Raises:
        StoreError: the recipe holds a value that strict JSON cannot, such as text that is not UTF-8.
    """
    try:
        value: dict[str, Any] = parse_json(dump_json(recipe, sort_keys=False))
    except ValueError as error:
        raise StoreError(f"recipe: found {error}, needed values of strict JSON, and names in UTF-8") from None
    return value


def _record_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parse(value: Any) -> Record:
    if isinstance(value, Mapping) and value.get("format_version") == 1 and "lexical_lags" not in value:
        value = {**value, "format_version": FORMAT_VERSION, "lexical_lags": []}  # version 1 had no lexical inputs
    return from_json(Record, value)


def _checked(record: Record) -> Record:
    """Refuse a record whose fields do not fit each other."""
    if list(record.lexical_lags) != sorted({lag for lag in record.lexical_lags if lag >= 0}):
        raise SpecError("lexical_lags", str(list(record.lexical_lags)), "lags of 0 and more, ascending")
    for split in SPLITS:
        n_tokens = getattr(record.tokens, split)
        if n_tokens < 0 or (n_tokens > 0) != (record.live.of(split) is not None) or (n_tokens > 0) > record.live.shift:
            raise SpecError(
                f"live.{split}", f"{record.live.of(split)} with {n_tokens} tokens", "a generation if and only if tokens"
            )
    arrays = record.live_arrays()
    odd = sorted(set(record.digests) ^ set(arrays))
    if odd:
        raise SpecError(f"digests.{odd[0]}", "an unknown or missing array", "exactly the live ones")
    for path, array in arrays.items():
        if len(record.digests[path]) != len(array.chunks):
            raise SpecError(f"digests.{path}", f"{len(record.digests[path])} digests", f"{len(array.chunks)}")
    return record
