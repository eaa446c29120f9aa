"""A model mapped to itself by the identity must go on exactly as it would have: caches, windows and rotation all agree."""

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, UNLISTED, VOCABULARY, Family, Tokenizer, build

from kvfit.model import cache as caches
from kvfit.model.generate import generate
from kvfit.model.identity import describe_model
from kvfit.runtime.mapper import Mapper
from kvfit.spec import FORMAT_VERSION, KINDS, LayerMap, MapperSpec, ModelSpec

PROMPT, STEPS = 70, 64
VARIED: list[bool] = []


def identity_mapper(model: Any) -> Mapper:
    """Every target layer reads its own layer with the unit matrix, on un-rotated keys."""
    spec: ModelSpec = describe_model(model, Tokenizer(), ref="org/name", revision=None)
    layers = tuple(LayerMap(kind, index, (index,), 0.0, 1.0, 1.0) for index in range(spec.n_layers) for kind in KINDS)
    mapper = MapperSpec(FORMAT_VERSION, "0", spec, spec, False, "full", "same", "none", "float32", layers)
    widths = {(layer.kind, layer.layer_index): spec.width_of(layer.kind, layer.layer_index) for layer in layers}
    unit = {key: (torch.eye(width), torch.zeros(width)) for key, width in widths.items()}
    return Mapper(mapper, unit, verdict="pass")


def prompt() -> Tensor:
    return torch.randint(2, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("family", FAMILIES + UNLISTED, ids=lambda family: family.name)
def test_64_greedy_steps_are_those_of_plain_prefill(family: Family) -> None:
    model = build(family)
    ids = prompt()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    source = caches.full_cache()
    caches.forward(model, ids[:, :-1], source, base=True)
    mapped = identity_mapper(model).transfer(source, into=caches.new_cache(model))
    assert caches.cache_length(mapped) == PROMPT - 1
    found = generate(model, ids, mapped, **options)
    assert wanted.shape == (2, PROMPT + STEPS)
    assert torch.equal(found, wanted)
    VARIED.append(len(wanted[:, PROMPT:].unique()) > 2)


def test_models_do_not_repeat_one_token() -> None:
    """A model that does would agree with anything. Looks at what the tests before it saw."""
    assert sum(VARIED) >= 2 * len(VARIED) // 3


def test_the_test_can_fail() -> None:
    """The same with keys left as they were rotated for other positions: the continuation changes."""
    model = build(next(family for family in FAMILIES if family.name == "qwen3"))
    ids = prompt()
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False)
    source = caches.full_cache()
    caches.forward(model, ids[:, :-1], source, base=True)
    shifted = [(keys.roll(1, 2), values) for keys, values in caches.read_cache(source)]
    mapped = identity_mapper(model).transfer(shifted, into=caches.new_cache(model))
    assert not torch.equal(generate(model, ids, mapped, max_new_tokens=STEPS, do_sample=False), wanted)
