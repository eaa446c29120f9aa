"""The recipe of a merged store, and the fields in which the recipes of its parts may differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvfit.bundle.records import value_at
from kvfit.fit.stats.record import PART_FIELD, Record

WEIGHTS_FIELD = "weights"  # the field of a merged recipe that says how much each text counts, where not all count 1
# The fields that say which text was read and in which portions. Statistics of different texts can be merged too.
OF_TEXT = ("text", "options.num_sequences", "options.seed", "batch_size")


def merged_recipe(records: Sequence[Record], weights: Sequence[float]) -> dict[str, Any]:
    """The common recipe. Where parts differ, their values are sorted, so that the order of the paths makes no difference.

    The numbers of sequences are summed over captures. Each part of one `torchrun` records the number that all parts made
    together, so they belong into one merge: in two successive merges they would be counted twice.
    """
    recipe = {name: value for name, value in records[0].recipe.items() if name != PART_FIELD}
    # The records of each capture: of one text with one set of options.
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
    """The parts of a store, from its recipe: one for a capture, several for a merged store, none where it says nothing."""
    part = record.recipe.get(PART_FIELD)
    return [] if part is None else _unmerged(part)


def replaced(recipe: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The recipe with another value in a field, whose path may have dots; unchanged where it has no such field."""
    name, _, inner = field.partition(".")
    if name not in recipe or (inner and not isinstance(recipe[name], Mapping)):
        return dict(recipe)
    return {**recipe, name: replaced(recipe[name], inner, value) if inner else value}


def _unmerged(value: Any) -> list[Any]:
    return list(value["merged"]) if isinstance(value, Mapping) and set(value) == {"merged"} else [value]
