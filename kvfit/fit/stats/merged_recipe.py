"""The recipe of a merged store, and what the recipes of its parts may differ in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvfit.bundle.records import value_at
from kvfit.fit.stats.record import PART_FIELD, Record

# Fields of the recipe that say which text was read and in which portions; statistics of different texts can be added too.
WEIGHTS_FIELD = "weights"  # of a merged recipe: how much each text counts, where that is not 1 each
OF_TEXT = ("text", "options.num_sequences", "options.seed", "batch_size")


def merged_recipe(records: Sequence[Record], weights: Sequence[float]) -> dict[str, Any]:
    """The common recipe, in an order of its own where parts differ, so that the order of the paths leaves no trace.

    Sequences add up over captures. The parts of one `torchrun` say how many all of them made, so they belong into one merge: in
    two, one after the other, they are counted twice.
    """
    recipe = {name: value for name, value in records[0].recipe.items() if name != PART_FIELD}
    # Captures of one text and options, by how often the same part of them is there.
    captures: dict[str, list[Record]] = {}
    for record in records:
        captures.setdefault(
            json.dumps([value_at(record.recipe, *field.split(".")) for field in OF_TEXT], sort_keys=True), []
        ).append(record)
    counts = []
    for same in captures.values():
        parts = [json.dumps(part, sort_keys=True) for record in same for part in part_list(record)]
        counts += [value_at(same[0].recipe, "options", "num_sequences")] * max((parts.count(part) for part in parts), default=1)
    if len(counts) > 1 and all(type(count) is int for count in counts):
        recipe = replaced(recipe, "options.num_sequences", sum(counts))
    for field in OF_TEXT:
        values = [value for same in captures.values() for value in _unmerged(value_at(same[0].recipe, *field.split(".")))]
        different = {json.dumps(value, sort_keys=True): value for value in values}
        if field != "options.num_sequences" and len(different) > 1:
            recipe = replaced(recipe, field, {"merged": [different[key] for key in sorted(different)]})
    if set(weights) != {1.0}:
        weighted = [
            {"text": record.recipe.get("text"), "weight": weight} for record, weight in zip(records, weights, strict=True)
        ]
        recipe = {**recipe, WEIGHTS_FIELD: sorted(weighted, key=lambda entry: json.dumps(entry, sort_keys=True))}
    parts = [part for record in records for part in part_list(record)]
    return {**recipe, PART_FIELD: {"merged": sorted(parts, key=lambda part: json.dumps(part, sort_keys=True))}}


def part_list(record: Record) -> list[Any]:
    """The parts in a store: what its recipe's field says, those of a merge one by one; none where it says nothing."""
    part = record.recipe.get(PART_FIELD)
    return [] if part is None else _unmerged(part)


def replaced(recipe: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A recipe with another value in a field; unchanged where it has no such field."""
    name, _, rest = field.partition(".")
    if name not in recipe or (rest and not isinstance(recipe[name], Mapping)):
        return dict(recipe)
    return {**recipe, name: replaced(recipe[name], rest, value) if rest else value}


def _unmerged(value: Any) -> list[Any]:
    return list(value["merged"]) if isinstance(value, Mapping) and set(value) == {"merged"} else [value]
