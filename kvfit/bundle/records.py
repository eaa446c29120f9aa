"""Strict records: the only decoder of the JSON and TOML that kvfit reads, and the only encoder of the JSON that it writes.

A record must mean the same to every program. Python's own parser takes the last of two equal keys, accepts ``NaN`` and half
surrogate pairs, and makes gigabytes of objects from a few megabytes of ``[]``. All of that is refused here, with a `ValueError`
of one line to which the caller adds the file's name.

`from_json` reads a record as a frozen dataclass and refuses unknown keys, missing keys and values of another type. So a value
that was read means the same as the one that was written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import stat
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvfit.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

MAX_DEPTH = 64
MAX_VALUES = 400_000  # at most about 200 MB of Python objects
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON.

    Raises:
        ValueError: the text is not strict JSON; the message is one line.
    """
    text = _decode(data)
    # Counting before parsing gives an upper bound, because these characters may also be in strings.
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check(value)
    return value


def parse_toml(data: bytes | str) -> dict[str, Any]:
    """Parse TOML with the values that JSON has: no dates, and numbers as in `parse_json`.

    Raises:
        ValueError: the text is something else; the message is one line.
    """
    try:
        value = tomllib.loads(_decode(data))
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise ValueError(one_line(error)) from None
    _check(value)
    return value


def dump_json(value: Any, *, sort_keys: bool = True) -> bytes:
    """Write strict JSON with an indent of two spaces, in UTF-8, with a final line feed. Equal values give equal bytes.

    Raises:
        ValueError: JSON has no such value, or `parse_json` would refuse it.
    """
    _check(value)
    return (json.dumps(value, indent=2, sort_keys=sort_keys, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")


def to_json(value: Any) -> Any:
    """Convert a value to JSON values: dataclasses become objects, tuples become arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {item.name: (getattr(value, item.name), item) for item in dataclasses.fields(value)}
        return {name: to_json(found) for name, (found, item) in items.items() if found is not None or not item.metadata}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    return value


def from_json(cls: type[T], value: Any, field: str = "") -> T:
    """Convert JSON values from `to_json` back to a value of type `cls`. A field of type `Any` accepts any JSON value.

    Raises:
        SpecError: a key is unknown or missing, or a value has another type; names the field.
    """
    return typing.cast(T, _read(cls, value, field))


def read_capped(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; links are followed.

    Raises:
        ValueError: it is a pipe, a device or a folder, or larger.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # checked first, because opening a pipe waits for its writer
        raise ValueError("found something other than a regular file, needed a regular file")
    with open(path, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"found more than {limit} bytes, needed at most that")
    return data


def value_at(record: Any, *keys: str) -> Any:
    """A value inside nested records without a schema, such as a recipe; None if one of the keys is missing."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def one_line(text: object, limit: int = 300) -> str:
    """A message of another library as one line of bounded length."""
    return " ".join(str(text).split())[:limit]


def _decode(data: bytes | str) -> str:
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    if text.startswith("\ufeff"):
        raise ValueError("a byte-order mark")
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _constant(text: str) -> Any:
    raise ValueError(f"the literal {text}")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, beyond a double")
    return value


def _integer(text: str) -> int:
    if len(text) > 20:  # the longest 64-bit integer; parsing more digits takes quadratic time
        raise ValueError(f"an integer of {len(text)} digits, beyond 64 bits")
    return int(text)


def _check(value: Any) -> None:
    """Refuse values that JSON does not have, level by level instead of by recursion."""
    level: Iterable[Any] = (value,)
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        raise ValueError(f"the key {key!r}, needed text")
                    _check_text(key)
                children.extend(item.values())
            elif isinstance(item, (list, tuple)):
                children.extend(item)
            else:
                _check_scalar(item)
        if not children:
            return
        level = children
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"the number {value}, needed a finite one")
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError("an integer beyond 64 bits")
    elif value is not None:
        raise ValueError(f"a {type(value).__name__}, needed text, a number, true, false or null")


def _check_text(text: str) -> None:
    if _SURROGATE.search(text):
        raise ValueError(f"half of a surrogate pair in {text[:40]!r}")


def _read(wanted: Any, value: Any, field: str) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        return _read_dataclass(wanted, value, field)
    if origin is tuple:
        if not isinstance(value, list):
            raise SpecError(field, type(value).__name__, "an array")
        return tuple(_read(arguments[0], item, f"{field}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise SpecError(field, type(value).__name__, "an object")
        return {name: _read(arguments[1], item, f"{field}.{name}") for name, item in value.items()}
    if wanted is Any:
        return value
    if origin is Literal:
        if not any(value == option and type(value) is type(option) for option in arguments):
            raise SpecError(field, repr(value)[:80], "one of " + ", ".join(map(str, arguments)))
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _read(next(option for option in arguments if option is not type(None)), value, field)
    if wanted is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            raise SpecError(field, "an integer beyond a double", "a finite number") from None
        if not math.isfinite(number):
            raise SpecError(field, str(value), "a finite number")
        return number
    if type(value) is not wanted:
        raise SpecError(field, type(value).__name__, wanted.__name__)
    if wanted is str and not value.isprintable():
        # Control characters could get to terminals and cards, and half a surrogate pair cannot be written as UTF-8.
        raise SpecError(field, ascii(value)[:80], "printable characters")
    return value


def _read_dataclass(cls: type, value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(field, type(value).__name__, f"an object ({cls.__name__})")
    hints = typing.get_type_hints(cls)
    needed = {item.name for item in dataclasses.fields(cls) if not item.metadata}
    unknown, missing = sorted(set(value) - set(hints)), sorted(needed - set(value))
    if unknown:
        name = unknown[0] if unknown[0].isprintable() else ascii(unknown[0])
        raise SpecError(f"{field}.{name[:80]}".lstrip("."), "an unknown key", f"only {', '.join(hints)}")
    if missing:
        raise SpecError(f"{field}.{missing[0]}".lstrip("."), "nothing", "a value")
    read = {name: _read(hints[name], value[name], f"{field}.{name}".lstrip(".")) for name in hints if name in value}
    try:
        return cls(**read)
    except SpecError as error:
        prefix = f"{field}." if field and not error.field.startswith(field) else ""
        raise SpecError(prefix + error.field, error.found, error.needed) from None
