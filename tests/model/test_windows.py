"""Windowed layers: captured at full length, mapped at full length, dropped by the target's own cache, to the bit."""

from typing import Any

import pytest
import torch
from made_mappers import cache_of, identity_mapper, mapper_spec, same, spec_of
from torch import Tensor
from zoo import FAMILIES, VOCABULARY, Family, build

from kvfit.errors import MismatchError
from kvfit.fit.capture.activations import Activations
from kvfit.model import cache as caches
from kvfit.runtime.mapper import Mapper

BY_NAME = {family.name: family for family in FAMILIES}
WINDOWED = [family for family in FAMILIES if family.windows is not None]
LENGTH, WINDOW = 60, 24


def ids_of(n_tokens: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (2, n_tokens), generator=torch.Generator().manual_seed(4))


def run(model: Any, ids: Tensor, cache: Any) -> Any:
    caches.forward(model, ids, cache, base=True)
    return cache


def copying_mapper(model: Any) -> Mapper:
    """A model to itself with keys left rotated: weight one and bias zero, so that not one bit may change on the way."""
    side = spec_of(model)
    spec = mapper_spec(side, side, [[index] for index in range(side.n_layers)], keys_rotated=True)
    widths = {(layer.kind, layer.layer_index): side.width_of(layer.kind, layer.layer_index) for layer in spec.layers}
    return Mapper(spec, {key: (torch.eye(width), torch.zeros(width)) for key, width in widths.items()})


def by_token(states: Tensor, n_tokens: int) -> Tensor:
    """(B, T, H * D) of a projection's or a norm's output, whichever way it lies."""
    if states.dim() == 4 and states.shape[1] != n_tokens:
        states = states.transpose(1, 2)
    return states.flatten(2)


@pytest.mark.parametrize("family", WINDOWED, ids=lambda family: family.name)
def test_capture_sees_every_token_of_every_layer(family: Family) -> None:
    """Against hooks on the model's own projections, tokens far outside the window included."""
    model, ids = build(family), ids_of(LENGTH)
    spec = spec_of(model)
    assert spec.windows == family.windows
    made: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for layer in model.model.layers[:3]:  # those behind them read the keys and values of these
        attention = layer.self_attn
        scale = getattr(attention, "v_scale", 1.0)
        last = getattr(attention, "k_norm", attention.k_proj)
        last.register_forward_hook(lambda _module, _inputs, out: made["keys"].append(by_token(out, LENGTH)))
        last = getattr(attention, "v_norm", attention.v_proj)
        last.register_forward_hook(
            lambda _module, _inputs, out, scale=scale: made["values"].append(by_token(out, LENGTH) * scale)
        )
    captured = Activations(model, spec, range(LENGTH))(ids)
    for layer_index in range(3):
        assert captured["keys"][layer_index].shape == (2, LENGTH, spec.width_of("keys", layer_index))
        torch.testing.assert_close(captured["keys"][layer_index], made["keys"][layer_index], rtol=2e-6, atol=2e-5)
        assert torch.equal(captured["values"][layer_index], made["values"][layer_index])


@pytest.mark.parametrize("family", WINDOWED, ids=lambda family: family.name)
def test_full_length_capture_is_what_the_models_own_cache_would_have_kept(family: Family) -> None:
    model, ids = build(family), ids_of(LENGTH)
    full = caches.read_cache(run(model, ids, caches.full_cache()))
    native = run(model, ids, caches.new_cache(model))
    windows = family.windows or ()
    for (keys, values), layer, window in zip(full, caches.own_layers(native), windows, strict=True):
        kept = LENGTH if window is None else window - 1
        assert keys.shape[2] == LENGTH
        assert torch.equal(layer.keys, keys[:, :, LENGTH - kept :])
        assert torch.equal(layer.values, values[:, :, LENGTH - kept :])


