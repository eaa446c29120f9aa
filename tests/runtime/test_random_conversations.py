"""Conversations drawn at random, on a model that is mapped to itself: the next logits and tokens are always its own.

The oracle is one plain pass, or plain `generate`, over the whole text without any cache of kvfit's.
"""

import functools
import inspect
import random

import pytest
import torch
from made_mappers import mapper_spec
from zoo import FAMILIES, UNLISTED, VOCABULARY, Tokenizer, build

from kvfit import handoff
from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.identity import describe_model
from kvfit.runtime.mapper import Mapper

BY_NAME = {family.name: family for family in FAMILIES + UNLISTED}
# Every scheme of rotation, of windows and of caches.
NAMES = ("qwen3", "gemma3", "glm", "cohere2", "gpt-oss", "phi3-partial", "mistral-window", "llama-yarn", "gptj", "gpt2")


@functools.cache
def prepared(name):
    """A model, and maps of it to itself: by the unit matrix, and with lexical inputs of weight zero."""
    model = build(BY_NAME[name])
    side = describe_model(model, Tokenizer(), ref="org/name", revision=None)
    mappers = []
    for lags in ((), (0, 1, 2)):
        spec = mapper_spec(side, side, [[i] for i in range(side.n_layers)], lexical_lags=lags)
        weights = {}
        for layer in spec.layers:
            weight = torch.zeros(spec.weight_shape(layer.kind, layer.layer_index))
            weight[: side.width] = torch.eye(side.width)
            weights[layer.kind, layer.layer_index] = (weight, torch.zeros(side.width))
        mappers.append(Mapper(spec, weights, verdict="pass"))
    return model, mappers


def drawn(rng, batch, length):
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(rng.randrange(10**6)))


def filled(model, ids, mask, length, rng):
    """A cache of the first tokens, read in pieces of any length."""
    cache = caches.full_cache()
    while (held := caches.cache_length(cache) if cache.layers else 0) < length:
        stop = rng.randint(held + 1, length)
        caches.forward(model, ids[:, held:stop], cache, attention_mask=mask[:, :stop], base=True)
    return cache


def plain(model, ids, mask, count):
    """(B, count, vocabulary), the last logits of one pass over everything."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    named = {"position_ids": positions} if "position_ids" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **named).logits[:, -count:]


def error(found, wanted, mask):
    """Largest difference on real tokens by the largest logit."""
    real = mask[:, -found.shape[1] :, None] != 0
    return float(((found - wanted) * real).abs().max() / (wanted * real).abs().max())


def way(rng, model, prefix):
    """Arguments that say what the target runs itself."""
    arguments = {"exact_head": rng.choice([0, 1, 1, 2, 5, 8, 100]), "exact_tail": rng.choice([0, 0, 1, 3, 30])}
    kind = rng.random()
    if kind < 0.3 and prefix:
        arguments["exact_tokens"] = rng.sample(range(prefix), rng.randint(1, prefix))
    elif kind < 0.6:
        arguments |= {"recompute": rng.choice([0.1, 0.5, 1.0, "auto"]), "guide": model}
    return arguments


def earlier(rng, model, ids, mask):
    """A cache of the target from an earlier turn, whose text may be longer, shorter, or another one from some token on."""
    batch, length = ids.shape
    held = rng.randint(1, length + 3)
    old = torch.cat([ids, drawn(rng, batch, 3)], 1)[:, :held]
    seen = torch.cat([mask, mask.new_ones(batch, 3)], 1)[:, :held]
    if not bool(seen[:, -1].all()):
        return {}
    if rng.random() < 0.5:
        row, token = rng.randrange(batch), rng.randrange(held)
        old = old.clone()
        old[row, token] = (old[row, token] + 1) % 90 + 2
    cache = caches.new_cache(model) if rng.random() < 0.7 else caches.full_cache()
    caches.forward(model, old, cache, attention_mask=seen, base=True)
    return {"target_cache": cache, "target_ids": old}


def moved_or_none(*given, **arguments):
    """What `handoff` gives; None where a window of the earlier turn's cache has dropped what an edit would need again."""
    try:
        return handoff(*given, **arguments)
    except MismatchError as refused:
        if "sliding window that has dropped tokens" not in str(refused):
            raise
        return None


