"""What a pass leaves in the cache is checked; what the target cannot run is refused before anything changes."""

import copy
from functools import partial

import pytest
import torch
import zoo
from made_mappers import cache_of, content, identity_mapper, mapper_spec, model_spec, prefilled, same
from torch.utils._python_dispatch import TorchDispatchMode

import kvfit
from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.digests import config_digest, weight_fingerprint
from kvfit.runtime.mapper import Mapper
from kvfit.runtime.passes import check_ran, run
from kvfit.runtime.rewrite import check_rewrite
from kvfit.spec import RopeSpec

# These conversations are short. With the default of eight exact first tokens, little of them would be mapped.
handoff = partial(kvfit.handoff, exact_head=1)


def build(name="qwen3", **more):
    return zoo.build(next(family for family in zoo.FAMILIES if family.name == name), **more)


def tokens(batch, length, seed=0):
    return torch.randint(5, 80, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found, wanted, atol=1e-4):
    for a, b in zip(content(found), content(wanted), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=atol)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_continues_like_the_target_itself(options, use_cache):
    model = build()
    model.config.use_cache = model.generation_config.use_cache = use_cache
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    torch.manual_seed(0)
    wanted = model.generate(ids, attention_mask=mask, **{**options, "use_cache": True})
    moved = handoff(identity_mapper(model), model, ids, prefilled(model, ids, mask), attention_mask=mask)
    torch.manual_seed(0)
    assert torch.equal(moved.generate(**options), wanted)
    held = "20" if "num_beams" in options else "2[67]"  # beams leave the prompt alone
    with pytest.raises(MismatchError, match=rf"cache: found {held} tokens for a prompt of 20"):
        moved.generate(**options)


def test_an_adapter_on_the_embedding_is_refused_wherever_the_model_is_used():
    """It changes keys by as much as one on a layer, and no layer shows it."""

    class Adapted(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer, self.lora_embedding_A = base_layer, torch.nn.Parameter(torch.randn(2, 8))
            self.weight = base_layer.weight

        def forward(self, ids):
            return self.base_layer(ids) * 1.5

    model, ids = build(), tokens(1, 20)
    mapper, source = identity_mapper(model), prefilled(model, ids)
    bound = mapper.bind(model, model)
    assert handoff(bound, model, ids, source, recompute=0.2, guide=model).status == "applied"
    plain = copy.deepcopy(model)
    model.model.embed_tokens = Adapted(model.model.embed_tokens)
    refused = r"found an adapter on model\.embed_tokens"
    for use in (
        lambda: mapper.bind(model, plain),
        lambda: mapper.bind(plain, model),
        lambda: handoff(bound, model, ids, source),
        lambda: handoff(bound, plain, ids, source, recompute=0.2, guide=model),
        lambda: bound.transfer(source, target_model=model),
    ):
        with pytest.raises(MismatchError, match=refused):
            use()
    assert handoff(bound, plain, ids, source, recompute=0.2, guide=plain).status == "applied"


def test_counts_are_those_of_the_cache():
    model = build()
    ids = tokens(1, 20)
    mapper, source = identity_mapper(model), prefilled(model, ids)
    first = handoff(mapper, model, ids[:, :9], source_of(source, 8), exact_head=2, exact_tail=3)
    assert (first.n_reused, first.n_exact, first.n_mapped) == (0, 5, 3)
    moved = handoff(mapper, model, ids, source, target_cache=first.cache, target_ids=ids[:, :8], exact_head=10, exact_tail=4)
    assert (moved.n_reused, moved.n_exact, moved.n_mapped) == (8, 6, 5)
    assert caches.cache_length(moved.cache) == 19 == moved.n_reused + moved.n_exact + moved.n_mapped


def source_of(cache, n_tokens):
    return [(keys[:, :, :n_tokens], values[:, :, :n_tokens]) for keys, values in caches.read_cache(cache)]


def test_a_pass_that_caches_nothing_is_refused():
    """As gradient checkpointing did in older versions: the pass succeeds, the cache stays empty."""

    class Forgetful(type(build())):
        def __init__(self, config):
            super().__init__(config)
            inner = self.model.forward
            self.model.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, "use_cache": False, name: None})

    model = build()
    name = caches.cache_argument(model)
    forgetful = Forgetful(model.config).eval()
    forgetful.load_state_dict(model.state_dict())
    ids = tokens(1, 20)
    with pytest.raises(UnsupportedModelError, match=r"qwen3: found a cache that grew by \[.*\] tokens in a pass over 20"):
        run(forgetful, ids, caches.new_cache(model))
    with pytest.raises(UnsupportedModelError, match=r"qwen3: found a cache that grew by \[.*\] tokens in a pass over 19"):
        handoff("no mapper", forgetful, ids, prefilled(model, ids), on_error="prefill")


