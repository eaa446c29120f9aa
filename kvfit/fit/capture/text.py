"""Text in, token sequences out, with a cursor that survives a kill.

One sequence per document, its first `seq_len` tokens; shorter documents are skipped and counted. With `pack`, documents are
joined and cut into sequences instead. A document that came before is skipped and counted too: it would be fitted on and held
out at once. Documents are read in order, never through a shuffle buffer, because such a buffer loses and repeats rows when a
run is resumed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfit.demo import TEXTS, demo_path
from kvfit.errors import KvfitError, MismatchError, RefError, TextError
from kvfit.fit.stats import digests

DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu"
DEFAULT_CONFIG = "sample-10BT"
RETRIES = 5


@dataclass(frozen=True)
class TextOptions:
    """Where text comes from; part of a store's recipe.

    Attributes:
        dataset: ``demo:text``, a ``.jsonl``, ``.parquet`` or ``.txt`` file, a folder of such files, or a dataset on the Hub.
        config: the dataset's configuration, for the Hub.
        revision: commit, tag or branch, for the Hub.
        split: the dataset's split.
        column: the column that holds the text.
    """

    dataset: str = DEFAULT_DATASET
    config: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "text"


@dataclass(frozen=True)
class Cursor:
    """Where reading stands.

    Attributes:
        documents: documents read so far; the next is number `documents`.
        sequences: sequences given so far.
        short: documents skipped because they were shorter than a sequence.
        digest: of the last sequence's ids, to see on resuming that the text is still the same.
        last: number of the document that gave the last sequence, -1 before the first.
        repeated: documents skipped because one with the same text came before.
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
        cursor: where reading stands after them.
        documents: digests of the documents that begin in it, see `kvfit.fit.stats.digests`.
    """

    ids: list[int]
    cursor: Cursor
    documents: tuple[str, ...] = ()


def documents(options: TextOptions, start: int = 0) -> Iterator[str]:
    """Documents in order, from number `start`.

    Raises:
        RefError: there is no such file or dataset.
        MismatchError: an option of a dataset on the Hub beside a local one.
        TextError: it cannot be read, or the column is missing or holds no text.
    """
    stream = _open(options)
    position = start
    rows = iter(stream.skip(position) if position else stream)
    attempt = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            # A dropped connection in the middle of a stream: open it again where it stopped, a bounded number of times.
            attempt += 1
            if not isinstance(error, OSError | ConnectionError | TimeoutError):
                raise TextError(
                    f"{options.dataset}: found {type(error).__name__} at document {position} or a few after it "
                    f"({_line(error)}), needed UTF-8 text, in .jsonl one JSON object a line: mend or remove what cannot be read"
                ) from error
            if attempt > RETRIES:
                raise TextError(
                    f"{options.dataset}: found {type(error).__name__} at document {position} ({_line(error)}), needed text "
                    f"that can be reached: run the same command later, a capture with --resume"
                ) from error
            time.sleep(min(2**attempt, 30))
            rows = iter(_open(options).skip(position))
            continue
        attempt = 0
        text = row.get(options.column)
        if options.column not in row:
            raise TextError(
                f"{options.dataset}: found columns {', '.join(map(str, row))} in document {position}, needed text in "
                f"{options.column!r}: pass --text-column"
            )
        if not isinstance(text, str):
            raise TextError(
                f"{options.dataset}: found {_kind(text)} in column {options.column!r} of document {position}, needed text: "
                f"write one string per document (a conversation through the tokenizer's chat template), or pass another "
                f"--text-column"
            )
        position += 1
        yield text


def _kind(value: Any) -> str:
    """What a value is that is no text, in JSON's words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _open(options: TextOptions) -> Any:
    import datasets

    path = demo_path(options.dataset)
    if path is not None and options.dataset not in TEXTS:
        raise RefError(f"{options.dataset}: found a model, needed a text: {' or '.join(TEXTS)}")
    path = path or Path(options.dataset)
    try:
        if path.exists():
            _check_local(options)
            kind, files = _files(path)
            extra = {"sample_by": "document"} if kind == "text" else {}
            return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **extra)
        if options.dataset.startswith((".", "/", "~")) or options.dataset.count("/") != 1:
            raise RefError(
                f"{options.dataset}: found no such file or folder, needed a .jsonl, .parquet or .txt file, or a "
                f"dataset org/name"
            )
        config = options.config or (DEFAULT_CONFIG if options.dataset == DEFAULT_DATASET else None)
        return datasets.load_dataset(options.dataset, config, revision=options.revision, split=options.split, streaming=True)
    except KvfitError:
        raise
    except StopIteration as error:  # what datasets raises where no file has a row
        raise TextError(f"{options.dataset}: found nothing in it, needed text") from error
    except (OSError, ValueError) as error:
        raise RefError(
            f"{options.dataset}: found no readable dataset ({_line(error)}), needed one: check its name, or pass a local file"
        ) from error


