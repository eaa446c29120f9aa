"""Text to evaluate on: different documents, and none that the map was fitted on."""

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

# A text that holds probes of its own would ask two things at once.
PROBE_MARKS = ("[Codes", "[Recall")


@dataclass(frozen=True)
class Heldout:
    """Documents of one text.

    Attributes:
        ids: (N, T), of N different documents.
        left_out: documents before the last of them that were not taken because the map was fitted on them.
    """

    ids: Tensor
    left_out: int


def heldout(text: TextOptions, tokenizer: Any, length: int, count: int, fitted: Collection[str] | None) -> Heldout:
    """The first documents that can be used. With the same one twice, the arm `shuffled` would be no control.

    Args:
        text: where they come from.
        tokenizer: of both models.
        length: tokens of each.
        count: most documents.
        fitted: digests of the documents that the map was fitted on; None where that is not known.

    Raises:
        TextError: fewer than two are left.
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
    """Texts to hide probes in: the first documents that hold none of their own and that the map was not fitted on."""
    plain = (document for document in documents(text) if not any(mark in document for mark in PROBE_MARKS))
    return list(islice((one for one in plain if fitted is None or digests.digest(one) not in fitted), count))
