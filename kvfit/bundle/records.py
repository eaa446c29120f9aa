"""Strict records: the only decoder of the JSON and TOML that kvfit reads, and the only encoder of the JSON that it writes.

A record here means one thing to every program. Python's own reader takes the last of two equal keys, reads ``NaN``, makes
gigabytes of a few megabytes of ``[]``, and accepts text that cannot be printed; all of that is refused. Every refusal is a
`ValueError` of one line, which the caller turns into the error of its room by adding the file's name.
"""

from __future__ import annotations

import json
import math
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_DEPTH = 64
MAX_VALUES = 400_000  # some 200 MB of Python objects at worst
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON.

    Raises:
        ValueError: anything but strict JSON; the message is one line.
    """
    text = _decode(data)
    # Counted before parsing: an upper bound, because the marks may also stand inside of strings.
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check(value)
    return value


def parse_toml(data: bytes | str) -> dict[str, Any]:
    """Parse TOML whose values JSON has too: no dates, and numbers as in `parse_json`.

    Raises:
        ValueError: anything else; the message is one line.
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
    """Write strict JSON: two-space indent, UTF-8, a final line feed; equal values give equal bytes.

    Raises:
        ValueError: a value that `parse_json` would refuse or that JSON does not have.
    """
    _check(value)
    return (json.dumps(value, indent=2, sort_keys=sort_keys, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")


def read_capped(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes, or of one that a link leads to.

    Raises:
        ValueError: a pipe, a device or a folder, or more bytes.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # asked first, because opening a pipe waits for its writer
        raise ValueError("found no regular file, needed one")
    with open(path, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"found more than {limit} bytes, needed at most that")
    return data


def value_at(record: Any, *keys: str) -> Any:
    """A value inside nested records that no schema describes, such as a recipe; None where one of the keys is absent."""
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
    if len(text) > 20:  # the longest of 64 bits; more digits also take quadratic time
        raise ValueError(f"an integer of {len(text)} digits, beyond 64 bits")
    return int(text)


def _check(value: Any) -> None:
    """Refuse, level by level and so without recursion, what one of the two formats has and the other has not."""
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
