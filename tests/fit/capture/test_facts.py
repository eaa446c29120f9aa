"""The facts text is the same on every machine, varied, asks back, and shares nothing with the questions of an evaluation."""

import itertools
import os
import random
import re
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from kvfit.demo import MODELS
from kvfit.fit.capture.facts import MIN_CHARS, facts
from kvfit.fit.capture.facts_shapes import ASKS, SHAPES, Fact, Shape, Table, key
from kvfit.fit.capture.facts_words import LANGUAGES
from kvfit.fit.evaluate import questions

COUNT = 60


@pytest.fixture(scope="module")
def made() -> list[str]:
    return list(facts(0, COUNT))


def words(text: str) -> list[str]:
    """Lower-case words, each digit as 0, so that two drawings of one template are alike."""
    return re.findall(r"\w+", re.sub(r"\d", "0", text.lower()))


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    found = words(text)
    return set(zip(*(found[start:] for start in range(length)), strict=False))


def test_a_document_depends_on_seed_and_number_alone(made: list[str]) -> None:
    assert list(facts(0, 3)) == made[:3]
    assert next(facts(1, 1)) not in made


def test_another_process_makes_the_same_text(made: list[str]) -> None:
    program = "from kvfit.fit.capture.facts import facts; import sys; sys.stdout.buffer.write(next(facts(0, 1)).encode())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert done.stdout.decode() == made[0]


def test_documents_differ_and_are_long_enough(made: list[str]) -> None:
    assert len(set(made)) == COUNT
    assert min(map(len, made)) >= MIN_CHARS
    assert min(len(text) for text in facts(0, 3, min_chars=12_000)) >= 12_000


def test_no_two_documents_share_much(made: list[str]) -> None:
    # Sixteen words hold at least one drawn name or value in every shape except runs of filler sentences.
    pairs = itertools.combinations([runs(text, 16) for text in made[:20]], 2)
    assert max(len(one & other) / len(one) for one, other in pairs) < 0.2


def test_every_shape_and_way_of_asking_is_drawn_often(made: list[str]) -> None:
    text = "\n".join(made)
    marks = (
        "| name |",
        "<tool_call>",
        "INSERT INTO",
        "export ",
        "$ show",
        "static const",
        "registry.add",
        "Q: ",
        "assert get(",
    )
    assert [mark for mark in marks if text.count(mark) < 4] == []
    assert len(set(words(text))) > 3000


def table() -> Table:
    rows = [
        tuple(
            Fact(name, label, f"v{i}{j}", f"The {label} of {name} is v{i}{j}.", f"What is the {label} of {name}?")
            for j, label in enumerate(("size", "unit cost"))
        )
        for i, name in enumerate(("Zaro", "Kelu"))
    ]
    return Table("Made up", ("size", "unit cost"), tuple(rows))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_shape_says_every_fact_of_its_table(shape: Shape) -> None:
    text = shape(table(), random.Random(0))
    said = text.lower()
    assert all(fact.value in text for fact in table().facts)
    assert all(name in said or key(name) in said for name in ("zaro", "kelu"))


@pytest.mark.parametrize("way", ASKS)
def test_a_way_of_asking_names_the_fact_and_gives_its_value(way: str) -> None:
    parts = {
        "name": "Zaro",
        "label": "size",
        "slug": "size",
        "value": "v77",
        "statement": "Zaro has v77.",
        "question": "Of Zaro?",
    }
    text = way.format(**parts)
    assert "v77" in text
    assert "Zaro" in text


def test_most_questions_are_answered_by_what_stands_before_them(made: list[str]) -> None:
    answers = [match for text in made for match in re.finditer(r"^(?:A|Answer): (.+)$", text, re.MULTILINE)]
    assert len(answers) > 50
    assert all(answer.group(1) in answer.string[: answer.start()] for answer in answers)


def test_every_relation_states_its_value_and_asks_for_its_name() -> None:
    for _, statement, question, _ in itertools.chain(*LANGUAGES):
        assert "{n}" in statement
        assert "{v}" in statement
        assert "{n}" in question
        assert "{v}" not in question


def test_no_word_of_the_recall_questions_is_used(made: list[str]) -> None:
    used = {word for text in made for word in words(text)}
    asked = {word.lower() for name in ("NAMES", "COLOURS", "WORDS", "CARVINGS", "DISHES") for word in getattr(questions, name)}
    asked |= {(head + tail).lower() for head in questions.HEADS for tail in questions.TAILS}
    assert used & asked == set()


def test_no_phrase_of_the_recall_questions_is_used(made: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo:source"])
    filler = "lorem ipsum " * 600
    used = set().union(*(runs(text, 4) for text in made))
    for kind in questions.PROBE_KINDS:
        for probe in questions.probes(tokenizer, [filler], kind=kind, count=4, context_tokens=300):
            text = tokenizer.decode(probe.context_ids) + tokenizer.decode(probe.question_ids)
            phrases = {run for run in runs(text, 4) if not {"lorem", "ipsum"} & set(run)}
            assert phrases
            assert used & phrases == set()
