"""Measure recall: how each arm answers questions about the context, by kind of question and depth of the fact.

An answer is scored by one pass over the question and the answer together. It is exact if greedy decoding would give its tokens
and then end the word. Its log-probability distinguishes maps long before exact answers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfit.errors import TextError
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.arms import Arm, Prefixes
from kvfit.fit.evaluate.intervals import cluster_interval
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.questions import QUESTIONS_PER_CONTEXT, Probe, probes
from kvfit.fit.progress import track
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device

AFTER_NATIVE: tuple[Arm, ...] = ("source", "transfer", "handoff", "auto", "mean", "shuffled")
DEPTHS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Answered:
    """The score of one arm's answer to one question.

    Attributes:
        exact: whether greedy decoding gives the answer's tokens, and then does not continue the last word.
        log_probability: mean over the answer's tokens, in nats.
    """

    exact: bool
    log_probability: float


Answers = dict[Arm, list[Answered]]


def ask(
    pair: arms.Pair,
    tokenizer: Any,
    asked: Sequence[Probe],
    chosen: Sequence[Arm],
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> Answers:
    """Score each arm's answer to each question.

    Args:
        pair: models and mapper.
        tokenizer: the tokenizer of both models.
        asked: the questions; those about one context are adjacent, and all contexts have one length.
        chosen: arms to ask. `shuffled` answers from another question's context, which gives the rate of guessing.
        batch_size: questions per forward pass, and contexts per prefill.
        progress: whether to show progress.

    Raises:
        TextError: `shuffled` is asked with a single context.
    """
    answers: Answers = {arm: [] for arm in chosen}
    contexts = [list(group) for _, group in groupby(asked, key=lambda probe: probe.document)]
    if "shuffled" in chosen and len(contexts) < 2:
        raise TextError("probes: found one context, needed two or more so that one can be the wrong document")
    # The contexts of a batch are as many as their questions fit into one pass, but at least two for `shuffled`.
    size = max(2, batch_size // max(map(len, contexts)))
    batches = list(_batches(contexts, size))
    for batch in track(batches, f"evaluate, recall of {asked[0].kind}", "batches", show=progress):
        prefixes = Prefixes(pair, torch.tensor([group[0].context_ids for group in batch]))
        if len(batch) < 2:
            prefixes.other = Prefixes(pair, torch.tensor([contexts[0][0].context_ids]))
        questions = [probe for group in batch for probe in group]
        rows = torch.tensor([number for number, group in enumerate(batch) for _ in group])
        for arm in chosen:
            answers[arm] += _answered(prefixes, arm, questions, rows, tokenizer)
    return answers


def _batches(contexts: Sequence[list[Probe]], size: int) -> Iterator[Sequence[list[Probe]]]:
    return (contexts[begin : begin + size] for begin in range(0, len(contexts), size))


@torch.no_grad()
def _answered(prefixes: Prefixes, arm: Arm, questions: Sequence[Probe], rows: Tensor, tokenizer: Any) -> list[Answered]:
    """One arm's answers to the questions about a batch of contexts; `rows` has the context of each question."""
    model = arms.model_of(prefixes.pair, arm)
    out: dict[int, Answered] = {}
    # The guide reads the question without padding to choose tokens, so only questions of one length are run together.
    guided = arm == "auto" or (arm == "handoff" and bool(prefixes.pair.recompute))
    for group in _of_one_length(questions) if guided else [list(range(len(questions)))]:
        chosen = [questions[number] for number in group]
        next_ids = torch.tensor([probe.question_ids for probe in chosen]) if guided else None
        cache = prefixes.cache(arm, next_ids=next_ids, rows=rows[group])
        out |= zip(group, scored(model, cache, chosen, tokenizer, arms.shared_vocabulary(prefixes.pair)), strict=True)
    return [out[number] for number in range(len(questions))]


def _of_one_length(questions: Sequence[Probe]) -> list[list[int]]:
    lengths: dict[int, list[int]] = {}
    for number, probe in enumerate(questions):
        lengths.setdefault(len(probe.question_ids), []).append(number)
    return list(lengths.values())


@torch.no_grad()
def scored(model: Any, cache: Any, questions: Sequence[Probe], tokenizer: Any, vocabulary: int) -> list[Answered]:
    """Score one answer per sequence of a cache, in one pass.

    Args:
        model: the model that answers.
        cache: a cache of B sequences; changed in place.
        questions: B questions.
        tokenizer: the model's tokenizer.
        vocabulary: number of logits to use.
    """
    # Padding is on the right, where no token of the question or the answer attends to it.
    ids = [torch.tensor(probe.question_ids + probe.answer_ids) for probe in questions]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    logits = caches.forward(model, padded.to(input_device(model)), cache)
    out = []
    for row, probe in enumerate(questions):
        first, n_answer = len(probe.question_ids) - 1, len(probe.answer_ids)
        scores = F.log_softmax(logits[row, first : first + n_answer + 1, :vocabulary].float(), -1)
        likeliest = scores.argmax(-1).tolist()
        wanted = torch.tensor(probe.answer_ids, device=scores.device)
        exact = tuple(likeliest[:-1]) == probe.answer_ids and not _goes_on(tokenizer, probe.answer_ids, likeliest[-1])
        out.append(Answered(exact, float(scores[:-1].gather(-1, wanted[:, None]).double().mean())))
    return out


