"""Asking recall probes: which arms answer exactly, by kind, and where the facts stood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from tqdm import tqdm

from kvfit.errors import TextError
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.arms import Arm
from kvfit.fit.evaluate.intervals import cluster_interval
from kvfit.fit.evaluate.recall import Probe, ProbeKind, probes

ABLE: tuple[Arm, ...] = ("native", "source")
MOVED: tuple[Arm, ...] = ("transfer", "handoff", "mean", "shuffled")
DEPTHS = ("first third", "middle third", "last third")
# More than the answer's own tokens, because the answer may come in other tokens than when it stands alone.
EXTRA_TOKENS = 2

Answers = dict[Arm, list[bool]]


def ask(pair: arms.Pair, tokenizer: Any, asked: Sequence[Probe], chosen: Sequence[Arm], *, progress: bool = True) -> Answers:
    """Whether each arm answers each probe exactly, by greedy decoding.

    Args:
        pair: models and mapper.
        tokenizer: of both models.
        asked: the probes; those of one document next to each other.
        chosen: arms to ask. `shuffled` answers from the context before, so at chance.
        progress: show a bar.

    Raises:
        TextError: `shuffled` with a single context.
    """
    right: Answers = {arm: [] for arm in chosen}
    contexts = list(_contexts(asked))
    if "shuffled" in chosen and len(contexts) < 2:
        raise TextError("probes: found one context, needed two or more so that one can be the wrong document")
    sources = {}
    mapped = any(arm not in ABLE for arm in chosen)
    for index, questions in enumerate(tqdm(contexts, desc=f"recall, {asked[0].kind}", disable=None if progress else True)):
        context = torch.tensor([questions[0].context_ids])
        if mapped:
            # The context before serves as the wrong one; all have the same length.
            for number in (index, index - 1):
                at = number % len(contexts)
                if at not in sources:
                    sources[at] = arms.source_pairs(pair, torch.tensor([contexts[at][0].context_ids]))
            sources = {at: sources[at] for at in (index, (index - 1) % len(contexts))}
        for arm in chosen:
            model = arms.model_of(pair, arm)
            cache = None
            for probe in questions:
                question = torch.tensor([probe.question_ids])
                if cache is None or (arm == "handoff" and pair.recompute):  # what is recomputed depends on the question
                    made = arms.prefix_cache(
                        pair,
                        arm,
                        context,
                        sources.get(index),
                        sources.get((index - 1) % len(contexts)),
                        next_ids=question,
                    )
                    cache = arms.Rewindable(made)
                said = arms.answer(model, cache.fresh(model), question, len(probe.answer_ids) + EXTRA_TOKENS)
                right[arm].append(probe.is_answered(tokenizer.decode(said, skip_special_tokens=False)))
    return right


def _contexts(asked: Sequence[Probe]) -> Iterator[list[Probe]]:
    for _, group in groupby(asked, key=lambda probe: probe.document):
        yield list(group)


def recall_table(
    pair: arms.Pair,
    tokenizer: Any,
    fillers: Sequence[str],
    kinds: Sequence[ProbeKind],
    *,
    count: int,
    context_tokens: int,
    able_from: float,
    per_context: int = 2,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Exact recall per probe kind and arm, with intervals clustered by context.

    The models are asked first. Where the target cannot do a probe with its own cache, there is nothing to move, and the arms
    are not asked: their recall is unknown.

    Args:
        pair: models and mapper.
        tokenizer: of both models.
        fillers: natural texts to hide facts in.
        kinds: which probes.
        count: questions per kind.
        context_tokens: length of the contexts.
        able_from: least recall of both models for a probe to count.
        per_context: questions about each context.
        resamples: of the bootstrap.
        seed: of probes and bootstrap.
        progress: show bars.

    Returns:
        By kind: ``count``, ``able``, ``reason`` (why not), and ``arms``: {arm: {recall, interval, by_depth}}.
    """
    table: dict[str, Any] = {}
    for kind in kinds:
        try:
            asked = probes(
                tokenizer,
                fillers,
                kind=kind,
                count=count,
                context_tokens=context_tokens,
                per_context=per_context,
                seed=seed,
            )
        except TextError as error:
            table[kind] = {"count": 0, "able": False, "reason": str(error).removeprefix("probes: "), "arms": {}}
            continue
        right = ask(pair, tokenizer, asked, ABLE, progress=progress)
        share = {arm: sum(found) / len(found) for arm, found in right.items()}
        if share["native"] >= able_from:
            right |= ask(pair, tokenizer, asked, MOVED, progress=progress)
        unable = [arm for arm in ABLE if share[arm] < able_from]
        table[kind] = {
            "count": len(asked),
            "able": not unable,
            "reason": None
            if not unable
            else " and ".join(f"{'target' if arm == 'native' else 'source'} alone recalls {share[arm]:.0%}" for arm in unable),
            "arms": {arm: _row(found, asked, resamples, seed) for arm, found in right.items()},
        }
    return table


def _row(right: Sequence[bool], asked: Sequence[Probe], resamples: int, seed: int) -> dict[str, Any]:
    thirds: list[list[bool]] = [[], [], []]
    for answered, probe in zip(right, asked, strict=True):
        thirds[min(2, int(3 * probe.depth))].append(answered)
    low, high = cluster_interval(
        [float(answered) for answered in right], [probe.document for probe in asked], resamples=resamples, seed=seed
    )
    return {
        "recall": sum(right) / len(right),
        "interval": [low, high],
        "by_depth": {name: sum(part) / len(part) if part else None for name, part in zip(DEPTHS, thirds, strict=True)},
    }


def pooled(table: dict[str, Any]) -> dict[Arm, dict[str, Any]]:
    """Recall per arm over all questions of the kinds that count; where none does, of the first kind that was asked.

    Returns:
        {arm: {recall, by_kind}}; empty where nothing was asked.
    """
    able = [entry for entry in table.values() if entry["able"]]
    used = able or [entry for entry in table.values() if entry["count"]][:1]
    out: dict[Arm, dict[str, Any]] = {}
    for arm in (*ABLE, *MOVED):
        rows = [(entry["count"], entry["arms"][arm]["recall"]) for entry in used if arm in entry["arms"]]
        if rows:
            out[arm] = {"recall": sum(count * value for count, value in rows) / sum(count for count, _ in rows)}
    return out
