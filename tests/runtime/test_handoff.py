"""`handoff`: which tokens end up where, against caches put together by hand."""

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
import zoo
from made_mappers import (
    cache_of,
    content,
    identity_mapper,
    mapper_spec,
    prefilled,
    random_mapper,
    same,
    spec_of,
)

import kvfit
from kvfit.errors import MismatchError
from kvfit.fit.capture import models
from kvfit.model import cache as caches
from kvfit.model.generate import generate
from kvfit.runtime.mapper import Mapper

# These conversations are short. With the default of eight exact first tokens, little of them would be mapped.
handoff = partial(kvfit.handoff, exact_head=1)


@pytest.fixture(scope="module")
def pair(tiny_pair, load):
    """Both models and a random mapper between them."""
    source, target = (load(folder).model for folder in tiny_pair)
    return source, target, random_mapper(mapper_spec(spec_of(source), spec_of(target), [[0, 1], [1], [1, 2], [2]]))


def tokens(batch, length, seed=0):
    return torch.randint(5, 2000, (batch, length), generator=torch.Generator().manual_seed(seed))


def by_hand(mapper, target, ids, pairs, head, tail, prefix, mask=None):
    """The moved cache, put together from its parts with transformers' own calls only."""
    from transformers import DynamicCache

    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    name = caches.cache_argument(target)
    cache = DynamicCache(config=target.config)

    def run(start, stop):
        if stop > start:
            target(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                **{name: cache},
            )

    with torch.no_grad():
        run(0, head)
        mapped = mapper.transfer_layers(pairs, positions=positions[:, : pairs[0][0].shape[2]])
        if tail > head:
            for layer, (keys, values) in enumerate(mapped):
                cache.update(keys[:, :, head:tail], values[:, :, head:tail], layer)
        run(tail, prefix)
    return cache


def close(found, wanted, atol=1e-4):
    pairs = list(zip(content(found), content(wanted), strict=True))
    assert pairs
    for a, b in pairs:
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, atol=atol), float((a - b).abs().max())


@pytest.mark.parametrize(("head", "tail"), [(0, 0), (1, 0), (0, 3), (2, 5), (30, 30), (19, 0), (1, 19)])
@pytest.mark.parametrize("covered", [20, 17])
def test_parts_equal_a_cache_put_together_by_hand(pair, head, tail, covered):
    source, target, mapper = pair
    ids = tokens(2, 20)
    cache = prefilled(source, ids[:, :covered])
    before = content(cache)
    moved = handoff(mapper, target, ids, cache, exact_head=head, exact_tail=tail)
    prefix = min(covered, 19)
    first = min(head, prefix)
    last = max(first, prefix - tail)
    wanted = by_hand(mapper, target, ids, caches.read_cache(cache), first, last, prefix)
    close(moved.cache, wanted)
    assert (moved.n_mapped, moved.n_exact, moved.n_reused) == (last - first, prefix - last + first, 0)
    assert torch.equal(moved.remaining_ids, ids[:, prefix:])
    assert moved.status == "applied"
    assert moved.reason is None
    assert moved.recomputed is None
    assert same(cache, before)


def test_left_padding(pair):
    source, target, mapper = pair
    ids = tokens(3, 16)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[1, :2] = 0
    cache = prefilled(source, ids, mask)
    moved = handoff(mapper, target, ids, cache, attention_mask=mask, exact_head=2, exact_tail=3)
    # The head reaches over the longest padding, so that the first two tokens of every row are exact.
    close(moved.cache, by_hand(mapper, target, ids, caches.read_cache(cache), 8, 12, 15, mask))
    logits = caches.forward(target, moved.remaining_ids, moved.cache, attention_mask=mask)
    # Each row alone, without padding, with the same split of its tokens.
    for row, padding in enumerate((6, 2, 0)):
        alone = ids[row : row + 1, padding:]
        single = handoff(mapper, target, alone, prefilled(source, alone), exact_head=8 - padding, exact_tail=3)
        assert torch.allclose(caches.forward(target, single.remaining_ids, single.cache), logits[row : row + 1], atol=1e-3)


@pytest.mark.parametrize("head", [0, 1])
def test_padding_may_hold_anything(pair, head):
    source, target, mapper = pair
    ids = tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    pairs = [(keys.clone(), values.clone()) for keys, values in caches.read_cache(prefilled(source, ids, mask))]
    clean = handoff(mapper, target, ids, pairs, attention_mask=mask, exact_head=head)
    for keys, values in pairs:
        keys[0, :, :6], values[0, :, :6] = float("nan"), float("inf")
    moved = handoff(mapper, target, ids, pairs, attention_mask=mask, exact_head=head)
    found, wanted = (caches.forward(target, one.remaining_ids, one.cache, attention_mask=mask) for one in (moved, clean))
    assert torch.allclose(found, wanted, atol=1e-4)
    pairs[1][0][0, :, 9] = float("nan")  # a token's
    with pytest.raises(MismatchError, match="NaN"):
        handoff(mapper, target, ids, pairs, attention_mask=mask, exact_head=head)


