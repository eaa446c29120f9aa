"""Read text to evaluate on: different documents, none of which the map was fitted on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import TextError
from kvfit.fit.capture.sequences import sequences
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.stats import digests

# Documents with probes of their own would add a second set of questions.
PROBE_MARKS = ("[Codes", "[Recall")


@dataclass(frozen=True)
class Heldout:
    """Documents of one text.

    Attributes:
        ids: (N, T), token ids of N different documents.
        left_out: number of documents that were left out because the map was fitted on them.
    """

    ids: Tensor
    left_out: int


def heldout(text: TextOptions, tokenizer: Any, length: int, count: int, fitted: Collection[str] | None) -> Heldout:
    """The first suitable documents. They must differ, because otherwise the arm `shuffled` would not be a control.

    Args:
        text: the text.
        tokenizer: the tokenizer of both models.
        length: tokens per document.
        count: maximal number of documents.
        fitted: digests of the documents that the map was fitted on; None if they are not known.

    Raises:
        TextError: there are fewer than two.
    """
    rows: dict[tuple[int, ...], None] = {}
    left_out = 0
    for sequence in sequences(text, tokenizer, seq_len=length):
        if fitted is not None and sequence.documents[0] in fitted:
            left_out += 1
            continue
        rows.setdefault(tuple(sequence.ids))
        if len(rows) == count:
            break
    if len(rows) < 2 and left_out:
        raise TextError(
            f"{text.dataset}: found {len(rows)} different documents of {length} tokens beside {left_out} that the mapper was "
            f"fitted on, needed at least 2: evaluate on text that was not captured"
        )
    if len(rows) < 2:
        raise TextError(
            f"{text.dataset}: found {len(rows)} different documents of {length} tokens, needed at least 2: lower --prefix or "
            f"give more text"
        )
    return Heldout(torch.tensor(list(rows)), left_out)


def fillers(text: TextOptions, count: int, fitted: Collection[str] | None) -> list[str]:
    """Texts to hide facts in: the first documents without probes of their own that the map was not fitted on."""
    plain = (document for document in documents(text) if not any(mark in document for mark in PROBE_MARKS))
    return list(islice((one for one in plain if fitted is None or digests.digest(one) not in fitted), count))
