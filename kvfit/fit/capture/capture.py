"""The verb `capture`: run both models on the same tokens, and accumulate their second moments in a store.

The models run once per pair. Everything after that is linear algebra on the store.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvfit.bundle.files import require_writable
from kvfit.errors import BundleError, OptionError, StoreError, TextError, UnsupportedModelError
from kvfit.fit.capture import models
from kvfit.fit.capture.activations import Activations, check_positions
from kvfit.fit.capture.options import LEXICAL_LAGS, Options
from kvfit.fit.capture.passes import Passes, State
from kvfit.fit.capture.ranks import Ranks, meeting
from kvfit.fit.capture.recipe import make_recipe
from kvfit.fit.capture.selfcheck import self_check
from kvfit.fit.capture.sequences import beginnings, sequences
from kvfit.fit.capture.text import DEFAULT_MIX, TextOptions, mix
from kvfit.fit.progress import Progress, duration
from kvfit.fit.stats.accumulate import Accumulator
from kvfit.fit.stats.budget import check_budget, free_share
from kvfit.fit.stats.commits import SNAPSHOT_SECONDS
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.merge import merge
from kvfit.fit.stats.record import PART_FIELD, as_json, read_record, require_same
from kvfit.fit.stats.store import Store
from kvfit.model.decoder import input_device
from kvfit.model.first_layer import check_first_layer
from kvfit.model.identity import describe_model
from kvfit.spec import ModelSpec

LOGGER = logging.getLogger("kvfit")

__all__ = ["LEXICAL_LAGS", "Captured", "Options", "capture"]


@dataclass(frozen=True)
class Captured:
    """The result of `capture`.

    Attributes:
        store: folder of the store.
        sequences: number of sequences that were run.
        short: number of documents that were skipped because they were shorter than a sequence.
        repeated: number of documents that were skipped because they had occurred before.
        tokens: number of tokens in the statistics, without those of batches that were left out.
    """

    store: Path
    sequences: int
    short: int
    repeated: int
    tokens: int

    def __str__(self) -> str:
        skipped = f"{self.short} short and {self.repeated} repeated documents skipped"
        return f"{self.store}: {self.tokens} tokens of {self.sequences} sequences ({skipped})"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "store": str(self.store)}


def capture(
    source: str,
    target: str,
    out: str | Path,
    *,
    text: TextOptions | Iterable[TextOptions] | None = None,
    options: Options | None = None,
    loading: tuple[models.Options, models.Options] | None = None,
    revisions: tuple[str | None, str | None] = (None, None),
    batch_size: int = 8,
    memory_budget: int | Literal["auto"] = "auto",
    snapshot_seconds: float = SNAPSHOT_SECONDS,
    stats_device: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Captured:
    """Run both models on calibration text and accumulate their statistics.

    Under torchrun, each process adds its own batches to its own part next to `out`, and the first process merges the parts. If
    the capture fails before its first commit, nothing is left behind. After that, the commits stay for `resume`.

    Args:
        source: ref of the source model.
        target: ref of the target model.
        out: the store; must not exist unless `resume`.
        text: the text, or several texts that take turns by their shares; capture's own mix by default.
        options: what is captured.
        loading: how source and target are loaded.
        revisions: revisions of source and target.
        batch_size: sequences per forward pass; it does not change the statistics beyond rounding.
        memory_budget: bytes for the token buffer and the statistics, besides the models; ``auto`` for half of the memory of
            the statistics' device that is free after the models were loaded. Statistics that fit stay in memory.
        snapshot_seconds: time between two snapshots of statistics in memory.
        stats_device: device that sums the statistics; None for the source's device.
        resume: continue an interrupted store, or start a new one if there is none.
        progress: whether to show progress.

    Raises:
        MismatchError: the tokenizers differ, or an option does not fit this pair or this text.
        OptionError: an option has a wrong value.
        UnsupportedModelError: a model cannot be verified; names family, layer and reason.
        TextError: the text is unreadable or too short.
        StoreError: the store exists, is locked, or has another recipe.
    """
    options = options or Options()
    text = text or mix(DEFAULT_MIX, TextOptions())
    texts = (text,) if isinstance(text, TextOptions) else tuple(text)
    loading = loading or (models.Options(), models.Options())
    check_batch_size(batch_size)
    out, ranks = Path(out), Ranks.from_environment()
    part = ranks.part(out)
    _check_place(out, part, resume, ranks)
    pair, specs = _checked_pair(list(zip((source, target), revisions, loading, strict=True)), texts, options, batch_size, ranks)
    lags = lexical_lags(options.lexical, pair[1].model)
    options = replace(options, lexical=lags)
    device = _current(models.find_device(stats_device) if stats_device else input_device(pair[0].model))
    budget = free_share(device) // ranks.size if memory_budget == "auto" else memory_budget
    layout = Layout(specs[0], specs[1], options.inputs, options.stats_dtype, lags)
    check_budget(layout, budget)
    recipe = make_recipe(specs, [loaded.model for loaded in pair], texts, asdict(options), loading, batch_size, ranks)
    if ranks.size > 1 and out.exists():
        return _merged_before(out, recipe, options, ranks)
    runners = [Activations(pair[0].model, specs[0], options.kept), Activations(pair[1].model, specs[1], options.kept, lags)]
    place: dict[str, Any] = {"memory_budget": budget, "snapshot_seconds": snapshot_seconds, "device": device}
    if resume and part.exists():
        accumulator = Accumulator.resume(part, layout, recipe=recipe, **place)
    else:
        accumulator = Accumulator.create(part, layout, recipe=recipe, **place)
    passes = Passes((runners[0], runners[1]), texts, pair[0].tokenizer, options, batch_size, ranks)
    with Progress(
        "capture", options.num_sequences, "sequences", initial=State.of(accumulator, len(texts)).sequences,
        plan=f"{source} and {target} over sequences of {options.seq_len} tokens into {part}, statistics "
        + (f"in memory, a snapshot every {duration(snapshot_seconds)}" if accumulator.in_memory else "on disk, block by block"),
        show=progress,
    ) as shown:  # fmt: skip
        try:
            with accumulator:
                state = passes.run(accumulator, shown)
                if not accumulator.finished:
                    accumulator.finish(state.to_json())
        except BaseException:
            if _is_empty(part):  # without a commit there is nothing to resume
                shutil.rmtree(part, ignore_errors=True)
            raise
        _merge_parts(out, ranks)
        shown.finish(f"statistics in {out}", then=f"kvfit solve {out} --out BUNDLE")
    return Captured(out, state.sequences, state.short, state.repeated, _tokens_of(Store.open(out)))


def _checked_pair(
    wanted: Sequence[tuple[str, str | None, models.Options]],
    texts: tuple[TextOptions, ...],
    options: Options,
    batch_size: int,
    ranks: Ranks,
) -> tuple[list[models.Loaded], list[ModelSpec]]:
    """Source and target with their specs, verified on the first batch; `wanted` has their refs, revisions and options."""
    # Cheap checks come before the weights are loaded: the tokenizers, and whether there is enough text for one batch.
    tokenizers = [
        models.load_tokenizer(ref, revision, trust_remote_code=how.trust_remote_code) for ref, revision, how in wanted
    ]
    models.check_tokenizers(*tokenizers)
    for ref, revision, how in wanted:
        config = models.load_config(ref, revision, trust_remote_code=how.trust_remote_code)
        check_positions(config, ref, options.seq_len, "--seq-len")
    first = _first_batch(texts, options, tokenizers[0], batch_size)
    models.check_encodings(tokenizers[0], tokenizers[1], beginnings(texts, options.num_sequences, options.seq_len))
    pair = []
    for (ref, revision, how), tokenizer in zip(wanted, tokenizers, strict=True):
        placed = how if how.device or how.device_map else replace(how, device=ranks.device())
        pair.append(models.load(ref, revision, placed, tokenizer=tokenizer))
    specs = [describe_model(loaded.model, loaded.tokenizer, ref=loaded.ref, revision=loaded.revision) for loaded in pair]
    for loaded, spec in zip(pair, specs, strict=True):
        self_check(loaded.model, spec, first)
    return pair, specs


def _current(device: torch.device) -> torch.device:
    """The device, made the current one of the process, because libraries use the current GPU's streams and memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _merge_parts(out: Path, ranks: Ranks) -> None:
    """Let the first process merge the parts after all processes have finished theirs."""
    with meeting(ranks):
        if ranks.size > 1 and ranks.rank == 0:
            merge(ranks.parts(out), out)
            for path in ranks.parts(out):
                shutil.rmtree(path)