def test_one_token_is_always_left(pair):
    source, target, mapper = pair
    ids = tokens(1, 9)
    assert handoff(mapper, target, ids, prefilled(source, ids)).remaining_ids.shape == (1, 1)
    one = handoff(mapper, target, ids[:, :1], prefilled(source, ids[:, :1]))
    assert (one.remaining_ids.shape, caches.cache_length(one.cache)) == ((1, 1), 0)
    exact = handoff(identity_mapper(target), target, ids, prefilled(target, ids))
    with torch.no_grad():
        native = target(ids).logits[:, -1]
    assert torch.allclose(caches.forward(target, exact.remaining_ids, exact.cache)[:, -1], native, atol=1e-4)


def test_the_exact_map_generates_like_prefill(pair):
    _, target, _ = pair
    ids = tokens(1, 24)
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    moved = handoff(identity_mapper(target), target, ids, prefilled(target, ids), exact_head=3, exact_tail=4)
    assert torch.equal(generate(target, ids, moved.cache, **options), target.generate(ids, **options))


def test_ten_turns_map_only_new_tokens(pair):
    source, target, mapper = pair
    ids = tokens(2, 66)
    source_cache, target_cache, held = caches.full_cache(), None, 0
    for turn in range(10):
        length = 6 * (turn + 1)
        caches.forward(source, ids[:, caches.cache_length(source_cache) : length], source_cache, base=True)
        moved = handoff(
            mapper,
            target,
            ids[:, : length + 1],
            source_cache,
            target_cache=target_cache,
            target_ids=None if target_cache is None else ids[:, :held],
        )
        assert moved.n_reused == held
        assert moved.n_mapped + moved.n_exact == 6
        assert moved.n_exact == (1 if turn == 0 else 0)
        assert target_cache is None or moved.cache is target_cache
        target_cache, held = moved.cache, length
    at_once = handoff(mapper, target, ids[:, :61], source_cache)
    close(target_cache, at_once.cache, 1e-5)


def test_the_targets_own_tokens_are_kept(pair):
    """The target answers in between; its tokens stay its own."""
    source, target, mapper = pair
    ids = tokens(1, 30)
    moved = handoff(mapper, target, ids[:, :11], prefilled(source, ids[:, :10]))
    caches.forward(target, ids[:, 10:20], moved.cache, base=True)  # the last prompt token and its answer
    own = [half[:, :, 10:20] for half in content(moved.cache)]
    again = handoff(mapper, target, ids, prefilled(source, ids[:, :29]), target_cache=moved.cache, target_ids=ids[:, :20])
    assert (again.n_reused, again.n_mapped, again.n_exact) == (20, 9, 0)
    assert same([half[:, :, 10:20] for half in content(again.cache)], own)


@pytest.mark.parametrize("differs_at", [0, 4, 11, 12])
def test_longest_common_prefix(pair, differs_at):
    source, target, mapper = pair
    old = tokens(1, 12)
    ids = tokens(1, 18, seed=1)
    ids[:, :differs_at] = old[:, :differs_at]
    if differs_at < 12:
        ids[:, differs_at] = old[:, differs_at] + 1
    target_cache = prefilled(target, old)
    kept = [half[:, :, :differs_at] for half in content(target_cache)]
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=target_cache, target_ids=old)
    assert moved.n_reused == differs_at
    assert moved.n_exact == (1 if differs_at == 0 else 0)
    assert caches.cache_length(moved.cache) == 17
    assert same([half[:, :, :differs_at] for half in content(moved.cache)], kept)


def test_a_batch_shares_its_shortest_common_prefix(pair):
    source, target, mapper = pair
    ids = tokens(2, 12)
    old = ids[:, :8].clone()
    old[1, 5] += 1
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=prefilled(target, old), target_ids=old)
    assert moved.n_reused == 5


def window_target():
    family = next(family for family in zoo.FAMILIES if family.name == "gemma3")
    return zoo.build(family)


