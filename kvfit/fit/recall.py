"""Recall probes: questions whose answer only the context holds.

Likelihood can improve while nothing of the context is transferred; a fact that was drawn at random and stands nowhere but in
the context cannot be guessed. Each probe hides a list of names and codes in natural text and asks for one of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NAMES = (
    "Adam Agnes Alan Alice Amos Anna Arthur Basil Boris Bruno Clara Conrad Daisy Daniel David Dora Edgar Edith "
    "Emma Ernest Esther Felix Flora Frank George Grace Hannah Harold Helen Hugo Irene Isaac Jacob James Joan Julia "
    "Karl Laura Leo Lewis Lucy Marcus Martha Mary Max Naomi Nora Oliver Oscar Paul Peter Rachel Rose Ruth Samuel "
    "Sarah Simon Sophia Stella Susan Thomas Victor Walter William"
).split()


def codes(rng: random.Random, count: int, digits: int = 2) -> list[tuple[str, str]]:
    """`count` different names, each with a random code."""
    return [(name, "".join(str(rng.randrange(10)) for _ in range(digits))) for name in rng.sample(NAMES, count)]


def list_text(pairs: Sequence[tuple[str, str]]) -> str:
    """The list as it stands in the context."""
    return "[Codes: " + "; ".join(f"{name} {code}" for name, code in pairs) + "]"


def question_text(name: str, code: str = "") -> str:
    """A question with its answer, or the open question where `code` is empty."""
    return f"[Recall {name} {code}]" if code else f"[Recall {name}"


@dataclass(frozen=True)
class Probe:
    """One question.

    Attributes:
        context_ids: what the moved cache covers.
        question_ids: what the target runs itself.
        answer_ids: what it has to say next, exactly.
    """

    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def probes(tokenizer: Any, fillers: Sequence[str], *, count: int, context_tokens: int, n_entries: int = 8, seed: int = 0) -> list[Probe]:
    """`count` probes, each in a context of its own.

    Args:
        tokenizer: of both models.
        fillers: natural text to hide the lists in; used in turn.
        count: how many.
        context_tokens: length of each context.
        n_entries: names in each list.
        seed: of names, codes, and where the list stands.
    """
    rng = random.Random(seed)
    out = []
    for index in range(count):
        pairs = codes(rng, n_entries)
        filler = _ids(tokenizer, fillers[index % len(fillers)])
        listed = _ids(tokenizer, "\n" + list_text(pairs) + "\n")
        room = context_tokens - len(listed)
        depth = rng.uniform(0.05, 0.6)
        before = int(room * depth)
        context = [*filler[:before], *listed, *filler[before:room]]
        name, code = rng.choice(pairs)
        out.append(Probe(tuple(context), tuple(_ids(tokenizer, "\n" + question_text(name))), tuple(_ids(tokenizer, f" {code}"))))
    return out


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
