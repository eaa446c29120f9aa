"""Recall probes: questions whose answer only the context holds.

Likelihood can improve while nothing of the context is transferred; a fact that was drawn at random and stands nowhere but in
the context cannot be guessed. Each probe hides facts in natural text and asks for one of them:

    names     a list of names with random codes, asked by name
    list      lines of random keys and values, asked by key
    sentence  a sentence hidden in the text, asked by its beginning
    two-hop   two sentences far apart, of which the second holds the answer and the first says where to look
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvfit.errors import MismatchError, TextError

ProbeKind = Literal["names", "list", "sentence", "two-hop"]
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

# The end of the context is left free of facts: there, an answer would come from tokens that any arm has next to the question.
LAST_DEPTH = 0.9
MOST_ENTRIES, LEAST_ENTRIES = 8, 2


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
        kind: of the probe.
        document: number of the context; questions about one context share it.
        depth: where the fact begins, as a share of the context; of two facts, the earlier one.
        context_ids: what the moved cache covers.
        question_ids: what the target runs itself.
        answer: what it has to say next, exactly, white space aside.
        answer_ids: the answer's tokens, to know how many to generate.
    """

    kind: ProbeKind
    document: int
    depth: float
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]

    def is_answered(self, said: str) -> bool:
        """Whether a greedy continuation begins with the answer, and not with a longer word that begins so."""
        said = said.lstrip()
        return said.startswith(self.answer) and not said[len(self.answer) : len(self.answer) + 1].isalnum()


@dataclass(frozen=True)
class _Planted:
    """Facts to hide, each at a depth of its own, and questions: (question, answer, facts that it needs)."""

    facts: Sequence[str]
    questions: Sequence[tuple[str, str, tuple[int, ...]]]


def _names(rng: random.Random, n_entries: int) -> _Planted:
    pairs = codes(rng, n_entries)
    return _Planted([f"\n{list_text(pairs)}\n"], [(f"\n{question_text(name)}", code, (0,)) for name, code in pairs])


def _list(rng: random.Random, n_entries: int) -> _Planted:
    keys = rng.sample([f"{colour}-{word}" for colour in COLOURS for word in WORDS], n_entries)
    pairs = [(key, f"{rng.randrange(1000, 10000)}") for key in keys]
    listed = "\n" + "".join(f"{key}: {value}\n" for key, value in pairs)
    return _Planted([listed], [(f"\n{key}:", value, (0,)) for key, value in pairs])


def _sentence(rng: random.Random, n_entries: int) -> _Planted:
    pairs = list(zip(rng.sample(NAMES, n_entries), rng.sample(WORDS, n_entries), strict=True))
    asked = [f" The secret word of {name} is" for name, _ in pairs]
    facts = [f"{question} {word}." for question, (_, word) in zip(asked, pairs, strict=True)]
    return _Planted(facts, [(asked[i], word, (i,)) for i, (_, word) in enumerate(pairs)])


def _two_hop(rng: random.Random, n_entries: int) -> _Planted:
    names, colours = rng.sample(NAMES, n_entries), rng.sample(COLOURS, n_entries)
    held = [f"{rng.randrange(1000, 10000)}" for _ in names]
    first = [f" {name} owns the {colour} box." for name, colour in zip(names, colours, strict=True)]
    second = [f" The {colour} box holds the number {value}." for colour, value in zip(colours, held, strict=True)]
    questions = [(f" The box that {name} owns holds the number", held[i], (i, n_entries + i)) for i, name in enumerate(names)]
    return _Planted([*first, *second], questions)


_PLANTERS = {"names": _names, "list": _list, "sentence": _sentence, "two-hop": _two_hop}


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
    """`count` probes of one kind; the depths of their facts are spread over the context.

    Args:
        tokenizer: of both models.
        fillers: natural text to hide the facts in; used in turn.
        kind: see the module.
        count: how many questions.
        context_tokens: exact length of each context.
        n_entries: facts in each context; fewer where the context is too short for so many.
        per_context: questions about each context.
        seed: of names, codes, and where the facts stand.

    Raises:
        TextError: the context is too short for two facts, or a filler is shorter than a context.
        MismatchError: a number below 1.
    """
    if min(count, per_context) < 1 or n_entries < LEAST_ENTRIES:
        raise MismatchError(
            f"probes: found count {count}, per_context {per_context}, n_entries {n_entries}, needed at least 1, 1 and "
            f"{LEAST_ENTRIES}"
        )
    if not fillers:
        raise TextError("probes: found no text to hide facts in, needed some")
    # A string's own seed: Python's hash of it differs between processes.
    rng = random.Random(f"{seed}/{kind}/{context_tokens}")
    n_contexts = -(-count // per_context)
    out: list[Probe] = []
    for document in range(n_contexts):
        filler = fillers[document % len(fillers)]
        lowest, highest = document / n_contexts, (document + 1) / n_contexts
        planted, context, starts = _context(tokenizer, rng, kind, filler, context_tokens, n_entries, (lowest, highest))
        for question, answer, needs in rng.sample(
            planted.questions, min(per_context, len(planted.questions), count - len(out))
        ):
            out.append(
                Probe(
                    kind=kind,
                    document=document,
                    depth=min(starts[fact] for fact in needs) / context_tokens,
                    context_ids=context,
                    question_ids=tuple(_ids(tokenizer, question)),
                    answer=answer,
                    answer_ids=tuple(_ids(tokenizer, f" {answer}")),
                )
            )
    return out


def _context(
    tokenizer: Any,
    rng: random.Random,
    kind: ProbeKind,
    filler: str,
    context_tokens: int,
    n_entries: int,
    spread: tuple[float, float],
) -> tuple[_Planted, tuple[int, ...], list[int]]:
    """What was planted, `context_tokens` ids, and where each fact begins."""
    start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id][:1]
    for entries in range(n_entries, LEAST_ENTRIES - 1, -1):
        planted = _PLANTERS[kind](rng, entries)
        facts = [_ids(tokenizer, fact) for fact in planted.facts]
        room = context_tokens - len(start) - sum(map(len, facts))
        # Facts take up half of a context at most: it is natural text that they are hidden in.
        if room >= context_tokens // 2:
            break
    else:
        raise TextError(f"probes: found no room for {LEAST_ENTRIES} facts in {context_tokens} tokens, needed a longer prefix")
    text = _ids(tokenizer, filler)
    if len(text) < room:
        raise TextError(f"probes: found a text of {len(text)} tokens to hide facts in, needed {room}: give longer documents")
    if len(facts) == 1:
        cuts = [int(room * LAST_DEPTH * (spread[0] + rng.random() * (spread[1] - spread[0])))]
    else:
        cuts = sorted(rng.sample(range(int(room * LAST_DEPTH)), len(facts)))
    # Which fact stands where: facts that belong together are not always in the same order.
    order = rng.sample(range(len(facts)), len(facts))
    context, starts, used = list(start), [0] * len(facts), 0
    for fact, cut in zip(order, cuts, strict=True):
        context += text[used:cut]
        used = cut
        starts[fact] = len(context)
        context += facts[fact]
    return planted, (*context, *text[used:room]), starts


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