def test_windowed_layers_truncate_themselves():
    target = window_target()
    mapper = identity_mapper(target)
    assert mapper.spec.target.windows == (24, None, 24)
    ids = torch.randint(5, 90, (2, 60), generator=torch.Generator().manual_seed(0))
    source_cache = prefilled(target, ids[:, :40], cache=caches.full_cache())
    moved = handoff(mapper, target, ids[:, :41], source_cache)
    assert [layer.keys.shape[2] for layer in moved.cache.layers] == [23, 40, 23]
    native = prefilled(target, ids[:, :40])
    close(moved.cache, native)
    # A next turn on top of truncated layers.
    caches.forward(target, ids[:, 40:59], source_cache, base=True)
    again = handoff(mapper, target, ids, source_cache, target_cache=moved.cache, target_ids=ids[:, :40])
    assert (again.n_reused, again.n_mapped) == (40, 19)
    close(again.cache, prefilled(target, ids[:, :59]))
    # Going back behind the window is refused, and nothing is lost by asking.
    other = ids.clone()
    other[:, 10] += 1
    before = content(again.cache)
    with pytest.raises(MismatchError, match="sliding window"):
        handoff(mapper, target, other, source_cache, target_cache=again.cache, target_ids=ids[:, :59])
    assert same(again.cache, before)
    # A source cache that has dropped tokens cannot be mapped.
    with pytest.raises(MismatchError, match="sliding window"):
        handoff(mapper, target, ids[:, :41], prefilled(target, ids[:, :40]))


def refusals(pair):
    source, target, _ = pair
    ids = tokens(2, 12)
    good = prefilled(source, ids)
    held = {"target_cache": prefilled(target, ids[:, :4])}
    yield (ids[:, :8], good, {}, "source_cache: found 2 sequences of 12 tokens, needed 2 of at most 8")
    yield (ids[:1], good, {}, "source_cache: found 2 sequences of 12 tokens, needed 1")
    yield (ids[0], good, {}, r"input_ids: found shape \(12,\)")
    yield (ids, caches.read_cache(good)[:2], {}, "source cache: found 2 layers")
    yield (ids, prefilled(target, ids), {}, "source cache: found 4 layers")
    yield (ids, caches.full_cache(), {}, "found no tokens")
    yield (ids, good, {"exact_head": -1}, "exact_head: found -1")
    yield (ids, good, {"attention_mask": torch.ones(2, 11)}, r"attention_mask: found shape \(2, 11\)")
    yield (ids, good, {"attention_mask": torch.tensor([[1] * 11 + [0]] * 2)}, "padding after a token")
    yield (ids, good, {"attention_mask": torch.tensor([[1] * 12, [0] * 12])}, "found row 1 without a token, needed one or more")
    yield (ids, good, {"recompute": 0.1}, "recompute=0.1: found no guide")
    yield (ids, good, {"recompute": 1.5, "guide": source}, "recompute: found 1.5")
    yield (ids, good, {"recompute": 0.1, "guide": target}, "field n_layers: found 4, needed 3")
    yield (ids, good, {"recompute": 0.1, "guide": source, "exact_tokens": [1]}, "found both")
    yield (ids, good, {"exact_tokens": [11]}, "exact_tokens: found 11 to 11, needed indices of the 11 moved")
    yield (ids, good, {"exact_tokens": [-1]}, "exact_tokens: found -1")
    yield (ids, good, {"exact_tokens": [0.5]}, "exact_tokens: .*whole numbers")
    yield (ids, good, {"exact_tokens": torch.zeros(3, 2, dtype=torch.long)}, r"exact_tokens: found shape \(3, 2\)")
    yield (ids, good, held, "target_ids: found None")
    yield (ids, good, {**held, "target_ids": ids[:, :3]}, r"target_ids: found \(2, 3\)")
    yield (
        ids,
        good,
        {"target_cache": good, "target_ids": ids},
        "target_cache: found 3 layers with tokens, needed 4 .*the source's",
    )


def test_refused_before_anything_changes(pair):
    source, target, mapper = pair
    for ids, cache, arguments, message in refusals(pair):
        target_cache = arguments.get("target_cache")
        before = None if target_cache is None else content(target_cache)
        with pytest.raises(MismatchError, match=message):
            handoff(mapper, target, ids, cache, **arguments)
        assert before is None or same(target_cache, before)
    with pytest.raises(MismatchError, match="on_error: found 'ignore'"):
        handoff(mapper, target, tokens(1, 4), prefilled(source, tokens(1, 4)), on_error="ignore")


def test_prefill_when_it_cannot_be_moved(pair):
    source, target, mapper = pair
    ids = tokens(2, 12)
    target_cache = prefilled(target, ids[:, :4])
    before = content(target_cache)
    moved = handoff(
        mapper,
        target,
        ids,
        caches.read_cache(prefilled(source, ids))[:2],
        target_cache=target_cache,
        target_ids=ids[:, :4],
        on_error="prefill",
    )
    assert (moved.status, moved.n_mapped, moved.n_exact, moved.n_reused) == ("fallback_prefill", 0, 7, 4)
    assert "found 2 layers, needed 3" in moved.reason
    assert set(moved.seconds) == {"prefill"}
    assert moved.cache is target_cache
    assert same([half[:, :, :4] for half in content(moved.cache)], before)
    close(moved.cache, prefilled(target, ids[:, :11]), 1e-5)
    # Not only what kvfit refuses: a cache that is none at all.
    broken = handoff(mapper, target, ids, [("not", "tensors")], on_error="prefill")
    assert broken.status == "fallback_prefill"
    assert (broken.n_exact, broken.n_reused) == (11, 0)
    assert same(broken.cache, prefilled(target, ids[:, :11]))