def test_gradient_checkpointing_never_loses_tokens():
    """Newer versions cache all the same, older ones nothing: either all tokens are there, or it is refused."""
    model = build()
    ids = tokens(1, 20)
    mapper, source, native = identity_mapper(model), prefilled(model, ids), prefilled(model, ids[:, :19])
    model.train()
    model.gradient_checkpointing_enable()
    probe = caches.full_cache()
    caches.forward(model, ids, probe, base=True)
    older = caches.cache_length(probe) < 20
    for on_error in ("raise", "prefill"):
        if older:
            with pytest.raises(UnsupportedModelError, match="call its eval"):
                handoff(mapper, model, ids, source, exact_tail=4, on_error=on_error)
        else:
            close(handoff(mapper, model, ids, source, exact_tail=4, on_error=on_error).cache, native)


def test_a_layer_of_another_length_is_found():
    model = build()
    cache = prefilled(model, tokens(1, 6))
    whole = cache.layers[1].update

    def update(keys, values, *args, **kwargs):
        seen = whole(keys, values, *args, **kwargs)
        cache.layers[1].keys = cache.layers[1].keys[:, :, :-1]
        return seen

    cache.layers[1].update = update
    with pytest.raises(UnsupportedModelError, match=r"a cache that grew by \[2, 3\] tokens in a pass over 3"):
        run(model, tokens(1, 3), cache)


def test_a_target_that_makes_nan_is_refused():
    model = build()
    ids = tokens(1, 20)
    source = prefilled(model, ids)
    ids[0, 17] = 77
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[77].fill_(float("nan"))
    mapper = identity_mapper(broken)
    for on_error in ("raise", "prefill"):
        with pytest.raises(MismatchError, match="target's cache, keys of layer 0: found NaN or infinity in tokens that"):
            handoff(mapper, broken, ids, source, exact_tail=3, on_error=on_error)
    handoff(identity_mapper(model), model, ids, source, exact_tail=3)  # the control


def test_padding_of_the_target_may_be_anything():
    model = build()
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = prefilled(model, ids, mask)
    cache.layers[1].values[0, :, :4] = float("nan")
    check_ran(cache, [(0, 10)], mask)
    with pytest.raises(MismatchError, match="values of layer 1"):
        check_ran(cache, [(0, 10)], None)
    cache.layers[1].values[0, :, 4] = float("nan")
    with pytest.raises(MismatchError, match="values of layer 1"):
        check_ran(cache, [(0, 10)], mask)
    check_ran(cache, [(5, 10)], mask)


def test_the_cache_of_another_beam_is_refused_with_a_guide():
    """Returned sequences need not stand in the order of the cache's rows."""
    model = build()
    ids = tokens(3, 24)
    mask = torch.ones_like(ids)
    mask[2, :5] = 0
    mapper, source = identity_mapper(model), prefilled(model, ids, mask)
    arguments = {"attention_mask": mask, "recompute": 0.1, "guide": model}
    handoff(mapper, model, ids, source, **arguments)
    for changed, row, token in ((20, 1, 20), (3, 0, 3), (5, 2, 5)):
        other = ids.clone()
        other[row, changed] += 1
        with pytest.raises(MismatchError, match=rf"another token than input_ids has at row {row}, token {token}, needed"):
            handoff(mapper, model, other, source, **arguments)
    other = ids.clone()
    other[2, :5] += 1  # padding may be any id
    handoff(mapper, model, other, source, **arguments)
    half = cache_of([(k.bfloat16().float(), v.bfloat16().float()) for k, v in caches.read_cache(source)])
    handoff(mapper, model, ids, half, **arguments)  # rounding is no other token


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "glm", "phi3", "smollm3"])
def test_a_source_that_counted_its_padding_is_refused_with_a_guide(name):
    """`forward` of transformers numbers padded rows from 0 on, padding included, unless it is given positions."""
    model = build(name)
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    arguments = {"attention_mask": mask, "recompute": 0.1, "guide": model}
    cache = caches.full_cache()
    model(input_ids=ids, attention_mask=mask, use_cache=True, **{caches.cache_argument(model): cache})
    with pytest.raises(MismatchError, match=r"at another position than attention_mask gives at row 1, token \d+, needed 0 for"):
        handoff(identity_mapper(model), model, ids, cache, **arguments)
    assert handoff(identity_mapper(model), model, ids, prefilled(model, ids, mask), **arguments).status == "applied"


