"""Documents of a dataset: built-in, generated, local or on the Hub.

They are read in order, never through a shuffle buffer, because such a buffer loses and repeats rows when a run is resumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvfit.demo import TEXTS, demo_path
from kvfit.errors import MismatchError, OptionError, RefError, TextError
from kvfit.fit.capture.facts import MIN_CHARS, facts
from kvfit.fit.capture.local_text import BYTE_ORDER_MARK, LocalRows

DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu"
DEFAULT_CONFIG = "sample-10BT"
# What `kvfit capture` reads where no dataset is named: REF=SHARE of the sequences.
DEFAULT_MIX = (f"{DEFAULT_DATASET}=3", "demo:facts=1")
FACTS = "demo:facts"
FACTS_COUNT = 10**9  # documents, more than any capture reads
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
        share: of all sequences, relative to the shares of other texts that are read beside it.
        least_chars: characters that a generated document has at least.
    """

    dataset: str = DEFAULT_DATASET
    config: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "text"
    share: float = 1.0
    least_chars: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and self.share > 0):
            raise OptionError(f"--dataset: found share {self.share} of {self.dataset}, needed a number above 0")


def mix(words: Iterable[str], options: TextOptions) -> tuple[TextOptions, ...]:
    """The texts that ``REF`` or ``REF=SHARE`` name, with the other options where they apply.

    A configuration, a revision and a split go to the datasets of the Hub. Without any such dataset they go to every text,
    which refuses them. A file whose name contains the sign is read as that file.

    Args:
        words: at least one.
        options: of all texts; its dataset and share are not used.

    Raises:
        OptionError: a share is not a number above 0, or a text is named twice.
    """
    shares: dict[str, float] = {}
    for word in words:
        ref, sign, share = word.rpartition("=")
        if not sign or Path(word).exists():
            ref, share = word, "1"
        try:
            number = float(share)
        except ValueError:
            raise OptionError(f"--dataset: found share {share!r} in {word!r}, needed REF or REF=SHARE with a number") from None
        if ref in shares:
            raise OptionError(f"--dataset: found {ref} twice, needed each text once: give it the sum of the shares")
        shares[ref] = number
    local = [ref for ref in shares if ref.startswith("demo:") or Path(ref).exists()]
    plain = TextOptions(column=options.column)
    return tuple(
        replace(plain if ref in local and len(local) < len(shares) else options, dataset=ref, share=share)
        for ref, share in shares.items()
    )


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
            if position == start == 0:
                raise TextError(f"{options.dataset}: found nothing in it, needed text") from None
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
        yield text.removeprefix(BYTE_ORDER_MARK)


def _kind(value: Any) -> str:
    """JSON's name for the type of a value that is not text."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _open(options: TextOptions) -> Any:
    """Rows of a dataset: can be iterated, and have ``skip``."""
    if options.dataset == FACTS:
        _check_local(options)
        return _Facts(options)
    path = demo_path(options.dataset)
    if path is not None and options.dataset not in TEXTS:
        raise RefError(f"{options.dataset}: found a model, needed a text: {', '.join([*TEXTS, FACTS])}")
    path = path or Path(options.dataset)
    if path.exists():
        _check_local(options)
        return LocalRows(path, options.column)
    if options.dataset.startswith((".", "/", "~")) or options.dataset.count("/") != 1:
        raise RefError(
            f"{options.dataset}: found no such file or folder, needed a .jsonl, .parquet or .txt file, or a dataset org/name"
        )
    import datasets

    config = options.config or (DEFAULT_CONFIG if options.dataset == DEFAULT_DATASET else None)
    try:
        stream = datasets.load_dataset(options.dataset, config, revision=options.revision, split=options.split, streaming=True)
    except (OSError, ValueError) as error:
        raise RefError(
            f"{options.dataset}: found no readable dataset ({_line(error)}), needed one: check its name, or pass a local file"
        ) from error
    # Other columns may change their type from file to file, which stops the reader although nobody asked for them.
    return stream.select_columns([options.column]) if options.column in (stream.column_names or ()) else stream


@dataclass(frozen=True)
class _Facts:
    """The generated text of ``demo:facts``, without an end."""

    options: TextOptions
    start: int = 0

    def skip(self, count: int) -> _Facts:
        return _Facts(self.options, count)

    def __iter__(self) -> Iterator[dict[str, str]]:
        texts = facts(0, FACTS_COUNT, min_chars=max(MIN_CHARS, self.options.least_chars))
        return ({self.options.column: text} for text in islice(texts, self.start, None))


def _check_local(options: TextOptions) -> None:
    """Refuse what would be ignored."""
    for name, value, default in (
        ("--dataset-config", options.config, None),
        ("--dataset-revision", options.revision, None),
        ("--split", options.split, TextOptions.split),
    ):
        if value != default:
            raise MismatchError(
                f"{name}: found {value} beside {options.dataset}, which is local text and has none, needed nothing: "
                f"leave {name} out"
            )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
