"""The cost of a map against written-out sums, and prefills counted and guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_mappers import model_spec, spec_of
from torch.utils.flop_counter import FlopCounterMode
from zoo import FAMILIES, build

from kvfit.cost import PASS_TOKENS, Prefill, affordable_parameters, cost_of, lexical_flops, map_cost, map_parameters, prefill_of
from kvfit.fit.capture import models
from kvfit.fit.capture.ranks import Ranks
from kvfit.fit.capture.recipe import make_recipe
from kvfit.fit.capture.text import TextOptions
from kvfit.model.first_layer import first_layer
from kvfit.spec import KINDS, LayerMap, MapperSpec


def spec(**changes: Any) -> MapperSpec:
    source, target = model_spec(3, 2, 16), model_spec(4, 2, 8)
    lags = changes.pop("lexical_lags", ())
    layers = tuple(LayerMap(kind, t, (0, 1, 2), 0.1, 0.5, 0.5) for t in range(1 if lags else 0, 4) for kind in KINDS)
    return replace(MapperSpec(2, "1", source, target, False, "full", "both", "none", "float32", layers, lags), **changes)


def test_weights_are_those_of_every_matrix() -> None:
    assert map_parameters(spec()) == 8 * (192 * 16)
    made = spec(lexical_lags=(0, 1), rank=5)
    assert map_parameters(made) == (192 + 2 * 32) * 5 + 6 * 5 * 16
    tensors = [torch.empty(made.basis_shape), *(torch.empty(made.weight_shape(m.kind, m.layer_index)) for m in made.layers)]
    assert map_parameters(made) == sum(tensor.numel() for tensor in tensors)


def test_a_cost_is_two_operations_a_weight_and_a_reading_a_pass() -> None:
    prefill = Prefill(1_000_000, 2)
    cost = map_cost(spec(), prefill)
    assert cost.flops_per_token == 2 * 8 * 192 * 16
    assert cost.bytes_per_token == 4 * 8 * 192 * 16 / PASS_TOKENS
    assert cost.prefill_flops_per_token == 2_000_000
    # In float32 the bytes decide, next to a model of 16 bits.
    assert cost.share == pytest.approx(4 * 8 * 192 * 16 / 2_000_000)
    assert map_cost(spec(dtype="bfloat16"), prefill).share == pytest.approx(cost.share / 2)
    assert cost.to_json()["share"] == cost.share
    lexical = spec(lexical_lags=(0,))
    assert map_cost(lexical, prefill).flops_per_token == 2 * map_parameters(lexical) + lexical_flops(lexical.target, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("extra", [0.0, 5e4])
def test_the_most_that_is_affordable_is_within_the_share_and_one_more_is_not(dtype: str, extra: float) -> None:
    prefill = Prefill(1_000_000, 2)
    most = affordable_parameters(dtype, prefill, 0.05, extra)
    assert cost_of(most, dtype, prefill, extra).share <= 0.05
    assert cost_of(most + 1, dtype, prefill, extra).share > 0.05
    assert affordable_parameters(dtype, prefill, 0.01, 1e9) == 0


def test_a_prefill_is_counted_where_the_recipe_says_it_and_guessed_elsewhere() -> None:
    target = model_spec(4, 2, 8)
    recipe = {"models": [{"decoder_parameters": 7}, {"decoder_parameters": 123}]}
    assert (prefill_of(target, recipe).parameters, prefill_of(target, recipe).estimated) == (123, False)
    for without in (None, {}, {"models": [{}, {}]}, {"models": {"merged": []}}, {"models": [{}, {"decoder_parameters": "x"}]}):
        guessed = prefill_of(target, without)
        assert guessed.estimated
        assert guessed.parameters > 0


def test_the_guess_is_of_the_right_size_for_a_published_model() -> None:
    """Qwen3-32B: 64 layers of 8 KV heads and 64 query heads of 128, 31.2 billion weights in its layers."""
    target = replace(model_spec(64, 8, 128), n_query_heads=40)  # whose hidden size is 5,120
    assert prefill_of(target).parameters == pytest.approx(31.2e9, rel=0.35)


@pytest.mark.parametrize(("name", "sizes"), [("qwen3", {}), ("gemma3", {}), ("qwen3", {"hidden_size": 192, "head_dim": 32})])
def test_the_first_layer_costs_what_torch_counts(name: str, sizes: dict[str, int]) -> None:
    """Query heads times head size are 64 features here, or 128; a token between layers has another number of them."""
    model = build(next(f for f in FAMILIES if f.name == name), **({"hidden_size": 96} | sizes))
    spec, loading = spec_of(model), (models.Options(), models.Options())
    recipe = make_recipe([spec, spec], [model, model], (TextOptions("demo:text"),), {}, loading, 1, Ranks())
    with FlopCounterMode(display=False) as counted:
        first_layer(model, torch.arange(8)[None])
    prefill = prefill_of(spec, recipe)
    flops = lexical_flops(spec, 1, prefill.hidden_size)
    # The counter also sees the product of positions and inverse frequencies.
    assert 8 * flops == pytest.approx(counted.get_total_flops(), rel=0.01)
    assert lexical_flops(spec, 1) < 0.8 * flops  # what is guessed without a recipe
    lexical = MapperSpec(2, "1", spec, spec, False, "full", "same", "none", "float32", tuple(
        LayerMap(kind, t, (0,), 0.1, 0.5, 0.5) for t in range(1, spec.n_layers) for kind in KINDS), (0,))  # fmt: skip
    assert map_cost(lexical, prefill).flops_per_token - 2 * map_parameters(lexical) == flops
