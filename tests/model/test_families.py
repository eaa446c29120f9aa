"""Every rotary scheme against what the model itself gave its rotary function, recorded by a spy of the test's own.

A spec goes through JSON first, as in a bundle: the un-rotation sees no model.
"""

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, UNLISTED, VOCABULARY, Family, Tokenizer, build

from kvfit.bundle.records import from_json, to_json
from kvfit.fit.capture.selfcheck import self_check
from kvfit.model import cache as caches
from kvfit.model.identity import describe_model
from kvfit.model.rope import angles, rotate, unrotate
from kvfit.spec import ModelSpec

BY_NAME = {family.name: family for family in FAMILIES + UNLISTED}
SPIED = [family for family in FAMILIES + UNLISTED if family.name != "gpt2"]
DTYPES = [torch.float32, torch.bfloat16]


def describe(model: Any) -> ModelSpec:
    spec = describe_model(model, Tokenizer(), ref="org/name", revision="0" * 40)
    return from_json(ModelSpec, json.loads(json.dumps(to_json(spec))))


@contextmanager
def spy(model: Any) -> Iterator[list[Tensor]]:
    """Records the keys that the model's modeling code hands to its apply_rotary_pos_emb(q, k, cos, sin)."""
    module = sys.modules[type(model).__module__]
    original = module.apply_rotary_pos_emb
    given: list[Tensor] = []

    def recording(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(k.clone())
        return original(q, k, *args, **kwargs)

    calls: list[Tensor] = []

    def recording_each(x: Tensor, *args: Any, **kwargs: Any) -> Any:  # (B, T, H, D), queries and keys one by one
        if x.shape[2] < 4:
            given.append(x.transpose(1, 2).clone())
        return original(x, *args, **kwargs)

    def recording_one(states: Tensor, sin: Tensor, cos: Tensor) -> Any:  # keys (B, T, H, D) first, then queries
        if len(calls) % 2 == 0:
            given.append(states.transpose(1, 2).clone())
        calls.append(states)
        return original(states, sin, cos)

    first = next(iter(inspect.signature(original).parameters))
    module.apply_rotary_pos_emb = {"q": recording, "x": recording_each}.get(first, recording_one)
    try:
        yield given
    finally:
        module.apply_rotary_pos_emb = original


def run(model: Any, first: int, n_tokens: int = 6) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Cached keys, the keys given to the rotary function, and positions."""
    ids = torch.randint(0, VOCABULARY, (2, n_tokens), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(first, first + n_tokens)
    cache = caches.full_cache()
    with spy(model) as given:
        caches.forward(model, ids, cache, position_ids=positions[None].expand(2, -1))
    return [keys for keys, _ in caches.read_cache(cache)], given, positions


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", SPIED, ids=lambda family: family.name)
def test_unrotated_keys_are_what_the_model_gave_its_rotary_function(family: Family, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    spec = describe(model)
    assert spec.rope.assignment == family.assignment
    assert spec.windows == (family.windows or (None,) * 3)
    assert {table.pairing for table in spec.rope.tables} == {family.pairing}
    assert {table.rotated_width for table in spec.rope.tables} == family.rotated_widths
    assert spec.rope.tables[0].attention_scaling == pytest.approx(family.scaling, rel=1e-12)
    assert (spec.n_layers, spec.n_query_heads, spec.head_dim) == (3, 4, 16)
    assert spec.n_heads == (4 if family.name in ("gpt-neox", "persimmon", "gptj", "codegen", "mimo-v2-flash") else 2)
    assert spec.geometry == family.geometry

    for first in (0, 1, 1500):
        cached, given, positions = run(model, first)
        rotating = iter(given)
        for layer_index, keys in enumerate(cached):
            table = spec.rope.table(layer_index)
            assert (table is None) == (family.assignment[layer_index] is None)
            if table is None:
                continue
            wanted = next(rotating).float()
            if family.name == "nanochat":  # normalised after the rotation, which may as well be before
                wanted = wanted * (wanted.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
            stripped = unrotate(keys, table, angles(table, positions), dtype=torch.float32)[..., : wanted.shape[-1]]
            scale = wanted.abs().max()
            limit = 2e-6 if dtype == torch.float32 else 2e-2  # bfloat16: cosines, products and the sum were each rounded
            assert (stripped - wanted).abs().max() <= limit * scale
            cos_sin = angles(table, positions)
            again = rotate(unrotate(keys, table, cos_sin, dtype=torch.float32), table, cos_sin).to(dtype)
            torch.testing.assert_close(again, keys, rtol=2e-6 if dtype == torch.float32 else 8e-3, atol=1e-5)
            assert dtype == torch.float32 or (again == keys).float().mean() > 0.99
        assert next(rotating, None) is None  # every call was accounted for


@pytest.mark.parametrize("name", ["smollm3", "exaone4", "cohere2"])
def test_layers_that_do_not_rotate_are_what_their_projection_made(name: str) -> None:
    model = build(BY_NAME[name])
    attention = model.model.layers[2].self_attn
    made: list[Tensor] = []
    last = getattr(attention, "k_norm", attention.k_proj)
    last.register_forward_hook(lambda _module, _inputs, output: made.append(output))
    spec = describe(model)
    assert spec.rope.table(2) is None
    made.clear()
    cached, given, positions = run(model, 1500)
    assert len(given) == 2
    keys = cached[2]
    by_head = made[0] if made[0].shape == keys.shape else made[0].reshape(2, 6, 2, 16).transpose(1, 2)
    assert torch.equal(keys, by_head)
    any_angles = angles(spec.rope.tables[0], positions)
    assert torch.equal(unrotate(keys, spec.rope.table(2), any_angles), keys)


def default_frequencies(theta: float, width: int, divided: float = 1.0) -> list[float]:
    return [theta ** (-2 * plane / width) / divided for plane in range(width // 2)]


@pytest.mark.parametrize(
    ("name", "table", "wanted"),
    [
        ("qwen3", 0, default_frequencies(1e6, 16)),
        ("llama", 0, default_frequencies(1e4, 16)),
        ("llama-linear", 0, default_frequencies(1e4, 16, 4.0)),
        ("gemma3", 0, default_frequencies(1e4, 16)),
        ("gemma3", 1, default_frequencies(1e6, 16)),
        ("glm", 0, default_frequencies(1e4, 8)),
        ("phi3-partial", 0, default_frequencies(1e4, 12)),
        ("stablelm", 0, default_frequencies(1e4, 4)),
    ],
)
def test_frequencies_are_those_of_the_published_formula(name: str, table: int, wanted: list[float]) -> None:
    spec = describe(build(BY_NAME[name]))
    assert spec.rope.tables[table].inverse_frequencies == pytest.approx(wanted, rel=1e-6)


def test_a_bfloat16_and_a_float32_load_have_the_same_tables() -> None:
    for name in ("qwen3", "gemma3", "llama-yarn", "glm"):
        one, other = (describe(build(BY_NAME[name], dtype)) for dtype in DTYPES)
        assert one.rope == other.rope
        assert (one.dtype, other.dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize("name", ["qwen3", "llama-yarn-1.277", "gemma3", "glm4", "cohere2", "gpt-neox", "gpt-oss", "exaone4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_the_self_check_passes_past_position_1000(name: str, dtype: torch.dtype) -> None:
    model = build(BY_NAME[name], dtype)
    self_check(model, describe(model), torch.randint(0, VOCABULARY, (2, 1100)))


def test_learned_positions_count_as_no_rotation() -> None:
    model = build(BY_NAME["gpt2"])
    spec = describe(model)
    assert spec.rope.tables == ()
    assert spec.rope.assignment == (None, None, None)
    self_check(model, spec, torch.randint(0, VOCABULARY, (2, 50)))
