"""Read the documents of a dataset: built-in, generated, local or on the Hub.

They are read in order and without a shuffle buffer, which would lose and repeat rows when a run is resumed.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvfit.bundle.records import one_line
from kvfit.demo import TEXTS, demo_path
from kvfit.errors import MismatchError, OptionError, RefError, TextError
from kvfit.fit.capture.facts import MIN_CHARS, facts
from kvfit.fit.capture.local_text import BYTE_ORDER_MARK, LocalRows

LOGGER = logging.getLogger("kvfit")
DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu"
DEFAULT_CONFIG = "sample-10BT"
# The default text of `kvfit capture`, as REF=SHARE of the sequences.
DEFAULT_MIX = (f"{DEFAULT_DATASET}=3", "demo:facts=1")
FACTS = "demo:facts"
FACTS_COUNT = 10**9  # documents, more than any capture reads
RETRIES = 5
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TextOptions:
    """A text; part of a store's recipe.

    Attributes:
        dataset: ``demo:text``, a ``.jsonl``, ``.parquet`` or ``.txt`` file, a folder of such files, or a dataset on the Hub.
        config: the dataset's configuration, for the Hub.
        revision: commit, tag or branch, for the Hub.
        split: the dataset's split.
        column: the column that holds the text.
        share: share of the sequences, relative to the shares of other texts.
        least_chars: minimal length of a generated document in characters.
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
    """Texts from words ``REF`` or ``REF=SHARE``, with the other options where they apply.

    Configuration, revision and split apply to datasets of the Hub. If there are none, every text gets them and refuses them.
    An existing file whose name contains an equals sign is read as that file.

    Args:
        words: the words, at least one.
        options: options of all texts; dataset and share are ignored.

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
        RefError: the file or dataset does not exist.
        MismatchError: an option for datasets of the Hub is set for a local text.
        TextError: a document cannot be read, or the column is missing or holds no text.
    """
    stream = _open(options)
    position = start
    stream = stream.skip(position) if position else stream
    rows = iter(stream)
    attempt = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            if position == start == 0:
                raise TextError(f"{options.dataset}: found nothing in it, needed text") from None
            return
        except Exception as error:
            # If the connection is lost in the middle of a stream, open it again at this position, a bounded number of times.
            # A file of this machine is as damaged the next time.
            attempt += 1
            dropped, local = isinstance(error, OSError), isinstance(stream, LocalRows)
            if not dropped or local or attempt > RETRIES:
                raise _unreadable(_name(options, stream), error, position, local) from error
            seconds = min(2**attempt, 30)
            LOGGER.warning(
                "%s: found %s at document %d (%s); trying again in %d s, %d of %d",
                options.dataset, type(error).__name__, position, one_line(error, 200), seconds, attempt, RETRIES,
            )  # fmt: skip
            time.sleep(seconds)
            stream = _open(options).skip(position)
            rows = iter(stream)
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
        lone = None if text.isascii() else _LONE_SURROGATE.search(text)
        if lone is not None:
            raise TextError(
                f"{_name(options, stream)}: found \\u{ord(lone[0]):04x} at character {lone.start()} of document {position}, "
                "which is half of a character, needed whole ones for the tokenizer: remove it or write the character that was "
                "meant"
            )
        position += 1
        yield text.removeprefix(BYTE_ORDER_MARK)


def _name(options: TextOptions, stream: Any) -> str:
    """The dataset for an error message; in a folder, also the file that is being read."""
    file = stream.file if isinstance(stream, LocalRows) else None
    return options.dataset if file in (None, Path(options.dataset)) else f"{options.dataset}, {file.name}"


def _unreadable(name: str, error: Exception, position: int, local: bool) -> TextError:
    found = f"{name}: found {type(error).__name__} at document {position}"
    reason = one_line(error, 200)
    if not isinstance(error, OSError):
        return TextError(
            f"{found} or a few after it ({reason}), needed UTF-8 text, in .jsonl one JSON object per line: repair or remove "
            "what cannot be read"
        )
    if local:
        return TextError(
            f"{found} or a few after it ({reason}), needed a file that can be read to its end: replace it with a whole copy"
        )
    return TextError(
        f"{found} ({reason}), needed text that can be read to its end: run the same command later, a capture with --resume"
    )


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _open(options: TextOptions) -> Any:
    """The rows of a dataset, an iterable with a method ``skip``."""
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
            f"{options.dataset}: found no readable dataset ({one_line(error, 200)}), needed one: check its name, or pass a "
            "local file"
        ) from error
    # Other columns may change their type from file to file, which would stop the reader although they are not needed.
    return stream.select_columns([options.column]) if options.column in (stream.column_names or ()) else stream


@dataclass(frozen=True)
class _Facts:
    """The generated text of ``demo:facts``, which is practically endless."""

    options: TextOptions
    start: int = 0

    def skip(self, count: int) -> _Facts:
        return _Facts(self.options, count)

    def __iter__(self) -> Iterator[dict[str, str]]:
        texts = facts(0, FACTS_COUNT, min_chars=max(MIN_CHARS, self.options.least_chars))
        return ({self.options.column: text} for text in islice(texts, self.start, None))


def _check_local(options: TextOptions) -> None:
    """Refuse options that local text would ignore."""
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
