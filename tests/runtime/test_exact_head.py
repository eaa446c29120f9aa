"""The default of `exact_head`: one number for everything that moves, judges or serves a conversation, and short ones."""

import dataclasses
import inspect

import pytest
import torch
from made_mappers import content, mapper_spec, prefilled, random_mapper, same, spec_of

from kvfit import handoff
from kvfit.cli.main import cli
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.pair import Pair
from kvfit.model import cache as caches
from kvfit.runtime import EXACT_HEAD
from kvfit.vllm.options import ConnectorOptions


@pytest.fixture(scope="module")
def pair(tiny_pair, load):
    """Both models and a random mapper between them, so that a mapped token is far from the target's own."""
    source, target = (load(folder).model for folder in tiny_pair)
    return source, target, random_mapper(mapper_spec(spec_of(source), spec_of(target), [[0, 1], [1], [1, 2], [2]]))


def tokens(batch, length):
    return torch.randint(5, 2000, (batch, length), generator=torch.Generator().manual_seed(0))


def test_whoever_moves_a_conversation_has_the_same_default():
    """`KvfitLM` too: see tests/fit/evaluate/test_harness.py."""
    (option,) = [one for one in cli.commands["evaluate"].params if one.name == "exact_head"]
    fields = {
        kind: {field.name: field.default for field in dataclasses.fields(kind)} for kind in (Options, Pair, ConnectorOptions)
    }
    found = {
        "handoff": inspect.signature(handoff).parameters["exact_head"].default,
        "kvfit evaluate": option.default,
        **{kind.__name__: defaults["exact_head"] for kind, defaults in fields.items()},
    }
    assert set(found.values()) == {EXACT_HEAD} == {16}, found


def check(moved, pair, ids, n_exact, mask=None):
    """The first tokens are the target's own, and the others what the map makes of the source's."""
    source, target, mapper = pair
    prefix = ids.shape[1] - 1
    seen = None if mask is None else mask[:, :prefix]
    own = prefilled(target, ids[:, :prefix], seen) if prefix else caches.new_cache(target)
    assert moved.status == "applied"
    assert moved.remaining_ids.shape[1] == 1
    assert moved.n_reused + moved.n_exact + moved.n_mapped == prefix
    assert moved.n_mapped == prefix - n_exact
    found, native = content(moved.cache), content(own)
    assert len(found) == len(native)
    real = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask != 0
    for ours, theirs in zip(found, native, strict=True):
        difference = (ours - theirs).abs().amax((1, 3)) * real[:, :prefix]
        assert bool((difference[:, :n_exact] < 1e-4).all())
        assert bool((difference[:, n_exact:] > 1e-2).all())  # the control: no mapped token is like the target's own
    if n_exact < prefix:
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, :prefix]
        pairs = caches.read_cache(prefilled(source, ids[:, :prefix], seen))
        mapped = content(mapper.transfer(pairs, positions=positions))
        for ours, theirs in zip(found, mapped, strict=True):
            assert torch.allclose(ours[:, :, n_exact:], theirs[:, :, n_exact:], atol=1e-5)


@pytest.mark.parametrize(("length", "n_exact"), [(1, 0), (2, 1), (16, 15), (17, 16), (18, 16), (21, 16)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_short_conversation_is_mapped_from_its_seventeenth_token_on(pair, batch, length, n_exact):
    source, target, mapper = pair
    ids = tokens(batch, length)
    check(handoff(mapper, target, ids, prefilled(source, ids)), pair, ids, n_exact)


def test_a_tail_that_meets_the_head_leaves_nothing_to_map(pair):
    source, target, mapper = pair
    ids = tokens(1, 20)
    check(handoff(mapper, target, ids, prefilled(source, ids), exact_tail=3), pair, ids, 19)
    moved = handoff(mapper, target, ids, prefilled(source, ids), exact_tail=2)
    assert (moved.n_exact, moved.n_mapped) == (18, 1)


def test_padding_comes_before_the_head(pair):
    """Every row has sixteen exact tokens of its own or more, so the longest padding and they are exact in all rows."""
    source, target, mapper = pair
    for length, n_exact in ((20, 19), (22, 19)):
        ids = tokens(2, length)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        moved = handoff(mapper, target, ids, prefilled(source, ids, mask), attention_mask=mask)
        check(moved, pair, ids, n_exact, mask)


@pytest.mark.parametrize(("held", "n_exact"), [(1, 15), (5, 11), (16, 0), (19, 0)])
def test_tokens_that_the_target_holds_count_as_the_head(pair, held, n_exact):
    source, target, mapper = pair
    ids = tokens(2, 22)
    own = prefilled(target, ids[:, :held])
    kept = content(own)
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=own, target_ids=ids[:, :held])
    assert (moved.n_reused, moved.n_exact) == (held, n_exact)
    assert same([half[:, :, :held] for half in content(moved.cache)], kept)
    check(moved, pair, ids, held + n_exact)


def test_a_static_cache_gets_the_rest_of_the_head_behind_what_it_holds(pair):
    from transformers import StaticCache

    source, target, mapper = pair
    ids = tokens(1, 22)
    given = {"target_ids": ids[:, :5]}
    static = prefilled(target, ids[:, :5], cache=StaticCache(config=target.config, max_cache_len=28))
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=static, **given)
    wanted = handoff(mapper, target, ids, prefilled(source, ids), target_cache=prefilled(target, ids[:, :5]), **given)
    assert (moved.n_reused, moved.n_exact, moved.n_mapped) == (5, 11, 5)
    for ours, theirs in zip(caches.read_cache(static), caches.read_cache(wanted.cache), strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_a_guide_is_asked_only_where_something_was_mapped(pair):
    source, target, mapper = pair
    ids = tokens(1, 17)
    moved = handoff(mapper, target, ids, prefilled(source, ids), recompute=0.1, guide=source)
    assert moved.recomputed is None
    assert set(moved.seconds) == {"exact"}
    ids = tokens(1, 18)
    moved = handoff(mapper, target, ids, prefilled(source, ids), recompute=0.1, guide=source)
    assert (moved.n_mapped, moved.recomputed.tolist()) == (1, [[16]])
    native = content(prefilled(target, ids[:, :17]))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(content(moved.cache), native, strict=True))
