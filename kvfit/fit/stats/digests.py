"""Which documents a map was fitted on: a short digest of each, kept from the capture to the evaluation.

A digest is the first 6 bytes of the SHA-256 of a document's whole text in base64, so 8 characters, with every run of white
space as one blank. So documents that only begin alike, with one system prompt, differ, and one document that is stored in two
ways does not. A given document has the digest of one of a million others with odds of 1 in 3 * 10^8, and is then left out; any
two of a million collide with odds of 1 in 560. All digests are kept in one string, one after the other.
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
FIELD = "documents"  # of a bundle's recipe


def digest(text: str) -> str:
    """The digest of a document."""
    plain = " ".join(text.split())
    return base64.b64encode(hashlib.sha256(plain.encode("utf-8", "surrogatepass")).digest()[:6]).decode("ascii")


def parse(joined: str) -> list[str]:
    """The digests of a string of them."""
    return [joined[start : start + LENGTH] for start in range(0, len(joined), LENGTH)]


@dataclass
class Documents:
    """The documents that a capture has taken so far, part of its cursor.

    Attributes:
        captured: per text, digests of those that are in this process's statistics, in the order of the text.
        passed: likewise, of those in the statistics of other processes, which this one has to know to see a repetition.
    """

    captured: list[str]
    passed: list[str]

    @classmethod
    def of(cls, n_texts: int) -> Documents:
        """None yet."""
        return cls([""] * n_texts, [""] * n_texts)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], n_texts: int) -> Documents:
        """Take back what `to_json` gave."""
        parts = []
        for name in ("captured", "passed"):
            joined, counts = stored[name], stored.get(f"{name}_by_text", [len(stored[name]) // LENGTH])
            ends = [LENGTH * end for end in itertools.accumulate([0, *counts])]
            parts.append([joined[start:end] for start, end in itertools.pairwise(ends)])
        return cls(*parts) if all(len(part) == n_texts for part in parts) else cls.of(n_texts)

    def copy(self) -> Documents:
        """The same, to be added to."""
        return Documents(list(self.captured), list(self.passed))

    def add(self, text: int, found: Iterable[str], *, own: bool) -> None:
        """Take the documents of a sequence from text number `text`."""
        (self.captured if own else self.passed)[text] += "".join(found)

    def all(self) -> list[str]:
        """All digests."""
        return parse("".join(self.captured + self.passed))

    def to_json(self) -> dict[str, Any]:
        """One string of all digests, text by text, and how many are each text's."""
        found: dict[str, Any] = {}
        for name in ("captured", "passed"):
            parts = getattr(self, name)
            found |= {name: "".join(parts), f"{name}_by_text": [len(part) // LENGTH for part in parts]}
        return found


def of_cursor(cursor: Any) -> list[str] | None:
    """The digests of the documents in a store, from its cursor; None where it keeps none."""
    return _checked(cursor.get("captured")) if isinstance(cursor, Mapping) else None


def of_recipe(recipe: Mapping[str, Any]) -> frozenset[str] | None:
    """The digests of the documents that a bundle was fitted on; None where its recipe does not say."""
    return frozenset(_checked(recipe.get(FIELD)) or ()) or None


def _checked(value: Any) -> list[str] | None:
    if not isinstance(value, str) or not re.fullmatch(rf"(?:[A-Za-z0-9+/]{{{LENGTH}}})*", value):
        return None
    return parse(value)
