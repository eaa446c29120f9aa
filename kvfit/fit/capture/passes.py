"""The main loop of a capture: run batches of sequences through both models and add them to the statistics."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import StoreError, TextError
from kvfit.fit.capture.activations import Activations
from kvfit.fit.capture.options import Options
from kvfit.fit.capture.ranks import Ranks
from kvfit.fit.capture.sequences import Cursor, Sequence, due, interleaved
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.progress import Progress
from kvfit.fit.stats.accumulate import Accumulator
from kvfit.fit.stats.digests import Documents
from kvfit.fit.stats.layout import SPLITS, Group, Part


@dataclass(frozen=True)
class State:
    """The state of a capture, which is the store's cursor.

    Attributes:
        cursors: position of reading, per text.
        documents: the documents that were used.
        added: splits of the next batch that are already in the statistics. A batch with both splits is added in two steps,
            and the store may commit between them. Then the cursor before the batch is committed with the first split. On
            resuming, the batch is run again and that split is left out, so that batches stay aligned and bits the same.
    """

    cursors: tuple[Cursor, ...]
    documents: Documents
    added: tuple[Part, ...] = ()

    @classmethod
    def of(cls, accumulator: Accumulator, n_texts: int) -> State:
        """The state that a store was committed with.

        Raises:
            StoreError: the store was not written by a capture.
        """
        stored = accumulator.cursor
        if stored is None:
            return cls((Cursor(),) * n_texts, Documents.of(n_texts))
        if not isinstance(stored, Mapping) or len(stored.get("texts", ())) != n_texts or "captured" not in stored:
            raise StoreError(f"{accumulator.path}: found no record of its documents, needed one: capture into another --out")
        cursors = tuple(Cursor(**cursor) for cursor in stored["texts"])
        return cls(cursors, Documents.from_json(stored, n_texts), tuple(stored.get("added", ())))

    @property
    def sequences(self) -> int:
        """Number of sequences read so far, of all texts together."""
        return sum(cursor.sequences for cursor in self.cursors)

    @property
    def short(self) -> int:
        """Number of documents that were shorter than a sequence."""
        return sum(cursor.short for cursor in self.cursors)

    @property
    def repeated(self) -> int:
        """Number of documents that had occurred before."""
        return sum(cursor.repeated for cursor in self.cursors)

    def after(self, batch: list[Sequence], *, own: bool) -> State:
        """The state after a batch was added to the statistics of this process (`own`) or of another."""
        cursors, documents = list(self.cursors), self.documents.copy()
        for sequence in batch:
            cursors[sequence.text] = sequence.cursor
            documents.add(sequence.text, sequence.documents, own=own)
        return State(tuple(cursors), documents)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values, for the store's cursor."""
        added = {"added": list(self.added)} if self.added else {}
        return {"texts": [cursor.to_json() for cursor in self.cursors], **self.documents.to_json(), **added}


@dataclass(frozen=True)
class Passes:
    """The loop of a capture.

    Attributes:
        runners: source and target.
        texts: the texts.
        tokenizer: the tokenizer of both models.
        options: what is captured.
        batch_size: sequences per forward pass.
        ranks: this process among all processes.
    """

    runners: tuple[Activations, Activations]
    texts: tuple[TextOptions, ...]
    tokenizer: Any
    options: Options
    batch_size: int
    ranks: Ranks

    def run(self, accumulator: Accumulator, progress: Progress) -> State:
        """Add all sequences that are not in the store yet.

        Raises:
            TextError: a text ends before it has given its share.
        """
        options, state = self.options, State.of(accumulator, len(self.texts))
        stream = interleaved(
            self.texts,
            self.tokenizer,
            seq_len=options.seq_len,
            pack=options.pack,
            cursors=state.cursors,
            seen=state.documents.all(),
        )
        while state.sequences < options.num_sequences:
            batch, end = _batch(stream, min(self.batch_size, options.num_sequences - state.sequences))
            own = self.ranks.owns(state.sequences // self.batch_size)
            following = state.after(batch, own=own)
            if own and batch:
                self._add(accumulator, batch, state, following)
            state = following
            progress.advance(len(batch))
            if end is not None:
                self._refuse(state, end, resumable=accumulator.resumable)
        return state

    def _add(self, accumulator: Accumulator, batch: list[Sequence], state: State, following: State) -> None:
        ids = torch.tensor([sequence.ids for sequence in batch])
        source, target = (runner(ids) for runner in self.runners)
        if "lexical" in target:  # the target computes it, but it is an input of the map
            source["lexical"] = target.pop("lexical")
        splits = [self.options.split(state.sequences + row) for row in range(len(batch))]
        added = list(state.added)
        waiting = [split for split in SPLITS if split in splits and split not in added]
        while waiting:
            split = waiting.pop(0)
            added.append(split)
            rows = [row for row, found in enumerate(splits) if found == split]
            reached = State(state.cursors, state.documents, tuple(added)) if waiting else following
            accumulator.add(split, _pooled(source, rows), _pooled(target, rows), reached.to_json())

    def _refuse(self, state: State, end: Cursor, *, resumable: bool) -> None:
        text = self.texts[due((text.share for text in self.texts), (cursor.sequences for cursor in state.cursors))]
        several = f" of all {self.options.num_sequences}" if len(self.texts) > 1 else ""
        needed = self.options.num_sequences * text.share / sum(one.share for one in self.texts)
        found = (
            f"{text.dataset}: found {end.sequences} sequences of {self.options.seq_len} tokens ({end.short} documents "
            f"were shorter, {end.repeated} repeated), needed {needed:.0f}{several}: "
        )
        fewer = "lower --num-sequences or --seq-len, or pass --pack"
        if not resumable:
            raise TextError(f"{found}{fewer}, or give more text")
        raise TextError(f"{found}add text to it and pass --resume; or {fewer}, with another --out")


def _batch(stream: Generator[Sequence, None, Cursor], size: int) -> tuple[list[Sequence], Cursor | None]:
    """The next sequences, and, where the stream ends among them, where its text ended."""
    batch: list[Sequence] = []
    while len(batch) < size:
        try:
            batch.append(next(stream))
        except StopIteration as end:
            ended: Cursor = end.value
            return batch, ended
    return batch, None


def _pooled(features: Mapping[Group, list[Tensor]], rows: list[int]) -> dict[Group, list[Tensor]]:
    """Per layer, from (B, N, F) to (B' * N, F), for the chosen rows."""
    return {group: [layer[rows].flatten(0, 1) for layer in layers] for group, layers in features.items()}