def _check_local(options: TextOptions) -> None:
    """Refuse what would be ignored."""
    for name, value, default in (
        ("--dataset-config", options.config, None),
        ("--dataset-revision", options.revision, None),
        ("--split", options.split, TextOptions.split),
    ):
        if value != default:
            raise MismatchError(
                f"{name}: found {value} beside {options.dataset}, which is no dataset of the Hub and has none, needed nothing: "
                f"leave {name} out"
            )


def _files(path: Path) -> tuple[str, list[str]]:
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
    found = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in kinds)
    suffixes = {kinds.get(p.suffix, "") for p in found}
    if len(suffixes) != 1 or "" in suffixes:
        raise TextError(
            f"{path}: found {', '.join(sorted({p.suffix or p.name for p in found})) or 'nothing to read'}, needed files of one "
            f"kind: {', '.join(kinds)}"
        )
    return suffixes.pop(), [str(p) for p in found]


def sequences(
    options: TextOptions,
    tokenizer: Any,
    *,
    seq_len: int,
    pack: bool = False,
    cursor: Cursor | None = None,
    seen: Iterable[str] = (),
) -> Iterator[Sequence]:
    """Token sequences from where the cursor stands.

    Each text is tokenized once, with at most one beginning-of-sequence token; both models get these very ids.

    Args:
        options: where the text comes from.
        tokenizer: of both models.
        seq_len: tokens of a sequence.
        pack: join documents and cut them.
        cursor: where to begin; None for the start.
        seen: digests of the documents in the sequences before the cursor. Not needed with `pack`.

    Raises:
        TextError: on resuming, the document that gave the last sequence no longer gives the same ids.
    """
    cursor = cursor or Cursor()
    if cursor.last >= 0 and not pack:
        _check_unchanged(options, tokenizer, seq_len, cursor)
    if pack:
        yield from _packed(options, tokenizer, seq_len, cursor)
        return
    count, short, repeated, known = cursor.sequences, cursor.short, cursor.repeated, set(seen)
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
        yield Sequence(ids, Cursor(number + 1, count, short, _digest(ids), number, repeated), (name,))


def _packed(options: TextOptions, tokenizer: Any, seq_len: int, cursor: Cursor) -> Iterator[Sequence]:
    """Documents joined by the end-of-text token and cut; on resuming the joined stream is made again from its start."""
    held: list[int] = []
    begun: tuple[str, ...] = ()  # in the sequence that is being filled: what is held is always less than one
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
                yield Sequence(ids, Cursor(number + 1, count, 0, _digest(ids), number, repeated), begun)
            begun = ()


def _ids(tokenizer: Any, text: str, limit: int | None) -> list[int]:
    # Characters far beyond the limit are never tokenized: no token of a real vocabulary is longer than this on average.
    ids: list[int] = tokenizer(text if limit is None else text[: limit * 32], add_special_tokens=True)["input_ids"]
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    return ids if limit is None else ids[:limit]


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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
