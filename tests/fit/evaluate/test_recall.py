"""Recall questions: what is hidden stands where it should, only there, and answers are scored right."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fitted import fit_tiny, paired
from transformers import DynamicCache

from kvfit.errors import MismatchError, TextError
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate.arms import Prefixes
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.questions import PROBE_KINDS, Probe, ProbeKind, probes
from kvfit.fit.evaluate.recall import ask, pooled, recall_table, scored
from kvfit.fit.evaluate.verdict import Thresholds
from kvfit.model.cache import cache_argument

Loader = Callable[[Path | str], Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer("demo:source")


@pytest.fixture(scope="module")
def fillers() -> list[str]:
    return [text for text in documents(TextOptions("demo:heldout")) if "[Codes" not in text][:20]


def told(kind: ProbeKind, context: str, question: str, answer: str) -> list[str]:
    """The texts of the context that a question needs, found by reading it as a person would: one pattern a kind."""
    asked = question.split("\n")[-1] if "\n" in question else question.rpartition(". ")[2]
    if kind == "names":
        name = asked.removeprefix("[Recall ")
        patterns = [rf"[ ;]{name} {answer}[;\]]"]
    elif kind == "list":
        patterns = [rf"\n{re.escape(asked)} {answer}\n"]
    elif kind == "sentence":
        patterns = [rf" {asked.strip()} {answer}\."]
    elif kind == "item":
        patterns = [rf" {asked.strip()} {answer} by a master of [A-Z][a-z]+\."]
    elif kind == "reworded":
        guest = question.rpartition("What did ")[2].split()[0]
        patterns = [rf" When the waiter came, {guest} ordered the {answer}\."]
    else:
        name, colour, held = asked.removesuffix(" ->"), answer.split()[0], answer.split()[-1]
        patterns = [rf" {name} owns the {colour} box\.", rf" The {colour} box holds the number {held}\."]
    found = [re.findall(pattern, context) for pattern in patterns]
    assert all(len(texts) == 1 for texts in found), (kind, asked, found)
    return [texts[0] for texts in found]


@pytest.mark.parametrize("kind", PROBE_KINDS)
def test_questions_hold_their_answer_once_where_they_say(kind: ProbeKind, tokenizer: Any, fillers: list[str]) -> None:
    asked = probes(tokenizer, fillers, kind=kind, count=20, context_tokens=240, n_entries=5, per_context=2, seed=4)
    assert len(asked) == 20
    assert len({probe.context_ids for probe in asked}) == 10
    for probe in asked:
        context, question = (tokenizer.decode(ids) for ids in (probe.context_ids, probe.question_ids))
        assert len(probe.context_ids) == 240
        assert tokenizer.decode(probe.answer_ids).strip() == probe.answer
        begins = min(context.index(text) for text in told(kind, context, question, probe.answer))
        at = len(tokenizer(context[:begins], add_special_tokens=False)["input_ids"])
        # Text cut in the middle of a word may be tokenized anew; lines of a list differ in length.
        assert abs(probe.depth * 240 - at) <= (8 if kind in ("names", "list") else 2)
        assert probe.depth < 0.95


@pytest.mark.parametrize("kind", PROBE_KINDS)
def test_a_worked_example_comes_first_and_is_another_fact(kind: ProbeKind, tokenizer: Any, fillers: list[str]) -> None:
    for probe in probes(tokenizer, fillers, kind=kind, count=12, context_tokens=240, n_entries=5, per_context=3):
        context, question = (tokenizer.decode(ids) for ids in (probe.context_ids, probe.question_ids))
        example = {
            "names": r"^\n(\[Recall \w+) (\w+)\]\n",
            "list": r"^\n([\w-]+:) (\w+)\n",
            "sentence": r"^( The secret word of \w+ is) (\w+)\. The",
            "item": r"^( The \w+ was carved from) (\w+)\. The",
            "reworded": r"^(\nQuestion: What did \w+ eat\?\nAnswer:) (\w+)\n",
            "two-hop": r"^\n(\w+ ->) (\w+ box -> \d+)\n",
        }[kind]
        first = re.match(example, question)
        assert first is not None, question
        told(kind, context, first.group(1), first.group(2))  # it is true of this context
        assert probe.answer not in question


def test_questions_are_spread_over_the_thirds_of_the_context(tokenizer: Any, fillers: list[str]) -> None:
    for kind in PROBE_KINDS:
        asked = probes(tokenizer, fillers, kind=kind, count=24, context_tokens=300, n_entries=6, per_context=3, seed=1)
        thirds = [sum(int(3 * probe.depth) == third for probe in asked) for third in range(3)]
        # Of two facts the earlier one counts, and a list begins before its end: both are seldom in the last third.
        assert min(thirds[:2] if kind == "two-hop" else thirds) >= 3, (kind, thirds)


def test_probes_depend_on_their_seed_alone(tokenizer: Any, fillers: list[str]) -> None:
    def made(seed: int) -> list[Probe]:
        return probes(tokenizer, fillers, count=6, context_tokens=150, seed=seed)

    assert made(4) == made(4)
    assert made(4) != made(5)


def test_depths_are_spread_over_the_context(tokenizer: Any, fillers: list[str]) -> None:
    for kind in ("names", "sentence"):
        depths = sorted(
            p.depth
            for p in probes(tokenizer, fillers, kind=kind, count=60, context_tokens=300, n_entries=4, per_context=2)  # type: ignore[arg-type]
        )
        for low in (0.0, 0.3, 0.6):
            assert any(low <= depth < low + 0.3 for depth in depths)


def test_the_beginning_token_comes_first_where_the_tokenizer_has_one(tokenizer: Any, fillers: list[str]) -> None:
    class WithBeginning:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [7, *ids] if add_special_tokens else ids}

    for probe in probes(WithBeginning(), fillers, count=3, context_tokens=150):
        assert probe.context_ids[0] == 7
        assert len(probe.context_ids) == 150


def test_an_answer_is_exact_when_it_comes_first_and_whole(tokenizer: Any) -> None:
    """A model whose likeliest token is always the next of one text: what counts is where that text has the answer."""

    class Says(torch.nn.Module):
        def __init__(self, text: str, n_question: int) -> None:
            super().__init__()
            self.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
            self.said = tokenizer(text, add_special_tokens=False)["input_ids"]
            self.n_question = n_question

        def get_input_embeddings(self) -> Any:
            return self

        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
            del past_key_values, use_cache
            logits = torch.zeros(*input_ids.shape, 2048)
            for place, token in enumerate(self.said[: input_ids.shape[1] - self.n_question + 1]):
                logits[:, self.n_question - 1 + place, token] = 5.0
            return SimpleNamespace(logits=logits)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    question, answer = "[Recall Anna", " 42"
    probe = Probe("names", 0, 0.1, (1,), ids(question), "42", ids(answer))

    def answered(text: str) -> Any:
        return scored(Says(text, len(probe.question_ids)), DynamicCache(), [probe], tokenizer, 2048)[0]

    assert all(answered(text).exact for text in (" 42]", " 42; Anna", " 42.", " 42 7"))
    assert not any(answered(text).exact for text in (" 24]", " 421", " 42a", " x42"))
    certain = torch.log_softmax(torch.tensor([5.0] + [0.0] * 2047), 0)
    assert answered(" 42]").log_probability == pytest.approx(float(certain[0]))
    assert answered(" 42x").log_probability == pytest.approx(float(certain[0]))
    assert answered("").log_probability == pytest.approx(-math.log(2048), abs=0.01)


def test_what_has_no_room_or_text_is_refused(tokenizer: Any, fillers: list[str]) -> None:
    with pytest.raises(TextError, match="no room for 2 facts in 20 tokens"):
        probes(tokenizer, fillers, count=2, context_tokens=20)
    with pytest.raises(TextError, match="found no text"):
        probes(tokenizer, [], count=2, context_tokens=200)
    with pytest.raises(TextError, match="to hide facts in, needed"):
        probes(tokenizer, ["Too short."], count=2, context_tokens=200)
    with pytest.raises(MismatchError, match="count 0"):
        probes(tokenizer, fillers, count=0, context_tokens=200)


@pytest.mark.parametrize("recompute", [0.0, 0.3])
def test_arms_answer_as_a_loop_written_out(
    recompute: float, tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path, fillers: list[str]
) -> None:
    """Random models answer nothing on purpose: what native says first is made the answer, one token at a time."""
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target, recompute=recompute)
    tokenizer = target.tokenizer
    planned = probes(tokenizer, fillers, count=5, context_tokens=60, n_entries=2, per_context=2)

    def steps(arm: Any, probe: Probe, wrong: Probe, forced: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """The likeliest token before each of `forced` and after them, and the log-probability of each."""
        question = torch.tensor([probe.question_ids])
        other = Prefixes(pair, torch.tensor([wrong.context_ids]))
        cache = Prefixes(pair, torch.tensor([probe.context_ids]), other=other).cache(arm, next_ids=question)
        model = pair.source if arm == "source" else pair.target
        said, found, given = [], [], question
        for token in (*forced, None):
            with torch.no_grad():
                logits = model(given, **{cache_argument(model): cache}).logits[0, -1].double().log_softmax(-1)
            said.append(int(logits.argmax()))
            if token is not None:
                found.append(float(logits[token]))
                given = torch.tensor([[token]])
        return said, found

    rigged = []
    for probe in planned:
        first = steps("native", probe, probe, ())[0][0]
        second = steps("native", probe, probe, (first,))[0][1]
        rigged.append(Probe(**{**probe.__dict__, "answer": "rigged", "answer_ids": (first, second)}))
    # Contexts of two, two and one question, two contexts at a time: the other of the batch is wrong, for the last the first.
    others = [rigged[2], rigged[2], rigged[0], rigged[0], rigged[0]]
    found = ask(
        pair, tokenizer, rigged, ("native", "source", "transfer", "handoff", "auto", "shuffled"), batch_size=4, progress=False
    )
    for arm, answers in found.items():
        for answered, probe, wrong in zip(answers, rigged, others, strict=True):
            said, log_probabilities = steps(arm, probe, wrong, probe.answer_ids)
            text, longer = tokenizer.decode(probe.answer_ids), tokenizer.decode([*probe.answer_ids, said[2]])
            whole = not longer[len(text) :][:1].isalnum()
            assert answered.exact == (tuple(said[:2]) == probe.answer_ids and whole), arm
            assert answered.log_probability == pytest.approx(sum(log_probabilities) / 2, abs=1e-3), arm
    assert len({tuple(a.exact for a in answers) for answers in found.values()}) > 1


def test_only_kinds_that_the_target_answers_judge(
    tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path, fillers: list[str]
) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target)
    options = Options(probes=4, probe_kinds=("names", "two-hop"))
    table = recall_table(pair, target.tokenizer, fillers, options, context_tokens=45, progress=False)
    assert not table["names"]["judges"]
    assert table["names"]["reason"] == "the target with its own cache answers 0%"
    assert set(table["names"]["arms"]) == {"native"}
    assert table["two-hop"]["count"] == 0
    assert "no room" in table["two-hop"]["reason"]
    assert set(pooled(table)) == {"native"}
    assert pooled(table)["native"]["recall"] == 0.0
    # From 0 on every target is able, and all arms are asked.
    able = Options(probes=4, probe_kinds=("names",), thresholds=Thresholds(recall_native=0.0))
    table = recall_table(pair, target.tokenizer, fillers, able, context_tokens=45, progress=False)
    assert table["names"]["judges"]
    assert set(table["names"]["arms"]) == {"native", "source", "transfer", "handoff", "auto", "mean", "shuffled"}
    row = table["names"]["arms"]["shuffled"]
    assert row["recall"] == 0.0
    assert row["log_probability"] < -3
    thirds = [value for value in row["log_probability_by_depth"].values() if value is not None]
    assert min(thirds) <= row["log_probability"] <= max(thirds)


def test_pooling_weighs_kinds_by_their_questions() -> None:
    def entry(judges: bool, count: int, recall: float) -> dict[str, Any]:
        row = {"recall": recall, "log_probability": -recall}
        return {"judges": judges, "count": count, "reason": None, "arms": {"native": row}}

    table = {"names": entry(True, 30, 1.0), "list": entry(True, 10, 0.5), "sentence": entry(False, 40, 0.1)}
    assert pooled(table)["native"] == {"recall": pytest.approx(0.875), "log_probability": pytest.approx(-0.875)}
    assert pooled({"sentence": entry(False, 40, 0.1)})["native"]["recall"] == pytest.approx(0.1)
    assert pooled({}) == {}
