"""Make token sequences from text, with a cursor from which a killed run can resume.

There is one sequence per document, its first `seq_len` tokens; shorter documents are skipped and counted. With `pack`,
documents are joined and cut into sequences instead. A document that occurred before is also skipped and counted, because it
could be in the fit split and in the holdout split. Several texts take turns by their shares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from kvfit.errors import TextError
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.stats import digests

SAMPLED = 32  # documents on which two tokenizers are compared
CHARS_PER_TOKEN = 8  # of generated text; more than any common vocabulary has on average


@dataclass(frozen=True)
class Cursor:
    """The position of reading in a text.

    Attributes:
        documents: number of documents read so far, which is also the number of the next document.
        sequences: number of sequences made so far.
        short: number of documents skipped because they were shorter than a sequence.
        digest: digest of the last sequence's ids, to check on resuming that the text is still the same.
        last: number of the document that gave the last sequence; -1 before the first.
        repeated: number of documents skipped because the same text had occurred before.
    """

    documents: int = 0
    sequences: int = 0
    short: int = 0
    digest: str = ""
    last: int = -1
    repeated: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sequence:
    """`seq_len` token ids.

    Attributes:
        ids: the ids.
        cursor: position of reading after them.
        documents: digests of the documents that begin in the sequence; see `kvfit.fit.stats.digests`.
        text: number of the text that the sequence is from.
    """

    ids: list[int]
    cursor: Cursor
    documents: tuple[str, ...] = ()
    text: int = 0


def due(shares: Iterable[float], counts: Iterable[int]) -> int:
    """The number of the text that gives the next sequence: the one that is furthest behind its share."""
    shares, counts = list(shares), list(counts)
    following = sum(counts) + 1
    behind = [share / sum(shares) * following - count for share, count in zip(shares, counts, strict=True)]
    return behind.index(max(behind))


def interleaved(
    texts: Iterable[TextOptions],
    tokenizer: Any,
    *,
    seq_len: int,
    pack: bool = False,
    cursors: Iterable[Cursor] = (),
    seen: Iterable[str] = (),
) -> Generator[Sequence, None, Cursor]:
    """Sequences of several texts by their shares. The order depends only on how many sequences each text has given.

    A document that occurs in two of the texts is used once, except with `pack`, which treats each text separately. The
    sequences end when the text that is due has no more.

    Args:
        texts: the texts.
        tokenizer: as for `sequences`.
        seq_len: as for `sequences`.
        pack: as for `sequences`.
        cursors: one per text; empty for the start.
        seen: as for `sequences`.

    Returns:
        Where the text that is due ended.
    """
    texts = list(texts)
    cursors = list(cursors) or [Cursor()] * len(texts)
    known = set(seen)
    streams = [
        sequences(text, tokenizer, seq_len=seq_len, pack=pack, cursor=cursor, seen=known)
        for text, cursor in zip(texts, cursors, strict=True)
    ]
    counts = [cursor.sequences for cursor in cursors]
    while True:
        number = due((text.share for text in texts), counts)
        try:
            sequence = next(streams[number])
        except StopIteration as end:
            ended: Cursor = end.value
            return ended
        counts[number] += 1
        yield replace(sequence, text=number)


def sequences(
    options: TextOptions,
    tokenizer: Any,
    *,
    seq_len: int,
    pack: bool = False,
    cursor: Cursor | None = None,
    seen: Iterable[str] = (),
) -> Generator[Sequence, None, Cursor]:
    """Token sequences of one text, from a cursor on.

    Each text is tokenized once, with at most one beginning-of-sequence token. Both models get the same ids.

    Args:
        options: the text.
        tokenizer: the tokenizer of both models.
        seq_len: tokens per sequence.
        pack: join documents and cut them into sequences.
        cursor: where to begin; None for the start.
        seen: digests of the documents in the sequences before the cursor, not needed with `pack`. New ones are added to it
            if it is a set.

    Returns:
        The cursor of the last sequence, with the documents that were skipped after it.

    Raises:
        TextError: on resuming, the document that gave the last sequence has changed.
    """
    cursor = cursor or Cursor()
    options = replace(options, least_chars=CHARS_PER_TOKEN * seq_len)
    if cursor.last >= 0 and not pack:
        _check_unchanged(options, tokenizer, seq_len, cursor)
    if pack:
        return (yield from _packed(options, tokenizer, seq_len, cursor))
    count, short, repeated = cursor.sequences, cursor.short, cursor.repeated
    known = seen if isinstance(seen, set) else set(seen)
    for number, text in enumerate(documents(options, cursor.documents), start=cursor.documents):
        name = digests.digest(text)
        if name in known:
            repeated += 1
            continue
        ids = _ids(tokenizer, text, seq_len)
        if len(ids) < seq_len:
            short += 1
            continue
        known.add(name)
        count += 1
        cursor = Cursor(number + 1, count, short, _digest(ids), number, repeated)
        yield Sequence(ids, cursor, (name,))
    return replace(cursor, short=short, repeated=repeated)


def beginnings(texts: Iterable[TextOptions], num_sequences: int, seq_len: int) -> Iterator[str]:
    """The beginnings of a few of the documents that a capture reads, from each text by its share."""
    texts = list(texts)
    per_share = min(num_sequences, SAMPLED) / sum(text.share for text in texts)
    for text in texts:
        for document in islice(documents(text), max(1, int(text.share * per_share))):
            yield document[: CHARS_PER_TOKEN * seq_len]


def _packed(options: TextOptions, tokenizer: Any, seq_len: int, cursor: Cursor) -> Generator[Sequence, None, Cursor]:
    """Documents joined by the end-of-text token and cut. On resuming, the joined stream is made again from its start."""
    held: list[int] = []
    begun: tuple[str, ...] = ()  # documents that begin in the sequence that is being filled
    known: set[str] = set()
    count = repeated = 0
    for number, text in enumerate(documents(options)):
        name = digests.digest(text)
        if name in known:
            repeated += 1
            continue
        known.add(name)
        begun += (name,)
        held += _ids(tokenizer, text, None)
        if tokenizer.eos_token_id is not None:
            held.append(tokenizer.eos_token_id)
        while len(held) >= seq_len:
            ids, held = held[:seq_len], held[seq_len:]
            count += 1
            if count == cursor.sequences and _digest(ids) != cursor.digest:
                raise TextError(_changed(options, number))
            if count > cursor.sequences:
                cursor = Cursor(number + 1, count, 0, _digest(ids), number, repeated)
                yield Sequence(ids, cursor, begun)
            begun = ()
    return replace(cursor, repeated=repeated)


def _ids(tokenizer: Any, text: str, limit: int | None) -> list[int]:
    # Characters far beyond the limit are not tokenized. Tokens of real vocabularies are shorter than 32 characters on average.
    ids = with_one_beginning(tokenizer, text if limit is None else text[: limit * 32])
    return ids if limit is None else ids[:limit]


def with_one_beginning(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text with its special tokens, of which the beginning of sequence stands there once at most.

    Text from a chat template often begins with the token that the tokenizer puts before every text.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    return ids


def _check_unchanged(options: TextOptions, tokenizer: Any, seq_len: int, cursor: Cursor) -> None:
    text = next(documents(options, cursor.last), None)
    if text is None or _digest(_ids(tokenizer, text, seq_len)) != cursor.digest:
        raise TextError(_changed(options, cursor.last))


def _changed(options: TextOptions, number: int) -> str:
    return (
        f"{options.dataset}: found other text in document {number} than when the capture began, needed the same: pin the "
        f"dataset with --dataset-revision and capture into a new store"
    )


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]