@pytest.mark.parametrize("seed", range(40))
def test_the_next_logits_are_those_of_a_plain_pass(seed):
    rng = random.Random(seed)
    model, mappers = prepared(NAMES[seed % len(NAMES)])
    batch, length = rng.randint(1, 3), rng.choice([1, 2, 3, 5, 8, 23, 24, 25, 48])
    ids = drawn(rng, batch, length)
    mask = torch.ones_like(ids)
    if seed % 3 == 0 and length > 1:
        for row in range(batch):
            mask[row, : rng.randint(0, min(7, length - 1))] = 0
    covered = rng.randint(1, length)
    source = filled(model, ids, mask, covered, rng)
    arguments = way(rng, model, min(covered, length - 1))
    if rng.random() < 0.4:
        arguments |= earlier(rng, model, ids, mask)
    arguments |= {"attention_mask": mask, "source_ids": ids[:, :covered]}
    moved = moved_or_none(rng.choice(mappers), model, ids, source, **arguments)
    if moved is None:
        return
    left = moved.remaining_ids.shape[1]
    assert moved.n_reused + moved.n_mapped + moved.n_exact + left == length
    assert left >= 1
    found = caches.forward(model, moved.remaining_ids, moved.cache, attention_mask=mask)
    assert error(found, plain(model, ids, mask, left), mask) < 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_turn_after_turn_the_answers_are_those_of_plain_generate(seed):
    """From the source to the target and back, with new text at each end; now and then an earlier token is edited."""
    rng = random.Random(1000 + seed)
    model, mappers = prepared(NAMES[seed % len(NAMES)])
    mapper, batch = rng.choice(mappers), rng.randint(1, 2)
    ids, source, held = drawn(rng, batch, rng.randint(2, 30)), caches.full_cache(), {}
    for _ in range(3):
        length = ids.shape[1]
        read = caches.cache_length(source) if source.layers else 0
        if read < length:
            caches.forward(model, ids[:, read:], source, base=True)
        arguments = rng.choice([{}, {"exact_head": 1, "exact_tail": 2}, {"exact_head": 0}, {"recompute": 0.3, "guide": model}])
        moved = moved_or_none(mapper, model, ids, source, source_ids=ids, **held, **arguments)
        if moved is None:
            return
        options = {"max_new_tokens": rng.randint(1, 6), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        answer = moved.generate(**options)
        assert torch.equal(answer, model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        held = {"target_cache": moved.cache, "target_ids": answer} if rng.random() < 0.8 else {}
        ids = torch.cat([answer, drawn(rng, batch, rng.randint(1, 8))], 1)
        if rng.random() < 0.3:
            token = rng.randrange(ids.shape[1])
            ids[:, token] = (ids[:, token] + 7) % 90 + 2
            source = caches.full_cache()  # the source reads the edited text again


def test_one_other_token_in_the_source_shows():
    """The control: without the ids to compare, the logits of a cache of another text are other ones."""
    rng = random.Random(0)
    model, (known, _) = prepared("qwen3")
    mapper = Mapper(known.spec, known.maps.weights)  # that has met no source
    ids = drawn(rng, 2, 24)
    other = ids.clone()
    other[:, 20] += 1
    mask = torch.ones_like(ids)
    moved = handoff(mapper, model, ids, filled(model, other, mask, 24, rng))
    found = caches.forward(model, moved.remaining_ids, moved.cache)
    assert error(found, plain(model, ids, mask, 1), mask) > 1e-2
    with pytest.raises(MismatchError, match="at row 0, token 20, needed"):
        handoff(mapper, model, ids, filled(model, other, mask, 24, rng), source_ids=other)