def test_a_prefill_keeps_the_common_part_of_the_targets_cache(pair):
    _, target, mapper = pair
    ids = tokens(1, 12)
    old = ids.clone()
    old[:, 5] += 1
    held = prefilled(target, old)
    moved = handoff(mapper, target, ids, None, target_cache=held, target_ids=old, on_error="prefill")
    assert (moved.status, moved.n_reused, moved.n_exact) == ("fallback_prefill", 5, 6)
    assert moved.cache is held
    close(moved.cache, prefilled(target, ids[:, :11]), 1e-5)


def test_a_prefill_leaves_a_cache_that_was_what_went_wrong(pair):
    source, target, mapper = pair
    ids = tokens(1, 12)
    other = copy.deepcopy(target)
    with torch.no_grad():
        next(parameter for name, parameter in other.named_parameters() if "k_proj" in name).mul_(1.05)
    good = prefilled(source, ids)
    for model, held, held_ids in (
        (target, prefilled(source, ids[:, :4]), ids[:, :4]),  # the source's
        (target, prefilled(target, ids[:, :4]), None),  # without its ids
        (other, prefilled(target, ids[:, :4]), ids[:, :4]),  # of a model that is not what it was
    ):
        before = content(held)
        moved = handoff(mapper, model, ids, good, target_cache=held, target_ids=held_ids, on_error="prefill")
        assert (moved.status, moved.n_reused, moved.n_exact) == ("fallback_prefill", 0, 11)
        assert same(moved.cache, prefilled(model, ids[:, :11]))
        assert same(held, before)


@pytest.mark.parametrize("step", [0, 2, 5])
@pytest.mark.parametrize(("common", "cropped"), [(4, 0), (4, 3), (30, 0)])
@pytest.mark.parametrize("windowed", [False, True])
def test_what_was_changed_is_undone(step, common, cropped, windowed, monkeypatch):
    """Memory runs out at some layer of some pass: the cache is as it was, or as far as it is common with the conversation."""
    target = window_target() if windowed else zoo.build(next(family for family in zoo.FAMILIES if family.name == "qwen3"))
    mapper = identity_mapper(target)
    ids = torch.randint(5, 90, (1, common + 8), generator=torch.Generator().manual_seed(0))
    old = torch.cat([ids[:, :common], ids[:, common : common + 3] + 1], 1)[:, : common + cropped]
    source = prefilled(target, ids, cache=caches.full_cache())
    arguments = {"target_cache": prefilled(target, old), "target_ids": old, "exact_head": common + 1}
    arguments["exact_tail"] = 2
    before = [half[:, :, :common] for half in content(arguments["target_cache"])]
    calls = []

    def torn(layer, *arguments, **options):
        calls.append(layer)
        if len(calls) == step + 1:
            raise RuntimeError("out of memory")
        return update(layer, *arguments, **options)

    kind = type(arguments["target_cache"].layers[0])
    update = kind.update
    with monkeypatch.context() as patch:
        patch.setattr(kind, "update", torn)
        with pytest.raises(RuntimeError, match="out of memory"):
            handoff(mapper, target, ids, source, **arguments)
    assert same(arguments["target_cache"], before)
    native = prefilled(target, ids[:, : common + 7])
    close(handoff(mapper, target, ids, source, **{**arguments, "target_ids": old[:, :common]}).cache, native)


def test_a_prefill_after_the_cache_was_changed_keeps_what_is_common(pair, monkeypatch):
    source, target, mapper = pair
    ids = tokens(1, 12)
    held = prefilled(target, ids[:, :4])

    def torn(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(caches, "place", torn)
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=held, target_ids=ids[:, :4], on_error="prefill")
    assert (moved.reason, moved.n_reused, moved.n_exact) == ("RuntimeError: out of memory", 4, 7)
    close(moved.cache, prefilled(target, ids[:, :11]))


