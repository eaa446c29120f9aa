"""JSON that means one thing: no duplicate keys, no NaN, no number beyond a double, bounded depth.

Python's reader takes the last of two equal keys and reads ``NaN``; another reader may not, so two programs could
disagree about what a digest-checked file says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64


def loads(data: bytes | str) -> Any:
    """Parse strict JSON.

    Raises:
        ValueError: anything else than strict JSON; the message is one line.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    if text.startswith("\ufeff"):
        raise ValueError("a byte-order mark")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check_depth(value)
    return value


def dumps(value: Any, *, sort_keys: bool = True) -> bytes:
    """Write strict JSON: two-space indent, UTF-8, a final line feed; equal values give equal bytes.

    Raises:
        ValueError: a number that is not finite, keys that are not strings, a type that JSON has not.
    """
    _check_keys(value)
    try:
        text = json.dumps(value, indent=2, sort_keys=sort_keys, allow_nan=False, ensure_ascii=False)
        return (text + "\n").encode("utf-8")
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


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


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value


def _check_keys(value: Any) -> None:
    _check_depth(value)
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r}, which is no string")
        pending.extend(_children(item))


def at(value: Any, *keys: str) -> Any:
    """A value inside nested records that no schema holds, such as a recipe; None where one of the keys is absent."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
