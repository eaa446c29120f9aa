"""Merge several stores of one recipe into one, as if one run had seen all their text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfit.bundle.records import to_json
from kvfit.errors import MismatchError, OptionError
from kvfit.fit.stats import digests, moments
from kvfit.fit.stats.layout import SPLITS, BlockArray, Chunk, Layout, Part
from kvfit.fit.stats.merged_recipe import OF_TEXT, merged_recipe, part_list, replaced
from kvfit.fit.stats.record import PART_FIELD, Array, Batches, Record, Tokens, first_difference
from kvfit.fit.stats.store import Store
from kvfit.fit.stats.writer import StoreWriter, building, publish, sync_tree

# The share of documents whose digests may be equal by chance: the odds that two stores of a million documents each have one in
# common are 1 in 280.
CHANCE = 2e-6


def merge(paths: Iterable[str | Path], out: str | Path, weights: Sequence[float] | None = None) -> Store:
    """Merge finished stores into a new one at `out`, block by block, so that only a few chunks are in memory.

    Each store sums about a shift of its own, so its products are first moved to one common shift, the mean over all parts,
    which adds the between-shard mean term; see `moments.reshift`. Except for rounding, the result does not depend on the order
    of the paths. The merged recipe is the common one, with ``{"merged": [...]}`` where parts differ; its field ``part`` lists
    all parts. The merged cursor holds what the parts' cursors have in common, with the documents of all of them.

    Args:
        paths: stores that agree in models, inputs, stats_dtype and recipe, apart from the field ``part``. Where all of them
            record their documents, as captures do, their texts may differ too: the fields `OF_TEXT`.
        out: the new store's folder. It must not exist, and appears whole or not at all.
        weights: one weight above 0 for each path; None for 1 each. The weights are divided by the largest, and each split of a
            store counts as its tokens times its weight, rounded to a whole token. So no store counts as more than it has seen.

    Returns:
        The merged store.

    Raises:
        MismatchError: the stores differ in a field, which is named with both values, or a store or a document is there twice.
        OptionError: there is not one weight for each store, or a weight is not above 0 or leaves a split without a token.
        StoreError: a store is missing, unfinished or damaged, `out` exists, or the disk fails.
    """
    stores = [Store.open(path) for path in paths]
    if not stores:
        raise MismatchError("no store to merge; name at least one")
    given = [1.0] * len(stores) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(stores) or not all(math.isfinite(weight) and weight > 0 for weight in given):
        found = ",".join(f"{weight:g}" for weight in given)
        raise OptionError(f"--weights: found {found}, needed {len(stores)} numbers above 0, one for each store")
    known = all(digests.of_cursor(store.record.cursor) for store in stores)
    _check_alike(stores, OF_TEXT if known else ())
    _check_documents(stores)
    counts = [_counts(store, weight / max(given)) for store, weight in zip(stores, given, strict=True)]
    common = _common_shift(stores, [sum(count.values()) for count in counts])
    parts = [_Shifted.of(store, common, count) for store, count in zip(stores, counts, strict=True)]
    records = [store.record for store in stores]
    place = Path(out)
    with building(place) as (root, lock):
        writer = StoreWriter.start_at(root, records[0].layout, merged_recipe(records, given), lock)
        if common:
            writer.write_shifts({name: shift.numpy() for name, shift in common.items()})
        for split in SPLITS:
            if any(part.counts[split] for part in parts):
                _merge_split(writer, parts, split)
        writer.commit(
            cursor=_merged_cursor(records),
            tokens=Tokens(*(sum(count[split] for count in counts) for split in SPLITS)),
            batches=_merged_batches(records),
            buffer_tokens=None,
            finished=True,
        )
        sync_tree(root)
        publish(root, place)
    writer.close()
    return Store.open(place)


def _counts(store: Store, share: float) -> dict[Part, int]:
    """The number of tokens that each split of a store counts as."""
    counts: dict[Part, int] = {split: round(store.count(split) * share) for split in SPLITS}
    lost = [split for split in SPLITS if store.count(split) and not counts[split]]
    if lost:
        raise OptionError(
            f"--weights: found {share:g} of the largest for {store.path}, so that its {store.count(lost[0])} tokens of the "
            f"{lost[0]} split count as none, needed a larger weight: or leave the store out"
        )
    return counts


@dataclass(frozen=True)
class _Shifted:
    """A store in a merge.

    Attributes:
        store: the store.
        delta: its shift less the common shift, by the name of the shift's array, (kinds, layers, features).
        counts: the number of tokens that each split counts as.
    """

    store: Store
    delta: Mapping[str, Tensor]
    counts: Mapping[Part, int]

    @classmethod
    def of(cls, store: Store, common: Mapping[str, Tensor], counts: Mapping[Part, int]) -> _Shifted:
        if not store.record.live.shift or not common:
            return cls(store, {}, counts)
        own = {array.name: store.shift(array) for array in store.record.layout.shifts}
        delta = {name: shift.to(torch.float64) - common[name].to(torch.float64) for name, shift in own.items()}
        return cls(store, delta, counts)

    def weight(self, split: Part) -> float:
        """The factor on the split's sums: exactly the ratio of the counts, so that means do not change."""
        return self.counts[split] / self.store.count(split)