def test_a_source_that_was_bound_knows_its_cache():
    """Edited text, another model's cache and padding that was counted; the control is a mapper that knows no source."""
    model, ids = build(), tokens(2, 60)
    other = copy.deepcopy(model)
    other.model.embed_tokens.weight.data = other.model.embed_tokens.weight.flip(0)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    unbound = identity_mapper(model)
    bound = identity_mapper(model).bind(model, model)
    edited = ids.clone()
    edited[0, 40:-1] = ids[0, 41:]  # one token left out
    counted = caches.full_cache()
    model(input_ids=ids, attention_mask=mask, use_cache=True, **{caches.cache_argument(model): counted})
    source = prefilled(model, ids, mask)
    for given, cache, found in (
        (edited, source, "of another token than input_ids has at row 0, token 4[0-9]"),
        (ids, prefilled(other, ids, mask), "of another token than input_ids has at row 0, token 0"),
        (ids, counted, "at another position than attention_mask gives at row 1"),
    ):
        with pytest.raises(MismatchError, match=found):
            handoff(bound, model, given, cache, attention_mask=mask)
        moved = handoff(bound, model, given, cache, attention_mask=mask, on_error="prefill")
        assert moved.status == "fallback_prefill"
        assert handoff(unbound, model, given, cache, attention_mask=mask).status == "applied"
    assert handoff(bound, model, ids, source, attention_mask=mask).status == "applied"
    assert handoff(bound, model, ids[:, -1:], prefilled(model, ids[:, -1:])).status == "applied"


def test_a_model_without_positions_cannot_run_chosen_tokens():
    """ALiBi reads distances off a mask that is not ours; a plain transfer stays."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=2)).eval()
    refused = "bloom: found a model that takes no positions, needed position_ids"
    with pytest.raises(UnsupportedModelError, match=refused):
        check_rewrite(bloom, (None, None))
    spec = model_spec(
        2, 2, 16, RopeSpec((), (None, None)), family="bloom", config_digest=config_digest(bloom.config),
        weight_fingerprint=weight_fingerprint(bloom),
    )  # fmt: skip
    layers = mapper_spec(spec, spec, [[0], [1]])
    mapper = Mapper(layers, {(one.kind, one.layer_index): (torch.eye(32), torch.zeros(32)) for one in layers.layers})
    ids, options = tokens(1, 20), {"max_new_tokens": 6, "do_sample": False}
    source = prefilled(bloom, ids)
    before = content(source)
    earlier = prefilled(bloom, ids[:, :8])
    held = content(earlier)
    for chosen in ({"recompute": 0.2, "guide": bloom}, {"exact_tokens": [3, 5]}):
        with pytest.raises(UnsupportedModelError, match=refused):
            handoff(mapper, bloom, ids, source, target_cache=earlier, target_ids=ids[:, :8], **chosen)
        assert same(content(earlier), held)
    moved = handoff(mapper, bloom, ids, source, exact_head=2, exact_tail=3)
    assert (moved.status, moved.n_mapped, moved.n_exact) == ("applied", 14, 5)
    assert torch.equal(moved.generate(**options), bloom.generate(ids, **options))
    assert same(content(source), before)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen2-window", "glm", "gpt-neox", "cohere2", "phi3"])
def test_models_that_can_run_chosen_tokens(name):
    model = build(name)
    windows = caches.layer_windows(model, 3)
    check_rewrite(model, windows)
    inner = model.base_model
    forward = type(inner).forward

    def deaf(self, **arguments):  # the control: a model that does not listen to its mask
        return forward(self, **{**arguments, "attention_mask": None})

    inner.forward = deaf.__get__(inner)
    with pytest.raises(UnsupportedModelError, match=r"found that (layer|a pass over chosen tokens)"):
        check_rewrite(model, windows)


def test_a_kernel_that_takes_no_mask_is_found_before_the_cache_changes():
    model = build()
    ids = tokens(1, 20)
    mapper, source = identity_mapper(model), prefilled(model, ids)
    other = copy.deepcopy(model)
    held = prefilled(other, ids[:, :8])
    before = content(held)
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="found attention implementation flash_attention_2, needed sdpa"):
        handoff(
            mapper,
            other,
            ids,
            source,
            target_cache=held,
            target_ids=torch.cat([ids[:, :6], ids[:, 6:8] + 1], 1),
            exact_tokens=[9],
        )
    assert same(held, before)


@pytest.mark.parametrize("held", [10, 24, 30])
def test_a_static_window_that_is_full_continues(held):
    from transformers import StaticCache

    model = build("gemma3")
    ids = tokens(1, 41)
    mapper, source = identity_mapper(model), prefilled(model, ids, cache=caches.full_cache())
    static = prefilled(model, ids[:, :held], cache=StaticCache(config=model.config, max_cache_len=64))
    moved = handoff(mapper, model, ids, source, target_cache=static, target_ids=ids[:, :held], exact_tail=3)
    assert (moved.cache is static, moved.n_reused, moved.n_mapped) == (True, held, 37 - held)
    native = prefilled(model, ids[:, :40])
    found = caches.forward(model, ids[:, 40:], moved.cache)
    assert torch.allclose(found, caches.forward(model, ids[:, 40:], native), atol=1e-4)


@pytest.mark.parametrize(
    ("place", "arguments", "refused"),
    [
        (7, {}, False),
        (0, {}, True),
        (17, {"exact_tail": 3}, True),
        (7, {"exact_tokens": [6, 7]}, True),
        (7, {"exact_tokens": [6, 8]}, False),
    ],
)
def test_placeholders_are_not_run(place, arguments, refused):
    """The source saw an image there; the target's own embedding of the id means nothing."""
    model = build()
    ids = tokens(1, 20)
    mapper, source = identity_mapper(model), prefilled(model, ids)
    model.config.image_token_id = 90
    ids[0, place] = 90
    if not refused:
        assert handoff(mapper, model, ids, source, **arguments).status == "applied"
    else:
        with pytest.raises(MismatchError, match=f"found the placeholder 90 of an image.* at row 0, token {place}, needed text"):
            handoff(mapper, model, ids, source, **arguments)
    with pytest.raises(MismatchError, match="found the placeholder 90"):
        handoff("no mapper", model, ids, source, on_error="prefill")
    ids[0, place] = 89
    assert handoff(mapper, model, ids, source, **arguments).status == "applied"


