"""Recall questions: facts hidden in natural text, and questions that only these facts can answer.

Likelihood can improve although no content of the context gets through. A random fact cannot be guessed, so a right answer
shows that the cache contains it. The kinds of questions:

    names     a list of names with random codes, asked by name
    list      lines of random keys and values, asked by key
    sentence  sentences about people, asked by their beginning
    item      sentences about things with invented names, asked by their beginning
    reworded  sentences about invented people, asked in different words
    two-hop   pairs of sentences far apart: the first says where to look, the second holds the answer

Before every question there is a worked example: another fact of the same context, with question and answer. It shows the
form of the answer, so that a wrong answer means that the fact was not found. The words here are for evaluation only:
calibration text must not use them, or recall would measure what the map was fitted on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvfit.errors import MismatchError, TextError

ProbeKind = Literal["names", "list", "sentence", "item", "reworded", "two-hop"]
PROBE_KINDS: tuple[ProbeKind, ...] = get_args(ProbeKind)

NAMES = (
    "Adam Agnes Alan Alice Amos Anna Arthur Basil Boris Bruno Clara Conrad Daisy Daniel David Dora Edgar Edith "
    "Emma Ernest Esther Felix Flora Frank George Grace Hannah Harold Helen Hugo Irene Isaac Jacob James Joan Julia "
    "Karl Laura Leo Lewis Lucy Marcus Martha Mary Max Naomi Nora Oliver Oscar Paul Peter Rachel Rose Ruth Samuel "
    "Sarah Simon Sophia Stella Susan Thomas Victor Walter William"
).split()
COLOURS = "amber black blue brown copper golden green grey orange purple red silver white yellow".split()
WORDS = (
    "anchor apple arrow barrel basket bell bridge button candle castle chain clock coral cotton crown drum feather "
    "forest garden glass hammer harbour horse island kettle ladder lantern lemon marble meadow mirror mountain needle "
    "orchard paper pepper pillow ribbon river saddle shadow silver spoon stone thunder tiger velvet violin wagon window"
).split()
CARVINGS = "walnut ivory granite bone amber cedar ebony jade slate horn chalk oak".split()
DISHES = "soup trout bread honey cheese plums lentils olives porridge figs mutton pancakes".split()
HEADS = "Bel Cru Dro Fen Gra Hol Jas Kel Lum Mor Nev Pli Quo Ras Stu Tre Urm Vax Wil Yed".split()
TAILS = "badin dovar fenna grith kessel lomir mundo nash pirel quist rosk stine tavel vonda wick xanto yora zeph".split()

# There are no facts at the end of the context, where every arm would have them right before the question.
LAST_DEPTH = 0.9
MOST_ENTRIES, LEAST_ENTRIES = 8, 2
QUESTIONS_PER_CONTEXT = 3  # one in each third of the context, if the kind hides several facts


def codes(rng: random.Random, count: int, digits: int = 2) -> list[tuple[str, str]]:
    """`count` different names, each with a random code."""
    return [(name, "".join(str(rng.randrange(10)) for _ in range(digits))) for name in rng.sample(NAMES, count)]


def list_text(pairs: Sequence[tuple[str, str]]) -> str:
    """The list as it appears in the context."""
    return "[Codes: " + "; ".join(f"{name} {code}" for name, code in pairs) + "]"


def question_text(name: str, code: str = "") -> str:
    """A question with its answer, or the open question if `code` is empty."""
    return f"[Recall {name} {code}]" if code else f"[Recall {name}"


@dataclass(frozen=True)
class Probe:
    """One question.

    Attributes:
        kind: kind of the question.
        document: number of the context, which several questions may share.
        depth: where the fact begins, as a share of the context; for two facts, the earlier one.
        context_ids: tokens of the moved cache.
        question_ids: tokens that the target runs itself: the worked example and the open question.
        answer: the exact answer, apart from white space.
        answer_ids: tokens of the answer after the question.
    """

    kind: ProbeKind
    document: int
    depth: float
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """One fact that can be asked for.

    Attributes:
        question: the open question, which ends where the answer begins.
        answer: the answer, which follows after a space.
        closing: text after the answer if the entry is the worked example.
        needs: numbers of the texts that hold the fact.
        share: share of the text before the fact, for a text with several facts.
    """

    question: str
    answer: str
    closing: str
    needs: tuple[int, ...]
    share: float = 0.0


@dataclass(frozen=True)
class _Planted:
    """Texts to hide at different depths, and the facts that can be asked for."""

    texts: Sequence[str]
    entries: Sequence[_Entry]


def _names(rng: random.Random, n_entries: int) -> _Planted:
    pairs = codes(rng, n_entries)
    entries = [_Entry(f"\n{question_text(name)}", code, "]", (0,), i / len(pairs)) for i, (name, code) in enumerate(pairs)]
    return _Planted([f"\n{list_text(pairs)}\n"], entries)


def _list(rng: random.Random, n_entries: int) -> _Planted:
    keys = rng.sample([f"{colour}-{word}" for colour in COLOURS for word in WORDS], n_entries)
    pairs = [(key, f"{rng.randrange(1000, 10000)}") for key in keys]
    listed = "\n" + "".join(f"{key}: {value}\n" for key, value in pairs)
    entries = [_Entry(f"\n{key}:", value, "", (0,), i / len(pairs)) for i, (key, value) in enumerate(pairs)]
    return _Planted([listed], entries)


def _sentence(rng: random.Random, n_entries: int) -> _Planted:
    pairs = zip(rng.sample(NAMES, n_entries), rng.sample(WORDS, n_entries), strict=True)
    entries = [_Entry(f" The secret word of {name} is", word, ".", (i,)) for i, (name, word) in enumerate(pairs)]
    return _Planted([f"{entry.question} {entry.answer}." for entry in entries], entries)


def _item(rng: random.Random, n_entries: int) -> _Planted:
    things = [name.lower() for name in _invented(rng, 2 * n_entries)]
    made = rng.sample(CARVINGS, n_entries)
    entries = [
        _Entry(f" The {thing} was carved from", material, ".", (i,))
        for i, (thing, material) in enumerate(zip(things, made, strict=False))
    ]
    places = [name.capitalize() for name in things[n_entries:]]
    return _Planted(
        [f"{entry.question} {entry.answer} by a master of {place}." for entry, place in zip(entries, places, strict=True)],
        entries,
    )


def _reworded(rng: random.Random, n_entries: int) -> _Planted:
    guests, dishes = _invented(rng, n_entries), rng.sample(DISHES, n_entries)
    facts = [f" When the waiter came, {guest} ordered the {dish}." for guest, dish in zip(guests, dishes, strict=True)]
    entries = [
        _Entry(f"\nQuestion: What did {guest} eat?\nAnswer:", dish, "", (i,))
        for i, (guest, dish) in enumerate(zip(guests, dishes, strict=True))
    ]
    return _Planted(facts, entries)


def _two_hop(rng: random.Random, n_entries: int) -> _Planted:
    names, colours = rng.sample(NAMES, n_entries), rng.sample(COLOURS, n_entries)
    held = [f"{rng.randrange(1000, 10000)}" for _ in names]
    first = [f" {name} owns the {colour} box." for name, colour in zip(names, colours, strict=True)]
    second = [f" The {colour} box holds the number {value}." for colour, value in zip(colours, held, strict=True)]
    # The answer contains both hops, because a small model finds the second only after writing down the first.
    entries = [_Entry(f"\n{names[i]} ->", f"{colours[i]} box -> {held[i]}", "", (i, n_entries + i)) for i in range(n_entries)]
    return _Planted([*first, *second], entries)


def _invented(rng: random.Random, count: int) -> list[str]:
    """Different invented names of two parts."""
    return rng.sample([head + tail for head in HEADS for tail in TAILS], count)


_PLANTERS = {
    "names": _names,
    "list": _list,
    "sentence": _sentence,
    "item": _item,
    "reworded": _reworded,
    "two-hop": _two_hop,
}


def probes(
    tokenizer: Any,
    fillers: Sequence[str],
    *,
    kind: ProbeKind = "names",
    count: int,
    context_tokens: int,
    n_entries: int = MOST_ENTRIES,
    per_context: int = 1,
    seed: int = 0,
) -> list[Probe]:
    """`count` questions of one kind, with facts at depths that are spread over the context.

    Args:
        tokenizer: the tokenizer of both models.
        fillers: natural texts to hide the facts in, used in turn.
        kind: kind of the questions.
        count: number of questions.
        context_tokens: exact length of each context.
        n_entries: number of facts in each context; fewer if the context is too short.
        per_context: number of questions about each context.
        seed: seed of names, codes and depths.

    Raises:
        TextError: the context is too short for two facts, or a filler is shorter than it.
        MismatchError: a number is below 1.
    """
    if min(count, per_context) < 1 or n_entries < LEAST_ENTRIES:
        raise MismatchError(
            f"probes: found count {count}, per_context {per_context}, n_entries {n_entries}, needed at least 1, 1 and "
            f"{LEAST_ENTRIES}"
        )
    if not fillers:
        raise TextError("probes: found no text to hide facts in, needed some")
    # Random uses the string itself as its seed; `hash` of a string would differ between processes.
    rng = random.Random(f"{seed}/{kind}/{context_tokens}")
    n_contexts = -(-count // per_context)
    out: list[Probe] = []
    for document in range(n_contexts):
        filler = fillers[document % len(fillers)]
        spread = document / n_contexts, (document + 1) / n_contexts
        planted, context, depths = _context(tokenizer, rng, kind, filler, context_tokens, n_entries, spread)
        for number in _asked(rng, depths, min(per_context, count - len(out)), len(out)):
            entry = planted.entries[number]
            example = rng.choice([other for other in planted.entries if other is not entry])
            question = f"{example.question} {example.answer}{example.closing}{entry.question}"
            out.append(
                Probe(
                    kind=kind,
                    document=document,
                    depth=depths[number],
                    context_ids=context,
                    question_ids=tuple(_ids(tokenizer, question)),
                    answer=entry.answer,
                    answer_ids=tuple(_ids(tokenizer, f" {entry.answer}")),
                )
            )
    return out


def _asked(rng: random.Random, depths: Sequence[float], count: int, done: int) -> list[int]:
    """The entries to ask about in one context: in turn, those that are closest to the middle of each third of the context."""
    unasked = rng.sample(range(len(depths)), len(depths))
    chosen = []
    for turn in range(done, done + min(count, len(depths))):
        middle = LAST_DEPTH * (turn % 3 + 0.5) / 3
        chosen.append(min(unasked, key=lambda i: abs(depths[i] - middle)))
        unasked.remove(chosen[-1])
    return chosen


def _context(
    tokenizer: Any,
    rng: random.Random,
    kind: ProbeKind,
    filler: str,
    context_tokens: int,
    n_entries: int,
    spread: tuple[float, float],
) -> tuple[_Planted, tuple[int, ...], list[float]]:
    """The planted texts, the `context_tokens` ids of the context, and the depth of each entry."""
    start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id][:1]
    for entries in range(n_entries, LEAST_ENTRIES - 1, -1):
        planted = _PLANTERS[kind](rng, entries)
        texts = [_ids(tokenizer, text) for text in planted.texts]
        room = context_tokens - len(start) - sum(map(len, texts))
        # At most half of a context are facts, so that they are hidden in natural text.
        if room >= context_tokens // 2:
            break
    else:
        raise TextError(f"probes: found no room for {LEAST_ENTRIES} facts in {context_tokens} tokens, needed a longer prefix")
    natural = _ids(tokenizer, filler)
    if len(natural) < room:
        raise TextError(f"probes: found a text of {len(natural)} tokens to hide facts in, needed {room}: give longer documents")
    if len(texts) == 1:
        cuts = [int(room * LAST_DEPTH * (spread[0] + rng.random() * (spread[1] - spread[0])))]
    else:
        cuts = sorted(rng.sample(range(int(room * LAST_DEPTH)), len(texts)))
    # Texts are planted in random order, so that facts that belong together are not always in the same order.
    order = rng.sample(range(len(texts)), len(texts))
    context, starts, used = list(start), [0] * len(texts), 0
    for text, cut in zip(order, cuts, strict=True):
        context += natural[used:cut]
        used = cut
        starts[text] = len(context)
        context += texts[text]
    depths = [
        min(starts[text] + entry.share * len(texts[text]) for text in entry.needs) / context_tokens for entry in planted.entries
    ]
    return planted, (*context, *natural[used:room]), depths


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