def _common_shift(stores: Sequence[Store], counts: Sequence[int]) -> dict[str, Tensor]:
    """The mean over the tokens that all stores count as, in float32; empty where there are none."""
    n_tokens = sum(counts)
    if n_tokens == 0:
        return {}
    layout: Layout = stores[0].record.layout
    common = {}
    for array in layout.shifts:
        name = f"{array.name.removeprefix('shift/')}_sum"
        total = torch.zeros(array.shape, dtype=torch.float64)
        for store, count in zip(stores, counts, strict=True):
            if count:
                total += count / n_tokens * moments.mean(store.shift(array), store.sums("all", name), store.count("all"))
        common[array.name] = total.to(torch.float32)
    return common


def _merge_split(writer: StoreWriter, parts: Sequence[_Shifted], split: Part) -> None:
    present = [part for part in parts if part.counts[split]]
    digests = {array: [""] * len(array.chunks) for array in writer.layout.blocks}
    for array in writer.layout.blocks:
        for number, chunk in enumerate(array.chunks):
            total = torch.zeros(chunk.last - chunk.first, chunk.bottom - chunk.top, array.columns, dtype=torch.float64)
            for part in present:
                _add_chunk(total, part, split, array, number, chunk)
            digests[array][number] = writer.add_to_chunk(split, array, number, total.numpy())
    writer.end(split, digests, _merged_sums(present, split))


def _add_chunk(total: Tensor, part: _Shifted, split: Part, array: BlockArray, number: int, chunk: Chunk) -> None:
    store, count = part.store, part.store.count(split)
    stored = store.chunk(split, array, number)
    (left_name, left_place), (right_name, right_place) = array.vectors
    left_sum = store.sums(split, f"{left_name}_sum")[left_place]
    right_sum = store.sums(split, f"{right_name}_sum")[right_place]
    left_delta, right_delta = part.delta[f"shift/{left_name}"][left_place], part.delta[f"shift/{right_name}"][right_place]
    rows = slice(chunk.top, chunk.bottom)
    for place, pair in enumerate(range(chunk.first, chunk.last)):
        i, j = array.pairs[pair]
        products = torch.from_numpy(stored[place, : chunk.bottom - chunk.top].astype("f8"))
        moved = moments.reshift(products, left_sum[i, rows], right_sum[j], count, left_delta[i, rows], right_delta[j])
        total[place] += part.weight(split) * moved