def test_a_prefill_behind_a_window_starts_anew():
    target = window_target()
    mapper = identity_mapper(target)
    ids = torch.randint(5, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    old = ids.clone()
    old[:, 10] += 1
    held = prefilled(target, old[:, :50])
    before = content(held)
    moved = handoff(mapper, target, ids, None, target_cache=held, target_ids=old[:, :50], on_error="prefill")
    assert moved.n_reused == 0
    assert same(held, before)
    close(moved.cache, prefilled(target, ids[:, :59]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("half", "kind"), [(0, "keys"), (1, "values")])
def test_a_source_cache_that_is_not_finite(pair, value, half, kind):
    source, target, mapper = pair
    ids = tokens(2, 12)
    cache = prefilled(source, ids)
    caches.read_cache(cache)[1][half][1, 0, 7, 3] = value
    held = prefilled(target, ids[:, :4])
    before = content(held)
    with pytest.raises(MismatchError, match=f"source_cache, {kind} of layer 1: found NaN or infinity"):
        handoff(mapper, target, ids, cache, target_cache=held, target_ids=ids[:, :4])
    assert same(held, before)
    moved = handoff(mapper, target, ids, cache, on_error="prefill")
    assert "found NaN or infinity" in moved.reason
    assert same(moved.cache, prefilled(target, ids[:, :11]))
    # Tokens that the target runs itself may be anything; and `transfer` does not look.
    close(
        handoff(mapper, target, ids, cache, exact_head=8).cache,
        handoff(mapper, target, ids, prefilled(source, ids), exact_head=8).cache,
    )
    close(
        handoff(mapper, target, ids, cache, exact_tail=4).cache,
        handoff(mapper, target, ids, prefilled(source, ids), exact_tail=4).cache,
    )
    assert not all(torch.isfinite(part).all() for part in content(mapper.transfer(cache)))


def test_padding_of_the_source_may_be_anything(pair):
    source, target, mapper = pair
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = prefilled(source, ids, mask)
    for keys, values in caches.read_cache(cache):
        keys[0, :, :3] = values[0, :, :3] = float("nan")
    wanted = handoff(mapper, target, ids, prefilled(source, ids, mask), attention_mask=mask)
    close(handoff(mapper, target, ids, cache, attention_mask=mask).cache, wanted.cache)


def test_a_target_too_narrow_for_what_was_mapped(pair):
    source, target, mapper = pair
    ids = tokens(1, 12)
    weights = {key: (weight * 1e5, bias) for key, (weight, bias) in mapper.maps.weights.items()}
    half = copy.deepcopy(target).to(torch.float16)
    for module in half.modules():  # as from_pretrained leaves it
        if "inv_freq" in module._buffers:
            module.inv_freq = next(m.inv_freq for m in target.modules() if "inv_freq" in m._buffers)
    wide = Mapper(mapper_spec(spec_of(source), spec_of(half), [[0, 1], [1], [1, 2], [2]]), weights)
    with pytest.raises(MismatchError, match=r"mapped cache, .*infinity made of finite numbers.* load the target in bfloat16"):
        handoff(wide, half, ids, prefilled(source, ids))


def test_a_handoff_prints_in_a_line(pair):
    source, target, mapper = pair
    ids = tokens(2, 12)
    moved = handoff(mapper, target, ids, prefilled(source, ids), exact_tail=2, exact_tokens=[3, 4])
    assert repr(moved) == "Handoff(applied: 2 x 12 tokens: 0 reused, 8 mapped, 2 of them run again, 3 exact, 1 left to run)"
    failed = handoff(mapper, target, ids, None, on_error="prefill")
    assert repr(failed).startswith(
        "Handoff(fallback_prefill: 2 x 12 tokens: 0 reused, 0 mapped, 11 exact, 1 left to run, reason: "
    )


def test_prefill_of_a_padded_batch(pair):
    _, target, mapper = pair
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    moved = handoff(mapper, target, ids, None, attention_mask=mask, on_error="prefill")
    close(moved.cache, prefilled(target, ids[:, :11], mask[:, :11]))


def test_refuses_a_model_with_other_weights(pair):
    source, target, mapper = pair
    ids = tokens(1, 8)
    other = copy.deepcopy(target)
    with torch.no_grad():
        next(parameter for name, parameter in other.named_parameters() if "k_proj" in name).mul_(1.05)
    with pytest.raises(MismatchError, match="field weight_fingerprint"):
        handoff(mapper, other, ids, prefilled(source, ids))
    moved = handoff(mapper, other, ids, prefilled(source, ids), on_error="prefill")
    assert "weight_fingerprint" in moved.reason
    assert same(moved.cache, prefilled(other, ids[:, :7]))


def test_another_dtype_than_the_sources(pair, tiny_pair):
    source, _, mapper = pair
    ids = tokens(1, 12)
    half = models.load(str(tiny_pair[1]), options=models.Options(dtype="bfloat16", device="cpu")).model
    moved = handoff(mapper, half, ids, prefilled(source, ids), exact_head=0, exact_tail=0)
    assert {part.dtype for part in content(moved.cache)} == {torch.bfloat16}
    caches.forward(half, moved.remaining_ids, moved.cache)


def test_inference_mode(pair):
    source, target, mapper = pair
    ids = tokens(1, 12)
    wanted = handoff(mapper, target, ids, prefilled(source, ids), exact_tail=2, exact_tokens=[3, 4])
    with torch.inference_mode():
        cache = prefilled(source, ids)
        inside = handoff(mapper, target, ids, cache, exact_tail=2, exact_tokens=[3, 4])
    assert same(inside.cache, wanted.cache)
    assert same(handoff(mapper, target, ids, cache, exact_tail=2, exact_tokens=[3, 4]).cache, wanted.cache)
    # A next turn outside on a cache that was made inside.
    longer = tokens(1, 20)
    longer[:, :12] = ids
    handoff(
        mapper, target, longer, prefilled(source, longer), target_cache=inside.cache, target_ids=ids[:, :11], exact_tokens=[5]
    )


def test_threads(pair):
    source, target, mapper = pair
    conversations = [tokens(1, 20, seed=index) for index in range(8)]
    sources = [prefilled(source, ids) for ids in conversations]

    def move(index):
        return handoff(mapper, target, conversations[index], sources[index], exact_tail=2, recompute=0.3, guide=source)

    wanted = [move(index) for index in range(8)]
    found = [None] * 8
    barrier = threading.Barrier(8)

    def work(index):
        barrier.wait()
        for _ in range(3):
            found[index] = move(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.recomputed, b.recomputed)
        assert same(a.cache, b.cache)


def test_seconds_name_what_was_done(pair):
    source, target, mapper = pair
    ids = tokens(1, 20)
    moved = handoff(mapper, target, ids, prefilled(source, ids), exact_tail=2, recompute=0.2, guide=source)
    assert set(moved.seconds) == {"exact", "transfer", "guide", "recompute"}
    assert all(value > 0 for value in moved.seconds.values())


@pytest.mark.slow
def test_a_compiled_target(pair):
    source, target, mapper = pair
    ids = tokens(1, 24)
    compiled = torch.compile(copy.deepcopy(target), backend="aot_eager")
    moved = handoff(mapper, compiled, ids, prefilled(source, ids), exact_tail=4, exact_tokens=[2, 9])
    wanted = handoff(mapper, target, ids, prefilled(source, ids), exact_tail=4, exact_tokens=[2, 9])
    close(moved.cache, wanted.cache)
    logits = caches.forward(compiled, moved.remaining_ids, moved.cache)
    assert torch.allclose(logits, caches.forward(target, wanted.remaining_ids, wanted.cache), atol=1e-4)


def test_less_recomputed_than_was_judged_warns(pair):
    """A map that recalls with guided recompute only must not lose it in silence."""
    source, target, mapper = pair
    ids = tokens(1, 24)
    judged = random_mapper(mapper.spec)
    judged = Mapper(judged.spec, judged.maps.weights, verdict="pass", judged_recompute=0.2)
    assert copy.copy(judged).judged_recompute == judged.to("cpu").judged_recompute == 0.2
    cache = prefilled(source, ids)
    with pytest.warns(UserWarning, match=r"found recompute=0.1, needed 0.2, the share at which it was evaluated") as caught:
        handoff(judged, target, ids, cache, recompute=0.1, guide=source)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handoff(judged, target, ids, cache, recompute=0.2, guide=source)
        handoff(judged, target, ids, cache, exact_tokens=[3, 4])
        handoff(mapper, target, ids, cache)


@pytest.mark.parametrize("recompute", [0.0, 0.5])
def test_a_target_that_is_ahead_of_the_source_keeps_what_it_has(pair, recompute):
    source, target, mapper = pair
    ids = tokens(1, 24)
    own = prefilled(target, ids[:, :18])
    moved = handoff(
        mapper, target, ids, prefilled(source, ids[:, :10]), target_cache=own, target_ids=ids[:, :18],
        recompute=recompute, guide=source,
    )  # fmt: skip
    assert (moved.n_reused, moved.n_mapped, moved.n_exact) == (18, 0, 0)
    assert torch.equal(moved.remaining_ids, ids[:, 18:])
    # What is run once more in the target's own context gives its own keys and values again.
    close(moved.cache, prefilled(target, ids[:, :18]))
    with torch.no_grad():
        assert torch.allclose(caches.forward(target, moved.remaining_ids, moved.cache), target(ids).logits[:, 18:], atol=1e-4)


def test_a_windowed_target_that_is_ahead_drops_nothing():
    model = zoo.build(next(family for family in zoo.FAMILIES if family.name == "gemma3"))
    mapper = identity_mapper(model)
    ids = tokens(1, 50, seed=1) % model.config.vocab_size
    own = prefilled(model, ids[:, :40])
    moved = handoff(
        mapper, model, ids, prefilled(model, ids[:, :20], cache=caches.full_cache()), target_cache=own, target_ids=ids[:, :40]
    )
    assert (moved.n_reused, moved.n_mapped, moved.remaining_ids.shape[1]) == (40, 0, 10)


def test_a_static_source(pair):
    from transformers import StaticCache

    source, target, mapper = pair
    ids = tokens(1, 16)
    static = prefilled(source, ids, cache=StaticCache(config=source.config, max_cache_len=40))
    close(handoff(mapper, target, ids, static).cache, handoff(mapper, target, ids, prefilled(source, ids)).cache)


@pytest.mark.parametrize("tail", [0, 3])
def test_a_static_target_cache(pair, tail):
    """The cache of a compiled target: filled in place, and its next logits are those of a dynamic one."""
    from transformers import StaticCache

    source, target, mapper = pair
    ids = tokens(1, 24)
    own = prefilled(target, ids[:, :6], cache=StaticCache(config=target.config, max_cache_len=24))
    address = own.layers[0].keys.data_ptr()
    given = {"target_ids": ids[:, :6], "exact_tail": tail}
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=own, **given)
    wanted = handoff(mapper, target, ids, prefilled(source, ids), target_cache=prefilled(target, ids[:, :6]), **given)
    assert moved.cache is own
    assert own.layers[0].keys.data_ptr() == address
    assert (moved.n_reused, moved.n_mapped, moved.n_exact) == (6, 17 - tail, tail)
    for (keys, values), (wanted_keys, wanted_values) in zip(
        caches.read_cache(own), caches.read_cache(wanted.cache), strict=True
    ):
        assert torch.allclose(keys, wanted_keys, atol=1e-5)
        assert torch.allclose(values, wanted_values, atol=1e-5)
    logits = caches.forward(target, moved.remaining_ids, own)
    assert torch.allclose(logits, caches.forward(target, wanted.remaining_ids, wanted.cache), atol=1e-4)


def test_a_static_target_cache_without_room_is_left_as_it_was(pair):
    from transformers import StaticCache

    source, target, mapper = pair
    ids = tokens(1, 24)
    own = prefilled(target, ids[:, :6], cache=StaticCache(config=target.config, max_cache_len=20))
    before = [tensor.clone() for pair in caches.read_cache(own) for tensor in pair]
    with pytest.raises(MismatchError, match="layer 0: found room for 20 tokens, needed 2"):
        handoff(mapper, target, ids, prefilled(source, ids), target_cache=own, target_ids=ids[:, :6])
    assert all(torch.equal(a, b) for a, b in zip([t for pair in caches.read_cache(own) for t in pair], before, strict=True))
    moved = handoff(mapper, target, ids, prefilled(source, ids), target_cache=own, target_ids=ids[:, :6], on_error="prefill")
    assert moved.status == "fallback_prefill"
    assert "found room for 20 tokens" in moved.reason


def test_plain_tensors_are_a_source(pair):
    source, target, mapper = pair
    ids = tokens(1, 16)
    pairs = caches.read_cache(prefilled(source, ids))
    assert same(handoff(mapper, target, ids, pairs).cache, handoff(mapper, target, ids, cache_of(pairs)).cache)


def lexical_identity(model):
    """A model to itself, exact in every layer, that reads the target's first layer with weight zero."""
    side = spec_of(model)
    spec = mapper_spec(side, side, [[i] for i in range(side.n_layers)], lexical_lags=(0, 1))
    weights = {}
    for layer in spec.layers:
        weight = torch.zeros(spec.weight_shape(layer.kind, layer.layer_index))
        weight[: side.width] = torch.eye(side.width)
        weights[layer.kind, layer.layer_index] = (weight, torch.zeros(side.width))
    return Mapper(spec, weights)


def small_model(name="qwen3"):
    return zoo.build(next(family for family in zoo.FAMILIES if family.name == name))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("returned", [1, 2])
def test_a_turn_after_beam_search_goes_on_from_what_was_said(name, returned):
    """The rows of a cache that beams leave are not those of the sequences that are returned."""
    model = small_model(name)
    mapper = identity_mapper(model)
    ids = torch.randint(5, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    moved = handoff(mapper, model, ids, prefilled(model, ids, cache=caches.full_cache()))
    answer = moved.generate(max_new_tokens=10, num_beams=4, num_return_sequences=returned, pad_token_id=0)
    longer = torch.cat([answer, answer[:, :4] + 1], 1)
    source = prefilled(model, longer, cache=caches.full_cache())
    second = handoff(mapper, model, longer, source, target_cache=moved.cache, target_ids=answer)
    assert second.n_reused == (30 if name == "qwen3" else 0)  # a window has dropped what a shorter cache would need
    close(second.cache, prefilled(model, longer[:, :-1]))


def other_text(ids):
    """As another tokenization of the same text: from some token on everything is one place further."""
    other = ids.clone()
    other[:, 12:-1] = ids[:, 13:]
    return other


@pytest.mark.parametrize("make", [lexical_identity, identity_mapper])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_target_cache_of_other_tokens_than_its_ids_say(name, make):
    model = small_model(name)
    mapper = make(model)
    ids = torch.randint(5, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    held = prefilled(model, ids[:, :30])
    wrong = other_text(ids)
    source = prefilled(model, wrong, cache=caches.full_cache())
    before = content(held)
    with pytest.raises(MismatchError, match="target_cache: found keys and values of another token than input_ids has at row 0"):
        handoff(mapper, model, wrong, source, target_cache=held, target_ids=wrong[:, :30])
    fallen = handoff(mapper, model, wrong, source, target_cache=held, target_ids=wrong[:, :30], on_error="prefill")
    assert (fallen.status, fallen.n_reused) == ("fallback_prefill", 0)
    assert same(held, before)
    right = prefilled(model, ids, cache=caches.full_cache())
    moved = handoff(mapper, model, ids, right, target_cache=held, target_ids=ids[:, :30])
    assert moved.n_reused == 30
    close(moved.cache, prefilled(model, ids[:, :39]))


@pytest.mark.parametrize("make", [lexical_identity, identity_mapper])
def test_a_target_cache_of_a_turn_with_another_mask(make):
    """The mask of the turn before was forgotten: every token of the padded row would stand elsewhere."""
    model = small_model()
    mapper = make(model)
    ids = torch.randint(5, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    first = handoff(mapper, model, ids[:, :20], prefilled(model, ids[:, :19], mask[:, :19]), attention_mask=mask[:, :20])
    held = {"target_cache": first.cache, "target_ids": ids[:, :19]}
    with pytest.raises(
        MismatchError, match="target_cache: found keys and values at another position than attention_mask gives"
    ):
        handoff(mapper, model, ids, prefilled(model, ids), **held)
    second = handoff(mapper, model, ids, prefilled(model, ids, mask), attention_mask=mask, **held)
    assert second.n_reused == 19


def test_a_cache_of_mapped_and_own_tokens_is_known_by_either(pair):
    """A map that is far from exact in layer 0. What it made and what the target ran are kept; other tokens are refused."""
    source, target, mapper = pair
    ids, other = tokens(2, 60), tokens(2, 60, seed=1)
    source_cache = prefilled(source, ids)

    def first():
        moved = handoff(mapper, target, ids[:, :31], prefilled(source, ids[:, :30]), exact_head=3)
        caches.forward(target, ids[:, 30:40], moved.cache, base=True)
        return {"target_cache": moved.cache, "target_ids": ids[:, :40].clone()}

    held = first()
    native = prefilled(target, ids[:, :40])
    error = (held["target_cache"].layers[0].values - native.layers[0].values).abs().amax((1, 3))
    assert (error[:, 3:30] > 0.5 * native.layers[0].values.abs().amax()).all()
    assert handoff(mapper, target, ids, source_cache, **held).n_reused == 40
    shifted = other_text(ids)
    with pytest.raises(MismatchError, match="target_cache: found keys and values of another token than input_ids has at row 0"):
        handoff(
            mapper,
            target,
            shifted,
            prefilled(source, shifted),
            target_cache=first()["target_cache"],
            target_ids=shifted[:, :40],
        )
    # Beyond the source's cache nothing shows whether a token was mapped, so it is believed.
    lone = torch.cat([ids[:, :20], other[:, 20:]], 1)
    believed = handoff(mapper, target, lone, prefilled(source, lone[:, :20]), **{**first(), "target_ids": lone[:, :40]})
    assert believed.n_reused == 40


def test_a_first_layer_that_looks_at_other_tokens_shows_nothing(monkeypatch):
    """Token shift before layer 0: computing single tokens gives another layer 0, and that must not refuse a right cache."""
    model = small_model()
    mapper = identity_mapper(model)
    ids = torch.randint(5, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    original = type(model.model.layers[0]).forward

    def mixed(layer, states, *args, **kwargs):
        shifted = torch.cat([states[:, :1], states[:, :-1]], 1)
        return original(layer, states + shifted if layer is model.model.layers[0] else states, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", mixed)
    source = prefilled(model, ids)
    mapper.bind(model, model)
    held = prefilled(model, ids[:, :20])
    assert handoff(mapper, model, ids, source, target_cache=held, target_ids=ids[:, :20]).n_reused == 20


def test_a_conversation_whose_cache_another_handoff_has_taken():
    """The first conversation would go on in the middle of the second."""
    model = small_model()
    mapper = identity_mapper(model)
    ids = torch.randint(5, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    other = torch.cat([ids[:, :8], ids[:, 9:20]], 1)
    first = handoff(mapper, model, ids, prefilled(model, ids))
    handoff(mapper, model, other, prefilled(model, other), target_cache=first.cache, target_ids=ids)
    with pytest.raises(
        MismatchError, match="cache: found 18 tokens, needed the 29 that this handoff left in it: another handoff"
    ):
        first.generate(max_new_tokens=4)
    windowed = small_model("gemma3")
    moved = handoff(identity_mapper(windowed), windowed, ids, prefilled(windowed, ids, cache=caches.full_cache()))
    moved.generate(max_new_tokens=4, num_beams=2, pad_token_id=0)
    with pytest.raises(MismatchError, match="cache: found 0 tokens, needed the 29"):
        moved.generate(max_new_tokens=4)
