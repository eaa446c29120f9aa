"""The verb `capture`: both models over the same tokens, their second moments into a store.

The models run once per pair; everything after that is linear algebra on the store.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvfit.errors import OptionError, StoreError, TextError
from kvfit.fit import models
from kvfit.fit.accumulate import Accumulator
from kvfit.fit.activations import Activations
from kvfit.fit.layout import SPLITS, Part, StatsDtype
from kvfit.fit.merge import merge
from kvfit.fit.ranks import Ranks, meeting
from kvfit.fit.recipe import make_recipe
from kvfit.fit.selfcheck import self_check
from kvfit.fit.text import Cursor, Sequence, TextOptions, sequences
from kvfit.identity import describe_model
from kvfit.spec import Inputs, Kind


@dataclass(frozen=True)
class Options:
    """What is captured; all of it is part of the store's recipe.

    Attributes:
        num_sequences: sequences to run, both splits together.
        seq_len: tokens of a sequence.
        token_stride: every how many tokens one is kept for the statistics.
        skip_tokens: first tokens of each sequence to leave out.
        holdout: share of the sequences that goes to the holdout split.
        seed: shifts which sequences these are.
        pack: join documents and cut them, instead of one sequence per document.
        inputs: ``both`` also keeps keys by values, so that each kind can be predicted from both.
        stats_dtype: of the stored sums.
    """

    num_sequences: int = 500
    seq_len: int = 1024
    token_stride: int = 4
    skip_tokens: int = 0
    holdout: float = 0.1
    seed: int = 0
    pack: bool = False
    inputs: Inputs = "same"
    stats_dtype: StatsDtype = "float32"

    def __post_init__(self) -> None:
        for name, least in (("num_sequences", 2), ("seq_len", 2), ("token_stride", 1), ("skip_tokens", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"--{name.replace('_', '-')}: found {getattr(self, name)}, needed at least {least}")
        if self.skip_tokens >= self.seq_len:
            raise OptionError(f"--skip-tokens: found {self.skip_tokens}, needed less than --seq-len {self.seq_len}")
        if not 0 <= self.holdout < 1:
            raise OptionError(f"--holdout: found {self.holdout}, needed 0 or more and less than 1")

    @property
    def kept(self) -> range:
        """Positions of a sequence whose tokens are kept."""
        return range(self.skip_tokens, self.seq_len, self.token_stride)

    def split(self, index: int) -> Part:
        """The split of sequence `index`: evenly spread, so that any run of sequences holds its share."""
        phase = random.Random(self.seed).random()
        return "holdout" if math.floor((index + 1) * self.holdout + phase) > math.floor(index * self.holdout + phase) else "fit"


@dataclass(frozen=True)
class Captured:
    """What `capture` made."""

    store: Path
    sequences: int
    short: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.store}: {self.tokens} tokens of {self.sequences} sequences ({self.short} short documents skipped)"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "store": str(self.store)}


def capture(
    source: str,
    target: str,
    out: str | Path,
    *,
    text: TextOptions | None = None,
    options: Options | None = None,
    loading: tuple[models.Options, models.Options] | None = None,
    revisions: tuple[str | None, str | None] = (None, None),
    batch_size: int = 8,
    memory_budget: int = 2 << 30,
    resume: bool = False,
    progress: bool = True,
) -> Captured:
    """Run both models over calibration text and accumulate their statistics.

    Started by torchrun, each process takes its own batches into a part of its own beside `out`, and the first merges them.

    Args:
        source: ref of the source model.
        target: ref of the target model.
        out: the store; must not exist unless `resume`.
        text: where the text comes from.
        options: what is captured.
        loading: how source and target are loaded.
        revisions: of source and target.
        batch_size: sequences per forward pass; does not change the statistics beyond rounding.
        memory_budget: bytes for the token buffer and blocks, beyond the models.
        resume: go on with a store that was interrupted.
        progress: show bars.

    Raises:
        MismatchError: the tokenizers differ.
        OptionError: an option that cannot be.
        UnsupportedModelError: a model that cannot be proved right; names family, layer and reason.
        TextError: the text is unreadable or too short.
        StoreError: the store exists, is locked, or has another recipe.
    """
    options, text = options or Options(), text or TextOptions()
    loading = loading or (models.Options(), models.Options())
    check_batch_size(batch_size)
    out, ranks = Path(out), Ranks.from_environment()
    part = ranks.part(out)
    _check_place(out, part, resume, ranks)
    # Cheap checks before weights are loaded: tokenizers, then whether there is enough text for one batch.
    tokenizers = [
        models.load_tokenizer(ref, revision, trust_remote_code=how.trust_remote_code)
        for ref, revision, how in zip((source, target), revisions, loading, strict=True)
    ]
    models.check_tokenizers(*tokenizers)
    first = _first_batch(text, options, tokenizers[0], batch_size)
    placed = [how if how.device or how.device_map else replace(how, device=ranks.device()) for how in loading]
    pair = [
        models.load(ref, revision, how, tokenizer=tokenizer)
        for ref, revision, how, tokenizer in zip((source, target), revisions, placed, tokenizers, strict=True)
    ]
    specs = [describe_model(loaded.model, loaded.tokenizer, ref=loaded.ref, revision=loaded.revision) for loaded in pair]
    for loaded, spec in zip(pair, specs, strict=True):
        self_check(loaded.model, spec, first)
    recipe = make_recipe(specs, text, asdict(options), loading, batch_size, ranks)
    runners = [Activations(loaded.model, spec, options.kept) for loaded, spec in zip(pair, specs, strict=True)]
    if resume and part.exists():
        accumulator = Accumulator.resume(part, recipe=recipe, memory_budget=memory_budget, device=runners[0].device)
    else:
        accumulator = Accumulator.create(
            part,
            source=specs[0],
            target=specs[1],
            recipe=recipe,
            inputs=options.inputs,
            stats_dtype=options.stats_dtype,
            memory_budget=memory_budget,
            device=runners[0].device,
        )
    with accumulator:
        cursor = _run(accumulator, runners, text, options, tokenizers[0], batch_size, ranks, progress)
        if not accumulator.finished:
            accumulator.finish(cursor.to_json())
    with meeting(ranks):
        if ranks.size > 1 and ranks.rank == 0:
            merge(ranks.parts(out), out)
            for path in ranks.parts(out):
                shutil.rmtree(path)
    return Captured(out, cursor.sequences, cursor.short, cursor.sequences * len(options.kept))


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch of nothing.

    Raises:
        OptionError: less than 1.
    """
    if batch_size < 1:
        raise OptionError(f"--batch-size: found {batch_size}, needed at least 1")


