"""Recall probes: what is hidden stands where it should, only there, and answers are counted right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import fit_tiny, paired

from kvfit.errors import MismatchError, TextError
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate.arms import prefix_cache, source_pairs
from kvfit.fit.evaluate.ask import ask, pooled, recall_table
from kvfit.fit.evaluate.recall import PROBE_KINDS, Probe, ProbeKind, probes

Loader = Callable[[Path | str], Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer("demo:source")


@pytest.fixture(scope="module")
def fillers() -> list[str]:
    return [text for text in documents(TextOptions("demo:heldout")) if "[Codes" not in text][:20]


@pytest.mark.parametrize("kind", PROBE_KINDS)
def test_probes_hold_their_answer_once_where_they_say(kind: ProbeKind, tokenizer: Any, fillers: list[str]) -> None:
    asked = probes(tokenizer, fillers, kind=kind, count=20, context_tokens=240, n_entries=5, per_context=2, seed=4)
    assert len(asked) == 20
    assert len({probe.context_ids for probe in asked}) == 10
    for probe in asked:
        context, question = (tokenizer.decode(ids) for ids in (probe.context_ids, probe.question_ids))
        assert len(probe.context_ids) == 240
        assert tokenizer.decode(probe.answer_ids).strip() == probe.answer
        asked_for = question.replace("[Recall ", "").strip()
        if kind == "two-hop":
            name = question.split()[3]
            colour = context.split(f" {name} owns the ")[1].split()[0]
            fact, first = f" The {colour} box holds the number {probe.answer}.", f" {name} owns the {colour} box."
            begins = min(context.index(fact), context.index(first))
        elif kind == "names":
            fact, begins = f"{asked_for} {probe.answer}", context.index("\n[Codes")
        elif kind == "list":
            fact = f"\n{asked_for} {probe.answer}\n"
            begins = context.index(fact)
        else:
            fact = f" {asked_for} {probe.answer}."
            begins = context.index(fact)
        assert context.count(fact) == 1
        at = len(tokenizer(context[:begins], add_special_tokens=False)["input_ids"])
        if kind == "list":  # the list's depth is where its first line begins
            assert probe.depth * 240 <= at + 2
        else:
            assert abs(probe.depth * 240 - at) <= 2  # text cut in the middle of a word may be tokenized anew
        assert probe.depth < 0.9


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


def test_an_answer_counts_when_it_comes_first_and_whole() -> None:
    probe = Probe("names", 0, 0.1, (1,), (2,), "42", (3, 4))
    assert all(map(probe.is_answered, (" 42", "42]", "\n 42; Anna", "42.")))
    assert not any(map(probe.is_answered, ("", "4", " 421", "x42", "42a", " 24")))


def test_what_has_no_room_or_text_is_refused(tokenizer: Any, fillers: list[str]) -> None:
    with pytest.raises(TextError, match="no room for 2 facts in 20 tokens"):
        probes(tokenizer, fillers, count=2, context_tokens=20)
    with pytest.raises(TextError, match="found no text"):
        probes(tokenizer, [], count=2, context_tokens=200)
    with pytest.raises(TextError, match="to hide facts in, needed"):
        probes(tokenizer, ["Too short."], count=2, context_tokens=200)
    with pytest.raises(MismatchError, match="count 0"):
        probes(tokenizer, fillers, count=0, context_tokens=200)


def test_arms_answer_as_a_loop_written_out(
    tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path, fillers: list[str]
) -> None:
    """Random models answer nothing on purpose: the first thing that native says is made the answer."""
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target)
    tokenizer = target.tokenizer
    planned = probes(tokenizer, fillers, count=4, context_tokens=60, n_entries=2, per_context=2)

    def says(arm: Any, probe: Probe, wrong: Probe) -> str:
        context = torch.tensor([probe.context_ids])
        cache = prefix_cache(
            pair, arm, context, source_pairs(pair, context), source_pairs(pair, torch.tensor([wrong.context_ids]))
        )
        ids = torch.tensor([probe.question_ids])
        said = []
        model = pair.source if arm == "source" else pair.target
        from kvfit.model.cache import cache_argument

        for _ in range(4):
            with torch.no_grad():
                ids = model(ids, **{cache_argument(model): cache}).logits[:, -1].argmax(-1, keepdim=True)
            said.append(int(ids))
        return str(tokenizer.decode(said))

    rigged = []
    for probe in planned:
        said = says("native", probe, probe)
        rigged.append(Probe(**{**probe.__dict__, "answer": said.strip(), "answer_ids": (1, 2)}))
    others = [rigged[2], rigged[2], rigged[0], rigged[0]]
    found = ask(pair, tokenizer, rigged, ("native", "source", "transfer", "handoff", "shuffled"), progress=False)
    assert found["native"] == [True] * 4
    for arm, right in found.items():
        assert right == [p.is_answered(says(arm, p, wrong)) for p, wrong in zip(rigged, others, strict=True)], arm
    assert not all(found["source"])


def test_recall_counts_only_what_both_models_can_do(
    tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path, fillers: list[str]
) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target)
    table = recall_table(
        pair, target.tokenizer, fillers, ("names", "two-hop"), count=2, context_tokens=45, able_from=0.5, progress=False
    )
    assert not table["names"]["able"]
    assert table["names"]["reason"] == "target alone recalls 0% and source alone recalls 0%"
    assert set(table["names"]["arms"]) == {"native", "source"}
    assert table["two-hop"]["count"] == 0
    assert "no room" in table["two-hop"]["reason"]
    assert pooled(table) == {"native": {"recall": 0.0}, "source": {"recall": 0.0}}
    # From 0 on every model is able, and all arms are asked.
    table = recall_table(pair, target.tokenizer, fillers, ("names",), count=4, context_tokens=45, able_from=0.0, progress=False)
    assert table["names"]["able"]
    assert set(table["names"]["arms"]) == {"native", "source", "transfer", "handoff", "mean", "shuffled"}
    assert table["names"]["arms"]["shuffled"]["recall"] == 0.0


def test_pooling_weighs_kinds_by_their_questions() -> None:
    def entry(able: bool, count: int, recall: float) -> dict[str, Any]:
        return {"able": able, "count": count, "reason": None, "arms": {"native": {"recall": recall}}}

    table = {"names": entry(True, 30, 1.0), "list": entry(True, 10, 0.5), "sentence": entry(False, 40, 0.1)}
    assert pooled(table)["native"]["recall"] == pytest.approx(0.875)
    assert pooled({"sentence": entry(False, 40, 0.1)})["native"]["recall"] == pytest.approx(0.1)
    assert pooled({}) == {}