@pytest.mark.parametrize("family", WINDOWED, ids=lambda family: family.name)
def test_transfer_continues_bit_for_bit_like_the_cache_that_was_never_copied(family: Family) -> None:
    model, ids = build(family), ids_of(LENGTH + 12)
    native = run(model, ids[:, :LENGTH], caches.new_cache(model))
    source = run(model, ids[:, :LENGTH], caches.full_cache())
    moved = copying_mapper(model).transfer(source, target_model=model)
    assert same(moved, native)
    assert [layer.get_seq_length() for layer in caches.own_layers(moved)] == [LENGTH] * 3
    # A block, then token by token over what the window has to drop on the way.
    block = [caches.forward(model, ids[:, LENGTH : LENGTH + 4], cache) for cache in (moved, native)]
    assert torch.equal(block[0], block[1])
    for step in range(LENGTH + 4, LENGTH + 12):
        one = [caches.forward(model, ids[:, step : step + 1], cache) for cache in (moved, native)]
        assert torch.equal(one[0], one[1])
    assert same(moved, native)


@pytest.mark.parametrize("family", WINDOWED, ids=lambda family: family.name)
@pytest.mark.parametrize("first", [10, WINDOW - 1, WINDOW, 40])
def test_turn_by_turn_is_bit_for_bit_the_same(family: Family, first: int) -> None:
    """`into=` a cache that has not filled its windows, just fills them, or has dropped tokens already."""
    model, ids = build(family), ids_of(LENGTH)
    mapper = copying_mapper(model)
    pairs = caches.read_cache(run(model, ids, caches.full_cache()))
    grown = mapper.transfer([(keys[:, :, :first], values[:, :, :first]) for keys, values in pairs], target_model=model)
    mapper.transfer(pairs, into=grown, target_model=model)
    native = run(model, ids, caches.new_cache(model))
    assert same(grown, native)
    more = ids_of(LENGTH + 6)[:, LENGTH:]
    assert torch.equal(caches.forward(model, more, grown), caches.forward(model, more, native))


@pytest.mark.parametrize("family", WINDOWED, ids=lambda family: family.name)
def test_un_rotated_maps_truncate_what_they_made_and_nothing_else(family: Family) -> None:
    """The cache holds the last tokens of the full-length result bit for bit; values are the native ones bit for bit."""
    model, ids = build(family), ids_of(LENGTH)
    mapper = identity_mapper(model)
    source = run(model, ids, caches.full_cache())
    whole = mapper.transfer_layers(source, target_model=model)
    moved = mapper.transfer(source, target_model=model)
    native = run(model, ids, caches.new_cache(model))
    for (keys, values), mine, theirs in zip(whole, caches.own_layers(moved), caches.own_layers(native), strict=True):
        kept = theirs.keys.shape[2]
        assert torch.equal(mine.keys, keys[:, :, LENGTH - kept :])
        assert torch.equal(mine.values, values[:, :, LENGTH - kept :])
        assert torch.equal(mine.values, theirs.values)
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window", "olmo3"])
def test_a_static_cache_as_the_targets(name: str) -> None:
    """Made by the caller with room for the answer; windowed static layers keep what they need too."""
    from transformers import StaticCache

    model, ids = build(BY_NAME[name]), ids_of(LENGTH + 8)
    static = StaticCache(config=model.config, max_cache_len=LENGTH + 8)
    source = run(model, ids[:, :LENGTH], caches.full_cache())
    assert copying_mapper(model).transfer(source, into=static, target_model=model) is static
    assert caches.cache_length(static) == LENGTH
    native = run(model, ids[:, :LENGTH], caches.new_cache(model))
    wanted = caches.forward(model, ids[:, LENGTH:], native)
    found = caches.forward(model, ids[:, LENGTH:], static)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    small = StaticCache(config=model.config, max_cache_len=LENGTH - 1)
    if name != "mistral-window":  # whose layers all drop what they do not need, so that there is always room
        with pytest.raises(MismatchError, match=r"into, layer [01]: found room for 59 tokens, needed 60"):
            copying_mapper(model).transfer(source, into=small, target_model=model)


def test_one_token_too_few_would_be_seen() -> None:
    """The control: the bit check notices a cache that a truncated source would have given."""
    model, ids = build(BY_NAME["gemma3"]), ids_of(LENGTH)
    native = run(model, ids, caches.new_cache(model))
    short = [(keys[:, :, 1:], values[:, :, 1:]) for keys, values in caches.read_cache(run(model, ids, caches.full_cache()))]
    moved = copying_mapper(model).transfer(cache_of(short), target_model=model)
    assert not same(moved, native)
    more = ids_of(LENGTH + 6)[:, LENGTH:]
    assert not torch.equal(caches.forward(model, more, moved), caches.forward(model, more, native))