def test_what_was_seen_is_not_compared_with_the_placeholders_embedding():
    """The cache holds what pixels made; that the ids tell something else is no sign of another conversation."""
    model = build()
    ids = tokens(1, 40)
    seen = ids.clone()
    ids[0, 10:14] = 90
    mapper, source = identity_mapper(model), prefilled(model, seen)  # other embeddings than those of token 90
    with pytest.raises(MismatchError, match="of another token than input_ids has at row 0, token 1"):
        handoff(mapper.bind(model, model), model, ids, source)
    model.config.image_token_id = 90
    for arguments in ({}, {"recompute": 0.4, "guide": model}):
        assert handoff(mapper.bind(model, model), model, ids, source, **arguments).status == "applied"
    ids[0, 20] = 89
    with pytest.raises(MismatchError, match="of another token than input_ids has at row 0, token 20"):
        handoff(mapper.bind(model, model), model, ids, source, recompute=0.4, guide=model)


def test_guided_recompute_leaves_placeholders_alone():
    model = build()
    ids = tokens(1, 40)
    ids[0, 10:30] = 90
    mapper, source = identity_mapper(model), prefilled(model, ids)
    model.config.image_token_id = 90
    moved = handoff(mapper, model, ids, source, recompute=0.4, guide=model)
    assert not set(moved.recomputed[0].tolist()) & set(range(10, 30))
    with pytest.raises(MismatchError, match="found the placeholder 90"):
        handoff(mapper, model, ids, source, recompute=0.8, guide=model)  # more than there is text


class Reads(TorchDispatchMode):
    """Counts values that a host reads back, for which it waits for a graphics card."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += any(name in str(function) for name in ("_local_scalar_dense", "is_nonzero", "aten.nonzero", "aten.equal"))
        return function(*arguments, **(keywords or {}))


def test_a_handoff_waits_a_few_times_whatever_its_length():
    model = build()
    mapper = identity_mapper(model)

    def reads(length, **arguments):
        ids = tokens(1, length)
        source = prefilled(model, ids)
        handoff(mapper, model, ids, source, **arguments)
        with Reads() as mode:
            handoff(mapper, model, ids, source, **arguments)
        return mode.count

    plain, guided = {"exact_tail": 3}, {"recompute": 0.2, "guide": model}
    assert reads(20, **plain) == reads(300, **plain) <= 12
    assert reads(40, **guided) == reads(300, **guided) <= 24
