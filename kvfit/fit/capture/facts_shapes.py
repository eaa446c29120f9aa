"""Shapes of the generated text: ways to write down a table of facts, and to ask for one of them.

A shape is a function of a `Table`; a way of asking is a format string for one `Fact`. New ones go into the tuples at the end.
Shapes only format given facts; their random parts are details such as the times of log lines.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvfit.fit.capture.facts_words import FILLERS


@dataclass(frozen=True)
class Fact:
    """One value of a table.

    Attributes:
        name: the subject.
        label: the property of the subject.
        value: the value of the property, which an answer has to contain.
        statement: the fact as a sentence.
        question: a question with this answer.
    """

    name: str
    label: str
    value: str
    statement: str
    question: str


@dataclass(frozen=True)
class Table:
    """Facts about several names, with the same labels for each.

    Attributes:
        title: title of the table.
        labels: the properties of each name.
        rows: per name, one fact per label.
    """

    title: str
    labels: tuple[str, ...]
    rows: tuple[tuple[Fact, ...], ...]

    @property
    def facts(self) -> list[Fact]:
        """All facts, row by row."""
        return [fact for row in self.rows for fact in row]


def key(text: str) -> str:
    """A text as an identifier for a program or a settings file."""
    return "_".join("".join(c if c.isalnum() else " " for c in text).split()).lower()


Shape = Callable[[Table, random.Random], str]


def _csv(table: Table, _: random.Random) -> str:
    lines = [",".join(["name", *table.labels]), *(",".join([row[0].name, *(f.value for f in row)]) for row in table.rows)]
    return "\n".join(lines)


def _markdown(table: Table, _: random.Random) -> str:
    head = f"### {table.title}\n\n| name | " + " | ".join(table.labels) + " |\n|" + "---|" * (len(table.labels) + 1)
    return "\n".join([head, *(f"| {row[0].name} | " + " | ".join(f.value for f in row) + " |" for row in table.rows)])


def _columns(table: Table, _: random.Random) -> str:
    cells = [["NAME", *(label.upper() for label in table.labels)], *([r[0].name, *(f.value for f in r)] for r in table.rows)]
    widths = [max(len(line[i]) for line in cells) + 2 for i in range(len(cells[0]))]
    return "\n".join("".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _sections(table: Table, _: random.Random) -> str:
    return "\n\n".join(f"[{key(row[0].name)}]\n" + "\n".join(f"{key(f.label)} = {f.value}" for f in row) for row in table.rows)


def _yaml(table: Table, _: random.Random) -> str:
    return f"{key(table.title)}:\n" + "\n".join(
        f"  - name: {row[0].name}\n" + "\n".join(f"    {key(f.label)}: {f.value}" for f in row) for row in table.rows
    )


def _environment(table: Table, _: random.Random) -> str:
    return "\n".join(f"export {key(f.name).upper()}_{key(f.label).upper()}={f.value}" for f in table.facts)


def _json(table: Table, _: random.Random) -> str:
    found = {row[0].name: {key(f.label): f.value for f in row} for row in table.rows}
    return json.dumps(found, indent=2, ensure_ascii=False)


def _json_lines(table: Table, _: random.Random) -> str:
    return "\n".join(
        json.dumps({"id": row[0].name, **{key(f.label): f.value for f in row}}, ensure_ascii=False) for row in table.rows
    )


def _tool_output(table: Table, rng: random.Random) -> str:
    name = f"get_{key(table.title)}"
    return "\n".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': {'id': row[0].name}}, ensure_ascii=False)}</tool_call>\n"
        f"<tool_result status=200 ms={rng.randrange(5, 900)}>"
        f"{json.dumps({key(f.label): f.value for f in row}, ensure_ascii=False)}</tool_result>"
        for row in table.rows
    )


def _xml(table: Table, _: random.Random) -> str:
    return "\n".join(
        f'<entry id="{row[0].name}">' + "".join(f"<{key(f.label)}>{f.value}</{key(f.label)}>" for f in row) + "</entry>"
        for row in table.rows
    )


def _python(table: Table, _: random.Random) -> str:
    return f"{key(table.title).upper()} = {{\n" + "".join(
        f"    {row[0].name!r}: {{" + ", ".join(f"{key(f.label)!r}: {f.value!r}" for f in row) + "},\n" for row in table.rows
    ) + "}"  # fmt: skip


def _constants(table: Table, _: random.Random) -> str:
    return "\n".join(f'static const char *{key(f.name)}_{key(f.label)} = "{f.value}";' for f in table.facts)


def _calls(table: Table, _: random.Random) -> str:
    return "\n".join(
        f'registry.add("{row[0].name}", ' + ", ".join(f'{key(f.label)}="{f.value}"' for f in row) + ")" for row in table.rows
    )


def _sql(table: Table, _: random.Random) -> str:
    head = f"INSERT INTO {key(table.title)} (name, " + ", ".join(map(key, table.labels)) + ") VALUES\n"
    return head + ",\n".join(f"  ('{row[0].name}', " + ", ".join(f"'{f.value}'" for f in row) + ")" for row in table.rows) + ";"


def _log(table: Table, rng: random.Random) -> str:
    minute = rng.randrange(600, 1200)
    lines = []
    for fact in table.facts:
        minute += rng.randrange(1, 4)
        level = rng.choice(("INFO", "DEBUG", "WARN", "NOTICE"))
        lines.append(f"{minute // 60:02}:{minute % 60:02} {level} {fact.name}: {key(fact.label)} set to {fact.value}")
    return "\n".join(lines)


def _bullets(table: Table, _: random.Random) -> str:
    return f"{table.title}:\n" + "\n".join(
        f"* {row[0].name} ({'; '.join(f'{f.label} {f.value}' for f in row)})" for row in table.rows
    )


def _orders(table: Table, rng: random.Random) -> str:
    return "\n".join(
        f"No. {rng.randrange(100, 999)} / {row[0].name} / " + " / ".join(f"{f.label} {f.value}" for f in row)
        for row in table.rows
    )


def _session(table: Table, _: random.Random) -> str:
    return "\n".join(
        f"$ show {key(row[0].name)}\n" + "\n".join(f"{f.label:>14} : {f.value}" for f in row) for row in table.rows
    )


def _arrows(table: Table, _: random.Random) -> str:
    return "\n".join(f"{f.name} -> {f.value}   # {f.label}" for f in table.facts)


def _sentences(table: Table, rng: random.Random) -> str:
    return " ".join(f.statement for f in rng.sample(table.facts, len(table.facts)))


def _paragraphs(table: Table, rng: random.Random) -> str:
    openings = ("", "As far as we know: ", "To begin with, this is certain. ", "From the notes: ")
    return "\n\n".join(rng.choice(openings) + " ".join(f.statement for f in row) for row in table.rows)


def _scattered(table: Table, rng: random.Random) -> str:
    """Each fact alone among unrelated sentences."""
    return " ".join(
        " ".join([*rng.sample(FILLERS, rng.randint(1, 3)), fact.statement])
        for fact in rng.sample(table.facts, len(table.facts))
    )


def _numbered(table: Table, rng: random.Random) -> str:
    facts = rng.sample(table.facts, len(table.facts))
    return f"{table.title}\n" + "\n".join(f"{number}. {fact.statement}" for number, fact in enumerate(facts, 1))


def _dialogue(table: Table, rng: random.Random) -> str:
    asks, tells = rng.sample(("Caller", "Clerk", "Host", "Guest", "Operator", "Visitor"), 2)
    return "\n".join(
        f"{asks}: {fact.question}\n{tells}: {fact.statement}" for fact in rng.sample(table.facts, len(table.facts))
    )


def _messages(table: Table, rng: random.Random) -> str:
    openings = ("fyi: ", "update - ", "hi all, ", "please note: ", "new info: ", "")
    return "\n".join(f"<{rng.choice(('ops', 'desk', 'lab', 'crew'))}> {rng.choice(openings)}{f.statement}" for f in table.facts)


SHAPES: tuple[Shape, ...] = (
    _csv, _markdown, _columns, _sections, _yaml, _environment, _json, _json_lines, _tool_output, _xml, _python, _constants,
    _calls, _sql, _log, _bullets, _orders, _session, _arrows, _sentences, _paragraphs, _scattered, _numbered, _dialogue,
    _messages,
)  # fmt: skip
# Maps fitted on sentences generalise to more kinds of text than those fitted on tables.
PROSE: tuple[Shape, ...] = (_sentences, _paragraphs, _scattered, _numbered, _dialogue, _messages)

# Each way of asking is a format string for the parts of a fact. A run of questions uses one or two ways.
ASKS: tuple[str, ...] = (
    "Q: {question}\nA: {value}",
    "Question: {question}\nAnswer: {value}",
    "User: {question}\nAssistant: {statement}",
    "### Instruction\n{question}\n### Response\n{statement}",
    "Human: {question} Answer with the value only.\nAI: {value}",
    "{question} {value}",
    "> {question}\n{value}",
    "**{question}** {value}",
    "{question}\n- {statement}",
    "As said before: {statement}",
    "Check: {statement}",
    "{statement} (see above)",
    "{name}, {label}: {value}",
    "{name}.{slug} == {value}",
    "{label} of {name} = {value}",
    '>>> lookup("{name}", "{slug}")\n\'{value}\'',
    'assert get("{name}").{slug} == "{value}"',
    "SELECT {slug} FROM t WHERE name = '{name}';\n{value}",
    '{{"question": "{question}", "answer": "{value}"}}',
    '{{"name": "{name}", "{slug}": "{value}"}}',
    "$ get {name} {slug}\n{value}",
    "(The {label} listed for {name} was {value}.)",
    "Reminder about {name}: the {label} is {value}.",
    "Which entry has {label} {value}? {name}",
    "{value} is the {label} of {name}.",
)