def _merged_before(out: Path, recipe: dict[str, Any], options: Options, ranks: Ranks) -> Captured:
    """The result of a capture that several processes had already finished and merged; removes the remaining parts."""
    store = Store.open(out)
    require_same(out, store.recipe | {PART_FIELD: None}, as_json(recipe) | {PART_FIELD: None}, "recipe")
    if ranks.rank == 0:
        for path in ranks.parts(out):
            shutil.rmtree(path, ignore_errors=True)
    cursors = (store.record.cursor or {}).get("texts", ())
    short, repeated = (sum(cursor[name] for cursor in cursors) for name in ("short", "repeated"))
    return Captured(out, options.num_sequences, short, repeated, _tokens_of(store))


def _tokens_of(store: Store) -> int:
    """Number of tokens in a finished store. Warns if batches were left out of it, because nothing else would show that."""
    found = store.quarantined()
    if found["first"] is not None:
        first = found["first"]
        LOGGER.warning(
            "capture: %d of %d batches are not in the statistics, because they hold values that are not finite, first in the "
            "%s's %s of layer %d: run the models in bfloat16 or float32",
            found["quarantined"], found["seen"], *first.values(),
        )  # fmt: skip
    return store.count("all")


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch size below 1.

    Raises:
        OptionError: the batch size is below 1.
    """
    if batch_size < 1:
        raise OptionError(f"--batch-size: found {batch_size}, needed at least 1")


def lexical_lags(wanted: tuple[int, ...] | Literal["auto"], target: Any) -> tuple[int, ...]:
    """The lags that `Options.lexical` stands for with a target model.

    Raises:
        UnsupportedModelError: lags were requested, but the keys and values of the target's first layer depend on more than
            the token and its position.
    """
    if wanted:
        try:
            check_first_layer(target)
        except UnsupportedModelError as error:
            if wanted != "auto":
                raise
            LOGGER.info("capture: no lexical inputs: %s", error)
            return ()
    return LEXICAL_LAGS if wanted == "auto" else wanted


def _is_empty(part: Path) -> bool:
    """Whether nothing was committed according to the record on disk, which may be newer than the accumulator's state."""
    try:
        return read_record(part).cursor is None
    except StoreError:
        return False


