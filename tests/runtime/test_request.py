"""Slips of a caller: each is an error of kvfit's own that says what was found, what was needed and what to do."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from made_mappers import identity_mapper, mapper_spec, prefilled, random_mapper, same, spec_of

import kvfit
from kvfit.errors import KvfitError, MismatchError
from kvfit.model import cache as caches
from kvfit.model.generate import generate
from kvfit.model.identity import describe_model

# These conversations are short. With the default of eight exact first tokens, little of them would be mapped.
handoff = partial(kvfit.handoff, exact_head=1)


@pytest.fixture(scope="module")
def pair(tiny_pair, load):
    source, target = (load(folder).model for folder in tiny_pair)
    return source, target, random_mapper(mapper_spec(spec_of(source), spec_of(target), [[0, 1], [1], [1, 2], [2]]))


@pytest.fixture(scope="module")
def tokenizer(tiny_pair):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_pair[0])


IDS = torch.randint(5, 2000, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.zeros(12, dtype=torch.bool)
MASK[[3, 7]] = True


@pytest.mark.parametrize(
    "chosen",
    [
        MASK,
        MASK.expand(2, -1),
        MASK[:11],
        MASK.tolist(),
        [MASK.tolist()] * 2,
        MASK.numpy(),
        [True, 3],
        [np.bool_(True), np.bool_(False)],
        torch.zeros(0, dtype=torch.bool),
    ],
)
def test_a_mask_is_not_read_as_indices(pair, chosen):
    source, target, mapper = pair
    with pytest.raises(MismatchError, match=r"exact_tokens: found booleans, needed indices .* mask\.nonzero\(\)\.flatten\(\)"):
        handoff(mapper, target, IDS, prefilled(source, IDS), exact_tokens=chosen)


def test_a_mask_of_whole_numbers_is_no_mask_either(pair):
    source, target, mapper = pair
    ids = torch.randint(5, 2000, (1, 24))
    mask = torch.zeros(24, dtype=torch.long)
    mask[8:12] = 1
    for wrong in (mask, mask[:3], mask[None], [[0, 1, 1]], [5, 5]):
        with pytest.raises(MismatchError, match=r"exact_tokens: found a token named twice in every row of \d+, needed each"):
            handoff(mapper, target, ids, prefilled(source, ids), exact_tokens=wrong)
    handoff(mapper, target, ids, prefilled(source, ids), exact_tokens=[0, 1])


def test_the_advice_for_a_mask_holds(pair):
    source, target, mapper = pair
    moved = handoff(mapper, target, IDS, prefilled(source, IDS), exact_tokens=MASK.nonzero().flatten())
    assert moved.recomputed.tolist() == [[3, 7]] * 2
    for same_tokens in ([3, 7], (3, 7), range(3, 8, 4), np.array([3, 7]), torch.tensor([3, 7], dtype=torch.int16)):
        again = handoff(mapper, target, IDS, prefilled(source, IDS), exact_tokens=same_tokens)
        assert same(again.cache, moved.cache)


ARGUMENTS = [
    ({"exact_tokens": "ab"}, "exact_tokens: found str 'ab', needed indices"),
    ({"exact_tokens": {3, 4}}, "exact_tokens: found set"),
    ({"exact_tokens": [[1, 2], [3]]}, "exact_tokens: found list"),
    ({"exact_tokens": [1j]}, "exact_tokens: .*whole numbers"),
    ({"exact_head": 1.5}, "exact_head: found 1.5, needed a whole number"),
    ({"exact_head": None}, "exact_head: found None"),
    ({"exact_head": True}, "exact_head: found True"),
    ({"exact_tail": "3"}, "exact_tail: found '3'"),
    ({"recompute": "a"}, "recompute: found 'a', needed a fraction of 0 to 1"),
    ({"recompute": True}, "recompute: found True"),
    ({"recompute": None}, "recompute: found None"),
    ({"recompute": float("nan")}, "recompute: found nan"),
    ({"recompute": 0.1, "guide": "org/source"}, "source_model: found str, needed a loaded model"),
    ({"target_cache": "x", "target_ids": IDS}, "cache: found str, needed a transformers Cache"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_arguments(pair, arguments, message):
    source, target, mapper = pair
    with pytest.raises(MismatchError, match=message):
        handoff(mapper, target, IDS, prefilled(source, IDS), **arguments)
    assert handoff(mapper, target, IDS, prefilled(source, IDS), **arguments, on_error="prefill").status == "fallback_prefill"


def test_whole_numbers_of_numpy_are_whole_numbers(pair):
    source, target, mapper = pair
    moved = handoff(mapper, target, IDS, prefilled(source, IDS), exact_head=np.int64(2), recompute=np.float32(0.0))
    assert moved.n_exact == 2


def test_a_mapper_that_is_none(pair):
    source, target, _ = pair
    with pytest.raises(MismatchError, match=r"mapper: found str, needed a Mapper: load_mapper\(\.\.\.\)"):
        handoff("org/mapper", target, IDS, prefilled(source, IDS))


def test_what_a_model_returns_is_no_cache(pair):
    source, target, mapper = pair
    returned = source(IDS)
    name = caches.cache_argument(source)
    with pytest.raises(MismatchError, match=rf"cache: found CausalLMOutput\w+, needed .*pass its \.{name}$"):
        handoff(mapper, target, IDS, returned)
    assert handoff(mapper, target, IDS, getattr(returned, name)).status == "applied"


def test_target_ids_that_are_no_tensor(pair):
    source, target, mapper = pair
    held = prefilled(target, IDS[:, :4])
    with pytest.raises(MismatchError, match="target_ids: found list, needed"):
        handoff(mapper, target, IDS, prefilled(source, IDS), target_cache=held, target_ids=IDS[:, :4].tolist())


@pytest.mark.parametrize("on_error", ["raise", "prefill"])
def test_what_no_prefill_could_use_is_refused_all_the_same(pair, tokenizer, on_error):
    source, target, mapper = pair
    cache = prefilled(source, IDS)
    size = target.config.vocab_size
    high, low = IDS.clone(), IDS.clone()
    high[1, 3], low[0, 2] = size, -1
    for ids, message in (
        (
            tokenizer("In the beginning", return_tensors="pt"),
            r'found BatchEncoding, needed a tensor .*pass its \["input_ids"\]',
        ),
        ({"input_ids": IDS}, r'found dict, needed a tensor .*pass its \["input_ids"\]'),
        (IDS.tolist(), "found list, needed a tensor"),
        ("In the beginning", "found str, needed a tensor"),
        (IDS.float(), "found torch.float32, needed token ids"),
        (IDS > 0, "found torch.bool, needed token ids"),
        (IDS[:, :0], r"found shape \(2, 0\), needed .* at least one token"),
        (high, f"found ids of .* to {size}, needed 0 to {size - 1} of the target's vocabulary"),
        (low, "found ids of -1 to"),
    ):
        with pytest.raises(MismatchError, match=f"input_ids: {message}"):
            handoff(mapper, target, ids, cache, on_error=on_error)
    last = IDS.clone()
    last[0, 0] = size - 1
    assert handoff(mapper, target, last, cache, on_error=on_error).status == "applied"
    with pytest.raises(MismatchError, match="attention_mask: found list"):
        handoff(mapper, target, IDS, cache, attention_mask=[[1] * 12] * 2, on_error=on_error)
    with pytest.raises(MismatchError, match="target_model: found str, needed a loaded model"):
        handoff(mapper, "org/target", IDS, cache, on_error=on_error)


def test_one_cache_is_not_the_sources_and_the_targets(tiny_pair, load):
    """What the target's cache holds is cropped and added to; the source's is never changed."""
    model = load(tiny_pair[0]).model
    cache = prefilled(model, IDS)
    with pytest.raises(MismatchError, match="target_cache: found source_cache itself, needed a cache that the target may"):
        handoff(identity_mapper(model), model, IDS, cache, target_cache=cache, target_ids=IDS)
    assert caches.cache_length(cache) == 12


def test_a_handoff_has_a_mask_of_its_own(pair):
    source, target, mapper = pair
    moved = handoff(mapper, target, IDS, prefilled(source, IDS))
    with pytest.raises(MismatchError, match="attention_mask: found a value, needed none, because the handoff keeps its own"):
        moved.generate(max_new_tokens=2, attention_mask=torch.ones_like(IDS))
    assert moved.generate(max_new_tokens=2, eos_token_id=None).shape == (2, 14)


def test_generate_refuses_another_models_cache(pair):
    source, target, _ = pair
    for model, other in ((source, target), (target, source)):  # 3 and 4 layers of the same heads: transformers says nothing
        n_found, n_needed = (one.config.num_hidden_layers for one in (other, model))
        with pytest.raises(MismatchError, match=f"cache: found {n_found} layers, needed {n_needed} as qwen3 has"):
            generate(model, IDS, prefilled(other, IDS[:, :5]), max_new_tokens=2)
    own = caches.read_cache(prefilled(target, IDS[:, :5]))
    for halves, found in (
        ([(keys[:, :1], values[:, :1]) for keys, values in own], r"\(1, 16\)"),
        ([(keys[..., :8], values[..., :8]) for keys, values in own], r"\(2, 8\)"),
    ):
        wrong = caches.full_cache()
        for layer_index, (keys, values) in enumerate(halves):
            caches.append(wrong, layer_index, keys, values)
        with pytest.raises(MismatchError, match=rf"cache, layer 0: found heads and head size {found}, needed \(2, 16\)"):
            generate(target, IDS, wrong, max_new_tokens=2)
    with pytest.raises(MismatchError, match="cache: found list, needed a transformers Cache"):
        generate(target, IDS, own, max_new_tokens=2)
    with pytest.raises(MismatchError, match="input_ids: found list, needed a tensor"):
        generate(target, IDS.tolist(), prefilled(target, IDS[:, :5]), max_new_tokens=2)
    assert generate(target, IDS, caches.full_cache(), max_new_tokens=2, eos_token_id=None).shape == (2, 14)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3n", "gemma4", "gemma4-fewer", "gemma4-shared", "mimo-v2-flash"])
def test_generate_knows_a_models_own_cache_whatever_its_layers_are(name):
    """Latent keys, for which no mapper is made, keys that layers share, heads that differ by kind of layer."""
    from zoo import FAMILIES, REFUSED, build, build_refused

    try:
        made = [build_refused(family) for family in REFUSED if family.name == name]
        (model,) = made or [build(family) for family in FAMILIES if family.name == name]
    except (ValueError, KeyError) as error:
        pytest.skip(f"this transformers does not know it: {error}"[:80])
    ids = IDS[:, :7] % 90
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, eos_token_id=None)
    for cache in (caches.full_cache(), caches.new_cache(model)):
        with torch.no_grad():
            model(input_ids=ids[:, :5], use_cache=True, **{caches.cache_argument(model): cache})
        found = generate(model, ids, cache, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert torch.equal(found, wanted)


def test_bind(pair, tokenizer):
    source, target, mapper = pair
    with pytest.raises(MismatchError, match="source_model: found str, needed a loaded model"):
        mapper.bind("org/source", "org/target")
    with pytest.raises(MismatchError, match="target_model: found str, needed a loaded model"):
        mapper.bind(source, "org/target")
    with pytest.raises(MismatchError, match="tokenizer: found str, needed a loaded tokenizer"):
        mapper.bind(tokenizer="x")
    with pytest.raises(MismatchError, match="tokenizer: found str, needed a loaded tokenizer"):
        mapper.bind(source, target, tokenizer="x")
    with pytest.raises(MismatchError, match=r"field tokenizer_fingerprint: .*use the tokenizer of made/up"):
        mapper.bind(tokenizer=tokenizer)  # also where no model is given: the spec made by hand says "t"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("foo",), "device: found 'foo', needed one that torch has here"),
        (("cuda:77",), "device: found 'cuda:77', needed one"),
        ((torch.bfloat16,), "device: found torch.bfloat16, needed one"),
        ((7.5,), "device: found 7.5"),
        ((None, torch.int8), "dtype: found torch.int8, needed one of torch.float32"),
        ((None, "bfloat16"), "dtype: found 'bfloat16'"),
        ((["cpu", "cpu", "cpu", "foo"],), "device: found 'foo'"),
    ],
)
def test_places(pair, arguments, message):
    mapper = pair[2]
    with pytest.raises(MismatchError, match=message):
        mapper.to(*arguments)
    assert mapper.to("cpu", torch.bfloat16).nbytes * 2 == mapper.nbytes


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_a_model_that_was_cast_as_a_whole(cast):
    from zoo import FAMILIES, build

    model = build(next(family for family in FAMILIES if family.name == "llama"))
    mapper = identity_mapper(model)
    mapper.bind(model, model)
    model.to(cast)
    with pytest.raises(MismatchError, match=rf"rope.tables\[0\]: found inverse frequencies rounded to {cast}.*from_pretrained"):
        mapper.bind(model, model)


def test_other_weights_say_what_to_do(pair):
    source, target, mapper = pair
    with torch.no_grad():
        weight = next(parameter for name, parameter in target.named_parameters() if "k_proj" in name)
        kept = weight.clone()
        weight.mul_(1.05)
    try:
        with pytest.raises(KvfitError, match=r"load the weights of made/up .*or fit a mapper") as caught:
            mapper.bind(source, target)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert "field weight_fingerprint: found " in str(caught.value)
    assert max(len(word) for word in str(caught.value).split()) < 30


def test_source_ids_tell_a_cache_of_another_text(pair):
    """Where no source is bound, nothing else does: the same cache passes without them."""
    source, target, known = pair
    mapper = random_mapper(known.spec)  # that has met no source
    cache = prefilled(source, IDS[:, :10])
    other = IDS.clone()
    other[1, 4] += 1
    assert handoff(mapper, target, other, cache).status == "applied"  # the hole that they close
    with pytest.raises(
        MismatchError, match=rf"source_ids: found id {int(IDS[1, 4])} at row 1, token 4, needed {int(other[1, 4])}"
    ):
        handoff(mapper, target, other, cache, source_ids=IDS[:, :10])
    fallen = handoff(mapper, target, other, cache, source_ids=IDS[:, :10], on_error="prefill")
    assert (fallen.status, fallen.n_exact) == ("fallback_prefill", 11)
    plain = handoff(mapper, target, IDS, cache)
    for same_ids in (IDS[:, :10], IDS[:, :10].int()):
        assert same(handoff(mapper, target, IDS, cache, source_ids=same_ids).cache, plain.cache)


def test_source_ids_are_one_for_each_token_of_the_cache(pair):
    source, target, mapper = pair
    cache = prefilled(source, IDS[:, :10])
    for wrong, found in (
        (IDS[:, :11], r"\(2, 11\)"),
        (IDS[:, :9], r"\(2, 9\)"),
        (IDS[:1, :10], r"\(1, 10\)"),
        (IDS.tolist(), "list"),
    ):
        with pytest.raises(MismatchError, match=rf"source_ids: found {found}, needed \(2, 10\) ids.*\[:, :-1\]"):
            handoff(mapper, target, IDS, cache, source_ids=wrong)
    with pytest.raises(MismatchError, match="source_cache: found 2 sequences of 10 tokens, needed 2 of at most 8"):
        handoff(mapper, target, IDS[:, :8], cache, source_ids=IDS[:, :10])


def test_source_ids_on_padding_may_be_any(pair):
    source, target, mapper = pair
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    read = torch.where(mask == 0, 7, IDS)
    moved = handoff(mapper, target, IDS, prefilled(source, read, mask), attention_mask=mask, source_ids=read)
    assert moved.status == "applied"


def test_ids_that_came_after_the_fit_are_refused():
    """A token added to the tokenizer: no map has seen it, and no digest covers its row of the embedding."""
    from zoo import FAMILIES, Tokenizer, build

    model = build(next(family for family in FAMILIES if family.name == "qwen3"))
    side = describe_model(model, Tokenizer(90), ref="org/name", revision=None)
    mapper = random_mapper(mapper_spec(side, side, [[0], [1], [2]]))
    ids = IDS % 90
    assert handoff(mapper, model, ids, prefilled(model, ids)).status == "applied"
    ids[1, 3] = 90
    with pytest.raises(MismatchError, match="input_ids: found id 90 at row 1, token 3, needed ids below 90"):
        handoff(mapper, model, ids, prefilled(model, ids))
    assert handoff(mapper, model, ids, prefilled(model, ids), on_error="prefill").status == "fallback_prefill"
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padding may be any id
    assert handoff(mapper, model, ids, prefilled(model, ids, mask), attention_mask=mask).status == "applied"


def test_a_padded_batch_without_its_mask_warns(pair):
    """Nothing else tells: the source's cache may be right for the mask that was forgotten."""
    source, target, known = pair
    mapper = random_mapper(known.spec)  # that has met no source
    assert target.generation_config.pad_token_id == 0
    ids = IDS.clone()
    ids[0, :3] = 0
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = prefilled(source, ids, mask)
    with pytest.warns(UserWarning, match="found 1 of 2 rows that begin with token 0, .* and no attention_mask") as caught:
        handoff(mapper, target, ids, cache)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handoff(mapper, target, ids, cache, attention_mask=mask)
        handoff(mapper, target, ids[:1], [(keys[:1], values[:1]) for keys, values in caches.read_cache(cache)])
        ids[1, 0] = 0  # a beginning that all rows have is none that a longer row would lack
        handoff(mapper, target, ids, prefilled(source, ids))
