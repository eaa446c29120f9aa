"""Short digests of the documents that a map was fitted on, kept from the capture to the evaluation.

A digest is the first 6 bytes of the SHA-256 of a document's whole text, in base64, so 8 characters. Every run of white space
counts as one blank. Documents that only begin alike, say with one system prompt, therefore have different digests, and one
document that is stored with different white space has one digest. The odds that a given document has the digest of one of a
million others, and is then left out, are 1 in 3 * 10^8; the odds that any two of a million collide are 1 in 560. All digests
are kept in one string, one after the other.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LENGTH = 8  # characters
FIELD = "documents"  # the field of a bundle's recipe


def digest(text: str) -> str:
    """The digest of a document."""
    plain = " ".join(text.split())
    return base64.b64encode(hashlib.sha256(plain.encode("utf-8", "surrogatepass")).digest()[:6]).decode("ascii")


def parse(joined: str) -> list[str]:
    """Split a string of digests."""
    return [joined[start : start + LENGTH] for start in range(0, len(joined), LENGTH)]


@dataclass
class Documents:
    """The documents that a capture has taken so far, part of its cursor.

    Attributes:
        captured: per text, the digests of the documents in this process's statistics, in the order of the text.
        passed: per text, the digests of the documents in other processes' statistics, which this process needs to notice a
            repetition.
    """

    captured: list[str]
    passed: list[str]

    @classmethod
    def of(cls, n_texts: int) -> Documents:
        """No documents yet."""
        return cls([""] * n_texts, [""] * n_texts)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], n_texts: int) -> Documents:
        """Read what `to_json` returned."""
        parts = []
        for name in ("captured", "passed"):
            joined, counts = stored[name], stored.get(f"{name}_by_text", [len(stored[name]) // LENGTH])
            ends = [LENGTH * end for end in itertools.accumulate([0, *counts])]
            parts.append([joined[start:end] for start, end in itertools.pairwise(ends)])
        return cls(*parts) if all(len(part) == n_texts for part in parts) else cls.of(n_texts)

    def copy(self) -> Documents:
        """A copy to add to."""
        return Documents(list(self.captured), list(self.passed))

    def add(self, text: int, found: Iterable[str], *, own: bool) -> None:
        """Add the documents of a sequence from text number `text`."""
        (self.captured if own else self.passed)[text] += "".join(found)

    def all(self) -> list[str]:
        """All digests."""
        return parse("".join(self.captured + self.passed))

    def to_json(self) -> dict[str, Any]:
        """One string of all digests, text by text, and how many belong to each text."""
        stored: dict[str, Any] = {}
        for name in ("captured", "passed"):
            parts = getattr(self, name)
            stored |= {name: "".join(parts), f"{name}_by_text": [len(part) // LENGTH for part in parts]}
        return stored


def of_cursor(cursor: Any) -> list[str] | None:
    """The digests of the documents in a store, from its cursor; None where the cursor has none."""
    return _checked(cursor.get("captured")) if isinstance(cursor, Mapping) else None


def of_recipe(recipe: Mapping[str, Any]) -> frozenset[str] | None:
    """The digests of the documents that a bundle was fitted on; None where its recipe does not say."""
    return frozenset(_checked(recipe.get(FIELD)) or ()) or None


def _checked(value: Any) -> list[str] | None:
    if not isinstance(value, str) or not re.fullmatch(rf"(?:[A-Za-z0-9+/]{{{LENGTH}}})*", value):
        return None
    return parse(value)