def _check_place(out: Path, part: Path, resume: bool, ranks: Ranks) -> None:
    """Refuse an existing store unless it is resumed, and a place that cannot be written, before anything runs."""
    existing = [path for path in (out, part) if path.exists()]
    if existing and not resume:
        raise StoreError(
            f"{existing[0]}: found something there already, needed a new path: choose another --out, or continue it with "
            "--resume"
        )
    first = Ranks(0, 2).part(out)
    if resume and ranks.size == 1 and not existing and first.exists():
        raise StoreError(
            f"{first}: found the part of one process of several, needed as many processes as before: start it with torchrun"
        )
    if not existing:
        try:
            require_writable(out)
        except BundleError as error:
            raise StoreError(str(error)) from None


def _first_batch(texts: tuple[TextOptions, ...], options: Options, tokenizer: Any, batch_size: int) -> Tensor:
    """(B, T) ids for the self-check. A text without a single sequence is refused."""
    found: list[list[int]] = []
    for text in texts:
        first = islice(sequences(text, tokenizer, seq_len=options.seq_len, pack=options.pack), max(1, 2 // len(texts)))
        rows = [sequence.ids for sequence in first]
        if not rows:
            raise TextError(
                f"{text.dataset}: found no document of {options.seq_len} tokens, needed some: lower --seq-len, or join "
                "documents with --pack"
            )
        found += rows
    return torch.tensor(found[: min(batch_size, 2)])
