"""Generated calibration text: documents full of facts, followed by questions about them.

A map is good at the kind of text that it was fitted on, and ordinary text rarely repeats what it said before. This text does so
all the time: it has tables, settings, logs, tool output, orders, dialogues and plain sentences about made-up names, then
questions that only these can answer. Fitting on some of it keeps the directions of keys and values that such answers need.

Source: the effect is measured in `docs/concepts/calibration.md`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from kvfit.fit.capture.facts_shapes import ASKS, PROSE, SHAPES, Fact, Table, key
from kvfit.fit.capture.facts_words import (
    FILLERS,
    LANGUAGE_WEIGHTS,
    LANGUAGES,
    PEOPLE,
    SURNAMES,
    SYLLABLES,
    TITLES,
    WORDS,
)  # fmt: skip

MIN_CHARS = 6000
# The share of tables that are written as sentences, and the share of questions about an earlier table of the document.
PROSE_SHARE, LOOK_BACK = 0.45, 0.25
TABLES_BEFORE_QUESTIONS, CHAIN_SHARE = (1, 1, 2, 3), 0.15
CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"

Relation = tuple[str, str, str, str]


def facts(seed: int, count: int, *, min_chars: int = MIN_CHARS) -> Iterator[str]:
    """Generate `count` different documents. Document i depends on `seed` and i alone.

    Args:
        seed: seed of the random choices.
        count: number of documents.
        min_chars: minimal length of each; the default is enough for 1,024 tokens of common vocabularies.
    """
    for number in range(count):
        # Random uses the string itself as its seed; `hash` of a string would differ between processes.
        yield _document(random.Random(f"facts/{seed}/{number}"), min_chars)


def _document(rng: random.Random, min_chars: int) -> str:
    parts: list[str] = []
    told: list[Fact] = []
    while sum(map(len, parts)) < min_chars:
        fresh: list[Fact] = []
        # If questions followed every single table, a map would learn to look back a few lines only.
        for _ in range(rng.choice(TABLES_BEFORE_QUESTIONS)):
            if rng.random() < 0.3:
                parts.append(_filler(rng))
            text, facts = _chain(rng) if rng.random() < CHAIN_SHARE else _written(rng)
            parts.append(text)
            fresh += facts
            if rng.random() < 0.4:
                parts.append(_filler(rng))
        parts.append(_questions(rng, fresh, told))
        told += fresh
    return "\n\n".join(parts)


def _written(rng: random.Random) -> tuple[str, list[Fact]]:
    """A table in a random shape, and its facts."""
    table = _table(rng)
    return rng.choice(PROSE if rng.random() < PROSE_SHARE else SHAPES)(table, rng), table.facts


def _questions(rng: random.Random, fresh: list[Fact], told: list[Fact]) -> str:
    asked = rng.sample(fresh, min(len(fresh), rng.randint(3, 7 + len(fresh) // 4)))
    if told:
        asked = [rng.choice(told) if rng.random() < LOOK_BACK else fact for fact in asked]
    ways = rng.sample(ASKS, rng.choice((1, 1, 1, 2)))
    between = rng.choice(("\n", "\n", "\n\n"))
    return between.join(_ask(rng.choice(ways), fact) for fact in asked)


def _ask(way: str, fact: Fact) -> str:
    return way.format(
        name=fact.name,
        label=fact.label,
        slug=key(fact.label),
        value=fact.value,
        statement=fact.statement,
        question=fact.question,
    )


def _table(rng: random.Random) -> Table:
    """Two to nine names with one to three facts each, about sixteen facts at most."""
    language = rng.choices(LANGUAGES, LANGUAGE_WEIGHTS)[0]
    relations = rng.sample(language, rng.choice((1, 1, 2, 3)))
    naming = rng.choice(_NAMINGS)
    names: dict[str, None] = {}
    n_names = rng.randint(3, 9 if len(relations) == 1 else 6)
    while len(names) < n_names:
        names.setdefault(naming(rng))
    rows = tuple(tuple(_fact(rng, name, relation) for relation in relations) for name in names)
    return Table(rng.choice(TITLES), tuple(label for label, *_ in relations), rows)


def _fact(rng: random.Random, name: str, relation: Relation) -> Fact:
    label, statement, question, kind = relation
    value = _value(rng, kind)
    return Fact(name, label, value, statement.format(n=name, v=value), question.format(n=name))


def _chain(rng: random.Random) -> tuple[str, list[Fact]]:
    """Text on who belongs to which group and what holds for each group. Its facts combine both, and so do their statements."""
    groups = [_word(rng) for _ in range(rng.randint(2, 4))]
    group_kind, member_kind = rng.sample(("team", "district", "crew", "branch", "order", "fund", "class", "depot"), 2)
    held = {group: _value(rng, rng.choice(("digits3", "person", "city", "date", "code"))) for group in groups}
    members = {name: rng.choice(groups) for name in dict.fromkeys(_naming(rng) for _ in range(4))}
    prop = rng.choice(("contact", "reference", "leader", "deadline", "base", "quota"))
    lines = [f"{name} ({member_kind}) is part of {group_kind} {group}." for name, group in members.items()]
    lines += [f"For {group_kind} {group} the {prop} is {value}." for group, value in held.items()]
    rng.shuffle(lines)
    facts = [
        Fact(
            name=name,
            label=prop,
            value=held[group],
            statement=f"{name} is part of {group_kind} {group}, so the {prop} is {held[group]}.",
            question=f"Which {prop} holds for {name}?",
        )
        for name, group in members.items()
    ]
    return rng.choice((" ", "\n")).join(lines), facts


def _filler(rng: random.Random) -> str:
    return " ".join(rng.sample(FILLERS, rng.randint(1, 4)))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def _person(rng: random.Random) -> str:
    return rng.choice((rng.choice(PEOPLE), f"{rng.choice(PEOPLE)} {rng.choice(SURNAMES)}"))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice(CODE_LETTERS) for _ in range(rng.randint(1, 3)))
    return letters + rng.choice(("-", "", "/")) + _digits(rng, rng.randint(2, 4))


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


# Ways to make the names of one table.
_NAMINGS: tuple[Callable[[random.Random], str], ...] = (
    _person,
    lambda rng: rng.choice(PEOPLE),
    _word,
    lambda rng: _word(rng).lower(),
    _code,
    lambda rng: f"{rng.choice(WORDS['service'])}-{rng.randrange(1, 40)}",
    lambda rng: f"{_word(rng).lower()}.{rng.choice(WORDS['service'])}",
    lambda rng: f"{_word(rng)} {rng.choice(('Street', 'Lake', 'Hall', 'Point', 'Hill', 'Station', 'Clinic'))}",
    lambda rng: f"{rng.choice(WORDS['plant'])}-{rng.choice(WORDS['animal'])}",
)


def _naming(rng: random.Random) -> str:
    return rng.choice(_NAMINGS)(rng)


def _value(rng: random.Random, kind: str) -> str:
    """A random value of a kind that the relations use."""
    if kind.startswith("digits"):
        return _digits(rng, int(kind.removeprefix("digits")))
    return rng.choice(WORDS[kind]) if kind in WORDS else _VALUES[kind](rng)


_VALUES: dict[str, Callable[[random.Random], str]] = {
    "person": _person,
    "name": _word,
    "code": _code,
    "hex": lambda rng: f"{rng.getrandbits(28):07x}",
    "money": lambda rng: f"{rng.randrange(2, 900)}.{rng.randrange(100):02}",
    "decimal": lambda rng: f"{rng.randrange(1, 90)}.{rng.randrange(10)}",
    "time": lambda rng: f"{rng.randrange(24):02}:{rng.randrange(60):02}",
    "date": lambda rng: f"{rng.randrange(1950, 2030)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
    "year": lambda rng: str(rng.randrange(1700, 2030)),
    "version": lambda rng: ".".join(str(rng.randrange(20)) for _ in range(3)),
    "ip": lambda rng: ".".join(str(rng.randrange(1, 255)) for _ in range(4)),
    "email": lambda rng: f"{rng.choice(PEOPLE).lower()}@{_word(rng).lower()}.{rng.choice(('org', 'net', 'io', 'example'))}",
}
