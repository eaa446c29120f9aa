"""The self-check against specs with one thing wrong: each must be refused, though a round trip forgives every one."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, VOCABULARY, Tokenizer, build

from kvfit.errors import UnsupportedModelError
from kvfit.fit.capture.selfcheck import self_check
from kvfit.model import cache as caches
from kvfit.model.identity import describe_model
from kvfit.model.rope import angles, rotate, unrotate
from kvfit.spec import ModelSpec, RopeSpec, RopeTable

BY_NAME = {family.name: family for family in FAMILIES}


def wrong_theta(spec: RopeSpec) -> RopeSpec:
    return _each_table(spec, lambda table: tuple(value**0.8 for value in table.inverse_frequencies))


def slightly_wrong_theta(spec: RopeSpec) -> RopeSpec:
    """0.1 % on the fastest plane: invisible at position 1, plain at 1,000."""
    return _each_table(spec, lambda table: (table.inverse_frequencies[0] * 1.001, *table.inverse_frequencies[1:]))


def wrong_pairing(spec: RopeSpec) -> RopeSpec:
    other = {"half": "interleaved", "interleaved": "half"}
    tables = tuple(dataclasses.replace(table, pairing=other[table.pairing]) for table in spec.tables)
    return dataclasses.replace(spec, tables=tables)


def scaling_squared(spec: RopeSpec) -> RopeSpec:
    tables = tuple(dataclasses.replace(table, attention_scaling=table.attention_scaling**2) for table in spec.tables)
    return dataclasses.replace(spec, tables=tables)


def scaling_missed(spec: RopeSpec) -> RopeSpec:
    return dataclasses.replace(spec, tables=tuple(dataclasses.replace(table, attention_scaling=1.0) for table in spec.tables))


def rotates_everywhere(spec: RopeSpec) -> RopeSpec:
    return dataclasses.replace(spec, assignment=tuple(0 if index is None else index for index in spec.assignment))


def rotates_nowhere(spec: RopeSpec) -> RopeSpec:
    return dataclasses.replace(spec, assignment=(None,) * len(spec.assignment))


def tables_swapped(spec: RopeSpec) -> RopeSpec:
    return dataclasses.replace(spec, assignment=tuple(1 - index for index in spec.assignment if index is not None))


def whole_width(spec: RopeSpec) -> RopeSpec:
    """As if a partial rotation were a whole one."""
    tables = tuple(
        RopeTable(tuple(1e4 ** (-plane / 8) for plane in range(8)), 16, table.pairing, table.attention_scaling)
        for table in spec.tables
    )
    return dataclasses.replace(spec, tables=tables)


def _each_table(spec: RopeSpec, frequencies: Any) -> RopeSpec:
    tables = tuple(dataclasses.replace(table, inverse_frequencies=frequencies(table)) for table in spec.tables)
    return dataclasses.replace(spec, tables=tables)


CASES = [
    ("qwen3", wrong_theta, 0),
    ("qwen3", slightly_wrong_theta, 0),
    ("qwen3", wrong_pairing, 0),
    ("qwen3", rotates_nowhere, 0),
    ("glm", wrong_pairing, 0),
    ("glm", whole_width, 0),
    ("cohere", wrong_pairing, 0),
    ("gpt-neox", whole_width, 0),
    ("phi3-partial", whole_width, 0),
    ("llama-yarn", scaling_squared, 0),
    ("llama-yarn", scaling_missed, 0),
    ("gemma3", tables_swapped, 0),
    ("smollm3", rotates_everywhere, 2),
    ("cohere2", rotates_everywhere, 2),
    ("exaone4", rotates_everywhere, 2),
]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (1, 1040), generator=torch.Generator().manual_seed(5))


def describe(model: Any) -> ModelSpec:
    return describe_model(model, Tokenizer(), ref="org/name", revision=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "damage", "layer_index"), CASES, ids=[f"{name}-{damage.__name__}" for name, damage, _ in CASES]
)
def test_a_wrong_spec_round_trips_and_is_refused(
    name: str, damage: Any, layer_index: int, dtype: torch.dtype, ids: Tensor
) -> None:
    model = build(BY_NAME[name], dtype)
    spec = describe(model)
    wrong = dataclasses.replace(spec, rope=damage(spec.rope))

    cache = caches.full_cache()
    caches.forward(model, ids[:, :50], cache, base=True)
    for index, (keys, _) in enumerate(caches.read_cache(cache)):
        table = wrong.rope.table(index)
        cos_sin = (torch.empty(0), torch.empty(0)) if table is None else angles(table, torch.arange(50))
        again = rotate(unrotate(keys, table, cos_sin, dtype=torch.float32), table, cos_sin)
        torch.testing.assert_close(again, keys.float(), rtol=1e-5, atol=1e-5)  # the round trip sees nothing

    with pytest.raises(UnsupportedModelError, match=rf"{spec.family}, layer {layer_index}: ") as caught:
        self_check(model, wrong, ids)
    assert "rotary function" in str(caught.value) or "the spec says" in str(caught.value)


def test_the_right_spec_passes(ids: Tensor) -> None:
    for name in sorted({name for name, _, _ in CASES}):
        model = build(BY_NAME[name])
        self_check(model, describe(model), ids)


def test_biases_hundreds_of_times_the_spread_hide_nothing(ids: Tensor) -> None:
    """Errors are measured against each plane, so one huge feature does not hide the others."""
    model = build(BY_NAME["qwen2"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[3] += 500.0
    spec = describe(model)
    self_check(model, spec, ids)
    table = spec.rope.tables[0]
    frequencies = list(table.inverse_frequencies)
    frequencies[6] *= 1.01  # a slow plane without the bias
    wrong = dataclasses.replace(spec, rope=_each_table(spec.rope, lambda _: tuple(frequencies)))
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        self_check(model, wrong, ids)


def test_another_geometry_is_refused(ids: Tensor) -> None:
    model = build(BY_NAME["qwen3"])
    spec = describe(model)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: found keys of shape \(1, 2, 20, 16\), needed \(1, 4, 20, 16\)"):
        self_check(model, dataclasses.replace(spec, n_heads=4), ids[:, :20])
    longer = dataclasses.replace(
        spec, n_layers=4, windows=(None,) * 4, rope=dataclasses.replace(spec.rope, assignment=(0,) * 4)
    )
    with pytest.raises(UnsupportedModelError, match="layer 3: the layer cached keys 0 times"):
        self_check(model, longer, ids[:, :20])
    shorter = dataclasses.replace(
        spec, n_layers=2, windows=(None,) * 2, rope=dataclasses.replace(spec.rope, assignment=(0,) * 2)
    )
    with pytest.raises(UnsupportedModelError, match="layer 2: found a layer beyond the 2"):
        self_check(model, shorter, ids[:, :20])