def _goes_on(tokenizer: Any, answer_ids: tuple[int, ...], next_id: int) -> bool:
    """Whether the next token continues the answer's last word or number."""
    answer, longer = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (list(answer_ids), [*answer_ids, next_id]))
    return bool(longer[len(answer) : len(answer) + 1].isalnum())


def recall_table(
    pair: arms.Pair,
    tokenizer: Any,
    fillers: Sequence[str],
    options: Options,
    *,
    context_tokens: int,
    progress: bool = True,
    kept: Callable[[str, Callable[[], Any]], Any] | None = None,
) -> dict[str, Any]:
    """Recall per kind of question and arm, with intervals over contexts.

    The target with its own cache is asked first. If it cannot answer a kind of question, that kind says nothing about the map:
    it does not judge, and the other arms are not asked.

    Args:
        pair: models and mapper.
        tokenizer: the tokenizer of both models.
        fillers: natural texts to hide facts in.
        options: `probes`, `probe_kinds`, `batch_size`, `resamples`, `seed`, and the threshold `recall_native` are used.
        context_tokens: length of the contexts.
        progress: whether to show progress.
        kept: ``kept(name, measure)`` returns what an interrupted evaluation has saved under a name, or measures and saves it.

    Returns:
        By kind: ``count``, ``judges``, ``reason`` (why it does not judge), and ``arms``: {arm: {recall, interval,
        log_probability, by_depth, log_probability_by_depth}}.
    """
    table: dict[str, Any] = {}
    for kind in options.probe_kinds:
        try:
            asked = probes(
                tokenizer,
                fillers,
                kind=kind,
                count=options.probes,
                context_tokens=context_tokens,
                per_context=QUESTIONS_PER_CONTEXT,
                seed=options.seed,
            )
        except TextError as error:
            table[kind] = {"count": 0, "judges": False, "reason": str(error).removeprefix("probes: "), "arms": {}}
            continue

        def measure(asked: list[Probe] = asked) -> dict[str, Any]:
            answers = ask(pair, tokenizer, asked, ("native",), batch_size=options.batch_size, progress=progress)
            native = sum(answered.exact for answered in answers["native"]) / len(asked)
            judges = native >= options.thresholds.recall_native
            if judges:
                answers |= ask(pair, tokenizer, asked, AFTER_NATIVE, batch_size=options.batch_size, progress=progress)
            return {
                "count": len(asked),
                "judges": judges,
                "reason": None if judges else f"the target with its own cache answers {native:.0%}",
                "arms": {arm: _row(found, asked, options.resamples, options.seed) for arm, found in answers.items()},
            }

        table[kind] = measure() if kept is None else kept(f"recall of {kind}, {context_tokens} tokens", measure)
    return table


def _row(answers: Sequence[Answered], asked: Sequence[Probe], resamples: int, seed: int) -> dict[str, Any]:
    thirds: list[list[Answered]] = [[], [], []]
    for answered, probe in zip(answers, asked, strict=True):
        thirds[min(2, int(3 * probe.depth))].append(answered)
    exact = [float(answered.exact) for answered in answers]
    low, high = cluster_interval(exact, [probe.document for probe in asked], resamples=resamples, seed=seed)
    return {
        "recall": sum(exact) / len(exact),
        "interval": [low, high],
        "log_probability": _mean([answered.log_probability for answered in answers]),
        "by_depth": {name: _mean([float(a.exact) for a in part]) for name, part in zip(DEPTHS, thirds, strict=True)},
        "log_probability_by_depth": {
            name: _mean([a.log_probability for a in part]) for name, part in zip(DEPTHS, thirds, strict=True)
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def pooled(table: dict[str, Any]) -> dict[Arm, dict[str, Any]]:
    """Exact recall and log-probability per arm over all kinds that judge; if none does, over the first kind that was asked.

    Returns:
        {arm: {recall, log_probability}}; empty if nothing was asked.
    """
    judging = [entry for entry in table.values() if entry["judges"]]
    used = judging or [entry for entry in table.values() if entry["count"]][:1]
    out: dict[Arm, dict[str, Any]] = {}
    for arm in ("native", *AFTER_NATIVE):
        rows = [(entry["count"], entry["arms"][arm]) for entry in used if arm in entry["arms"]]
        total = sum(count for count, _ in rows)
        if rows:
            out[arm] = {name: sum(count * row[name] for count, row in rows) / total for name in ("recall", "log_probability")}
    return out