def _merged_sums(parts: Sequence[_Shifted], split: Part) -> dict[str, Array]:
    totals: dict[str, Tensor] = {}
    for part in parts:
        store, count = part.store, part.store.count(split)
        deltas = {name.removeprefix("shift/"): delta for name, delta in part.delta.items()}
        moved = {
            f"{name}_sum": moments.reshift_sums(store.sums(split, f"{name}_sum"), count, delta)
            for name, delta in deltas.items()
        }
        square, target = store.sums(split, "target_square"), store.sums(split, "target_sum")
        moved["target_square"] = moments.reshift_squares(square, target, count, part.delta["shift/target"])
        weighted = {name: part.weight(split) * value for name, value in moved.items()}
        totals = {name: totals[name] + value if totals else value for name, value in weighted.items()}
    return {name: total.numpy() for name, total in totals.items()}


def _check_alike(stores: Sequence[Store], may_differ: Sequence[str]) -> None:
    """Refuse stores whose numbers differ in meaning, and a part that is there twice.

    Args:
        stores: the stores to merge.
        may_differ: fields of the recipe that may differ, where the documents are known.
    """
    seen: dict[str, Path] = {}
    for store in stores:
        # Known documents tell whether text is there twice. Then parts need no comparison: those of different captures have
        # the same numbers.
        parts = [] if may_differ else [json.dumps(part, sort_keys=True) for part in part_list(store.record)]
        for key in (os.path.realpath(store.path), *parts):
            if key in seen:
                raise MismatchError(f"{store.path} and {seen[key]} hold the same part; merge every part once")
        seen.update(dict.fromkeys((os.path.realpath(store.path), *parts), store.path))
        first, other = (_comparable(one.record, may_differ) for one in (stores[0], store))
        difference = first_difference(first, other, "")
        if difference is not None:
            field, one, two = difference
            raise MismatchError(
                f"{stores[0].path} has {field.lstrip('.')} = {one!r}, {store.path} has {two!r}; only stores that agree merge"
            )


def _check_documents(stores: Sequence[Store]) -> None:
    """Refuse the same text twice, where the stores record their documents."""
    seen: dict[str, Path] = {}
    for store in stores:
        found = digests.of_cursor(store.record.cursor) or []
        twice = [number for number, name in enumerate(found) if name in seen]
        if len(twice) > CHANCE * len(found):
            raise MismatchError(
                f"{store.path} and {seen[found[twice[0]]]} hold the same text: found {len(twice)} documents of the former in "
                f"the latter, first its number {twice[0]}, needed different documents: merge one of the two, or capture other "
                "text"
            )
        seen.update(dict.fromkeys(found, store.path))


def _merged_cursor(records: Sequence[Record]) -> dict[str, Any] | None:
    """What the parts' cursors have in common (where the text ended), and all documents if every part records its own."""
    cursors = [record.cursor for record in records]
    if not all(isinstance(cursor, Mapping) for cursor in cursors):
        return None
    merged = {key: value for key, value in cursors[0].items() if all(cursor.get(key) == value for cursor in cursors)}
    documents = [digests.of_cursor(cursor) for cursor in cursors]
    for name in ("captured", "captured_by_text", "passed", "passed_by_text"):
        merged.pop(name, None)
    if None not in documents:
        merged["captured"] = "".join(sorted(name for found in documents for name in found or ()))
    return merged


def _comparable(record: Record, may_differ: Sequence[str]) -> dict[str, Any]:
    recipe = {name: value for name, value in record.recipe.items() if name != PART_FIELD}
    for field in may_differ:
        recipe = replaced(recipe, field, None)
    models = {"source": to_json(record.source), "target": to_json(record.target)}
    return {
        **models,
        "inputs": record.inputs,
        "stats_dtype": record.stats_dtype,
        "lexical_lags": list(record.lexical_lags),
        "recipe": recipe,
    }


def _merged_batches(records: Sequence[Record]) -> Batches:
    seen = sum(record.batches.seen for record in records)
    quarantined = sum(record.batches.quarantined for record in records)
    return Batches(seen, quarantined, next((r.batches.first for r in records if r.batches.first is not None), None))