def _check_place(out: Path, part: Path, resume: bool, ranks: Ranks) -> None:
    """Refuse before anything runs: an existing store that is not to be resumed, or nothing to resume."""
    if resume and not (part.exists() or any(path.exists() for path in ranks.parts(out))):
        raise StoreError(f"{part}: found nothing there, needed a store to resume: leave --resume out")
    existing = [path for path in {out, part} if path.exists() and not (resume and path == part)]
    if existing:
        raise StoreError(
            f"{existing[0]}: found something there already, needed a new path: choose another --out, or pass --resume"
        )


def _first_batch(text: TextOptions, options: Options, tokenizer: Any, batch_size: int) -> Tensor:
    """(B, T) ids for the self-check; refuses text that has not one sequence."""
    first = list(islice(sequences(text, tokenizer, seq_len=options.seq_len, pack=options.pack), min(batch_size, 2)))
    if not first:
        raise TextError(
            f"{text.dataset}: found no document of {options.seq_len} tokens, needed some: lower --seq-len, or join documents "
            f"with --pack"
        )
    return torch.tensor([sequence.ids for sequence in first])


def _run(
    accumulator: Accumulator,
    runners: list[Activations],
    text: TextOptions,
    options: Options,
    tokenizer: Any,
    batch_size: int,
    ranks: Ranks,
    progress: bool,
) -> Cursor:
    # A batch of both splits is two additions, and the store may commit between them. What is committed then is the cursor
    # before the batch and the splits of it that are in: the batch is run again and those are left out, so that batches stay
    # aligned and a resumed run gives the same bits.
    stored = dict(accumulator.cursor or Cursor().to_json())
    added = stored.pop("added", [])
    cursor = Cursor(**stored)
    stream = sequences(text, tokenizer, seq_len=options.seq_len, pack=options.pack, cursor=cursor)
    with tqdm(
        total=options.num_sequences, initial=cursor.sequences, desc="capture", unit="seq", disable=None if progress else True
    ) as bar:
        for batch in _batches(stream, options.num_sequences - cursor.sequences, batch_size):
            if not ranks.owns(cursor.sequences // batch_size):
                cursor = batch[-1].cursor
                bar.update(len(batch))
                continue
            ids = torch.tensor([sequence.ids for sequence in batch])
            source, target = (runner(ids) for runner in runners)
            splits = [options.split(cursor.sequences + row) for row in range(len(batch))]
            following = batch[-1].cursor
            waiting = [split for split in SPLITS if split in splits and split not in added]
            while waiting:
                split = waiting.pop(0)
                added = [*added, split]
                rows = [row for row, of in enumerate(splits) if of == split]
                state = {**cursor.to_json(), "added": added} if waiting else following.to_json()
                accumulator.add(split, _pooled(source, rows), _pooled(target, rows), state)
            added, cursor = [], following
            bar.update(len(batch))
    if cursor.sequences < options.num_sequences:
        raise TextError(
            f"{text.dataset}: found {cursor.sequences} sequences of {options.seq_len} tokens ({cursor.short} documents were "
            f"shorter), needed {options.num_sequences}: lower --num-sequences or --seq-len, pass --pack, or give more text"
        )
    return cursor


def _batches(stream: Iterator[Sequence], count: int, batch_size: int) -> Iterator[list[Sequence]]:
    remaining = islice(stream, count)
    while batch := list(islice(remaining, batch_size)):
        yield batch


def _pooled(features: Mapping[Kind, list[Tensor]], rows: list[int]) -> dict[Kind, list[Tensor]]:
    """(B, N, F) per layer to (B' * N, F) of the chosen rows."""
    return {kind: [layer[rows].flatten(0, 1) for layer in layers] for kind, layers in features.items()}
