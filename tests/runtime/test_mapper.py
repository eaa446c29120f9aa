"""`Mapper`: against a transfer written out in loops, and against plain prefill where the map is exact."""

import copy
import gc
import math
import pickle
import threading
import time
import weakref

import pytest
import torch
from made_mappers import (
    cache_of,
    content,
    identity_mapper,
    mapper_spec,
    model_spec,
    prefilled,
    random_mapper,
    random_pairs,
    reference_transfer,
    same,
    spec_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.model.generate import generate
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS

SETS = [[0, 1, 2], [1], [0, 2], [0, 2], [1, 2]]


def make(support="full", inputs="same", source_heads=2, target_heads=2, dtype=torch.float32, keys_rotated=False):
    source, target = model_spec(3, source_heads, 8), model_spec(5, target_heads, 6)
    return random_mapper(
        mapper_spec(source, target, SETS, support=support, inputs=inputs, keys_rotated=keys_rotated), dtype=dtype
    )


def close(found, wanted, relative):
    """Largest difference, relative to the largest value."""
    for (k, v), (wk, wv) in zip(found, wanted, strict=True):
        for a, b in ((k, wk), (v, wv)):
            assert a.shape == b.shape
            assert float((a.double() - b).abs().max() / b.abs().max()) < relative


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("inputs", ["same", "both"])
@pytest.mark.parametrize("support", ["full", "head"])
def test_equals_the_written_out_definition(support, inputs, heads):
    if support == "head" and heads[1] % heads[0]:
        pytest.skip("heads do not match up")
    mapper = make(support, inputs, *heads)
    pairs = random_pairs(mapper.spec.source, 2, 7)
    positions = torch.stack([torch.arange(7) + 990, (torch.arange(7) - 2).clamp(min=0)])
    found = mapper.transfer(cache_of(pairs), positions=positions)
    close(caches.read_cache(found), reference_transfer(mapper, pairs, positions), 2e-5)


def test_keys_that_stay_rotated_are_not_turned():
    mapper = make(keys_rotated=True)
    pairs = random_pairs(mapper.spec.source, 1, 5)
    close(mapper.transfer_layers(pairs), reference_transfer(mapper, pairs, torch.arange(5)), 2e-5)
    turned = random_mapper(make().spec)  # the same weights, un-rotating: another result
    assert float((turned.transfer_layers(pairs)[0][0] - mapper.transfer_layers(pairs)[0][0]).abs().max()) > 0.1


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16])
def test_dtypes(weights, cached):
    mapper = make(dtype=weights)
    pairs = random_pairs(mapper.spec.source, 1, 6, dtype=cached)
    found = mapper.transfer(pairs)
    assert {half.dtype for half in content(found)} == {cached}
    precise = 1e-5 if weights == cached == torch.float32 else 2e-2
    close(caches.read_cache(found), reference_transfer(mapper, pairs, torch.arange(6)), precise)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 12, 100])
@pytest.mark.parametrize("batch", [1, 4])
def test_chunks_change_nothing(chunk, batch):
    mapper = make(inputs="both")
    pairs = random_pairs(mapper.spec.source, batch, 11)
    positions = torch.stack([torch.arange(11) + 50 * row for row in range(batch)])
    whole = mapper.transfer_layers(pairs, positions=positions, chunk_tokens=1000)
    parts = mapper.transfer_layers(pairs, positions=positions, chunk_tokens=chunk)
    close(parts, [(k.double(), v.double()) for k, v in whole], 1e-6)


def test_positions_default_to_the_first_ones():
    mapper = make()
    pairs = random_pairs(mapper.spec.source, 2, 5)
    given = mapper.transfer(pairs, positions=torch.arange(5).expand(2, 5))
    assert same(mapper.transfer(pairs), given)
    assert not same(mapper.transfer(pairs, positions=torch.arange(5) + 1), given)


def test_into_appends_only_new_tokens():
    mapper = make()
    pairs = random_pairs(mapper.spec.source, 2, 9)
    whole = mapper.transfer(pairs)
    cache = mapper.transfer([(k[:, :, :4], v[:, :, :4]) for k, v in pairs])
    before = content(cache)
    assert mapper.transfer(pairs, into=cache) is cache
    close(caches.read_cache(cache), [(k.double(), v.double()) for k, v in caches.read_cache(whole)], 1e-6)
    assert same([half[:, :, :4] for half in content(cache)], before)
    assert same(mapper.transfer(pairs, into=cache), cache)  # nothing new: nothing done


def test_into_keeps_its_dtype():
    mapper = make()
    pairs = random_pairs(mapper.spec.source, 1, 6)
    cache = mapper.transfer([(k[:, :, :2].bfloat16(), v[:, :, :2].bfloat16()) for k, v in pairs])
    mapper.transfer(pairs, into=cache)
    assert {half.dtype for half in content(cache)} == {torch.bfloat16}


def test_layers():
    mapper = make()
    pairs = random_pairs(mapper.spec.source, 1, 6)
    whole = caches.read_cache(mapper.transfer(pairs))
    some = mapper.transfer(pairs, layers=[3, 1])
    assert [layer.get_seq_length() for layer in some.layers] == [0, 6, 0, 6]
    for index in (1, 3):
        assert torch.equal(some.layers[index].keys, whole[index][0])
        assert torch.equal(some.layers[index].values, whole[index][1])
    rest = mapper.transfer(pairs, layers=[0, 2, 4], into=some)
    assert same(rest, mapper.transfer(pairs))
    with pytest.raises(MismatchError, match=r"layers: found \[5\]"):
        mapper.transfer(pairs, layers=[5])


def test_the_source_cache_is_never_changed():
    mapper = make()
    cache = cache_of(random_pairs(mapper.spec.source, 1, 6))
    before = content(cache)
    moved = mapper.transfer(cache)
    for layer in moved.layers:
        layer.keys.zero_()
    assert same(cache, before)


def test_a_static_cache_is_a_source(tiny_pair, load):
    from transformers import StaticCache

    model = load(tiny_pair[0]).model
    mapper = identity_mapper(model)
    ids = torch.arange(5, 25)[None]
    static = prefilled(model, ids, cache=StaticCache(config=model.config, max_cache_len=64))
    close(
        caches.read_cache(mapper.transfer(static)),
        [(k.double(), v.double()) for k, v in caches.read_cache(prefilled(model, ids))],
        1e-5,
    )


def refusals():
    spec = make().spec
    pairs = random_pairs(spec.source, 2, 6)
    target = spec.target
    odd = [(k.clone(), v.clone()) for k, v in pairs]
    odd[1] = (odd[1][0], odd[1][1][:, :, :5])
    wide = random_pairs(model_spec(3, 2, 10), 2, 6)
    long = cache_of(random_pairs(target, 2, 7))
    uneven = cache_of(random_pairs(target, 2, 3))
    uneven.update(*random_pairs(target, 2, 1)[0], 2)
    yield "layers", pairs[:2], {}, "found 2 layers, needed 3"
    yield "length", odd, {}, "cache layer 1: found values of 2 sequences and 5 tokens"
    yield "head size", wide, {}, r"keys of layer 0: found shape \(2, 2, 6, 10\), needed \(2, 2, 6, 8\)"
    yield "heads", random_pairs(model_spec(3, 3, 8), 2, 6), {}, r"found shape \(2, 3, 6, 8\)"
    yield "dtype", [(k.int(), v.int()) for k, v in pairs], {}, "found torch.int32"
    yield "two dtypes", [pairs[0], *((k.bfloat16(), v.bfloat16()) for k, v in pairs[1:])], {}, "layer 1: found torch.bfloat16"
    yield "positions", pairs, {"positions": torch.arange(5)}, r"positions: found shape \(5,\)"
    yield "positions per row", pairs, {"positions": torch.zeros(3, 6, dtype=torch.long)}, r"positions: found shape \(3, 6\)"
    yield "fractional positions", pairs, {"positions": torch.arange(6.0)}, "found torch.float32, needed whole numbers"
    yield "longer into", pairs, {"into": long}, "into: found 7 tokens"
    yield "into of another batch", pairs, {"into": cache_of(random_pairs(target, 1, 3))}, r"into, layer 0: found .*\(1, 2, 6\)"
    yield "into of other heads", pairs, {"into": cache_of(random_pairs(spec.source, 2, 3))}, r"\(2, 2, 8\), needed \(2, 2, 6\)"
    yield "into of more layers", pairs, {"into": cache_of(random_pairs(target, 2, 3) * 2)}, "found 10 layers, needed 5"
    yield "uneven into", pairs, {"into": uneven}, r"into: found layers of \[3, 4\] tokens"
    yield "chunk", pairs, {"chunk_tokens": 0}, "chunk_tokens: found 0"


@pytest.mark.parametrize(
    ("pairs", "arguments", "message"), [case[1:] for case in refusals()], ids=[case[0] for case in refusals()]
)
def test_refused_before_anything_changes(pairs, arguments, message):
    into = arguments.get("into", cache_of(random_pairs(make().spec.target, 2, 2)))
    before = content(into)
    with pytest.raises(MismatchError, match=message):
        make().transfer(pairs, **{"into": into, **arguments})
    assert same(into, before)


def test_weights_are_checked():
    mapper = make()
    weights = dict(mapper.maps.weights)
    weights["values", 3] = (weights["values", 3][0][:-1], weights["values", 3][1])
    with pytest.raises(MismatchError, match="values of target layer 3: found weight and bias"):
        Mapper(mapper.spec, weights)
    del weights["values", 3]
    with pytest.raises(MismatchError, match="values of target layer 3: found weight and bias None"):
        Mapper(mapper.spec, weights)
    with pytest.raises(MismatchError, match="floating"):
        Mapper(mapper.spec, {key: (weight.int(), bias.int()) for key, (weight, bias) in mapper.maps.weights.items()})


@pytest.fixture(scope="module")
def target(tiny_pair, load):
    return load(tiny_pair[1]).model


def greedy(model, cache, ids, n_tokens):
    said = []
    for _ in range(n_tokens):
        logits = caches.forward(model, ids, cache, logits_to_keep=1)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        said.append(ids)
    return torch.cat(said, 1)


def test_the_exact_map_continues_like_prefill(target):
    mapper = identity_mapper(target)
    ids = torch.randint(5, 2000, (1, 40), generator=torch.Generator().manual_seed(1))
    plain = greedy(target, prefilled(target, ids[:, :-1]), ids[:, -1:], 64)
    moved = mapper.transfer(prefilled(target, ids[:, :-1]), target_model=target)
    assert torch.equal(greedy(target, moved, ids[:, -1:], 64), plain)
    assert len(set(plain.flatten().tolist())) > 5  # a model that repeats one token would agree with anything

    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = target.generate(ids, **options)
    moved = mapper.transfer(prefilled(target, ids[:, :-1]), target_model=target)
    assert torch.equal(generate(target, ids, moved, **options), wanted)
    # The control: a map that is not exact is noticed.
    wrong = Mapper(mapper.spec, {key: (-weight, bias) for key, (weight, bias) in mapper.maps.weights.items()})
    moved = wrong.transfer(prefilled(target, ids[:, :-1]), target_model=target)
    assert not torch.equal(generate(target, ids, moved, **options), wanted)


def test_left_padded_batches(target):
    mapper = identity_mapper(target)
    ids = torch.randint(5, 2000, (3, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[2, :1] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    native = prefilled(target, ids, mask)
    moved = mapper.transfer(native, positions=positions, target_model=target)
    alone = mapper.transfer(prefilled(target, ids[:1, 7:]), target_model=target)
    for (keys, values), (wanted_keys, wanted_values) in zip(caches.read_cache(moved), caches.read_cache(alone), strict=True):
        assert torch.allclose(keys[:1, :, 7:], wanted_keys, atol=1e-4)
        assert torch.allclose(values[:1, :, 7:], wanted_values, atol=1e-4)


def test_takes_the_targets_dtype(target, tiny_pair):
    mapper = identity_mapper(target)
    cache = prefilled(target, torch.arange(5, 15)[None])
    half = type(target).from_pretrained(tiny_pair[1], dtype=torch.bfloat16)
    moved = mapper.transfer(cache, target_model=half)
    assert {part.dtype for part in content(moved)} == {torch.bfloat16}
    caches.forward(half, torch.tensor([[7]]), moved)


def test_bind_refuses_other_models(tiny_pair, load, target):
    source = load(tiny_pair[0]).model
    spec = mapper_spec(spec_of(source, "tiny-source"), spec_of(target, "tiny-target"), [[0, 1], [1], [2], [2]])
    mapper = random_mapper(spec)
    assert mapper.bind(source, target).verdict == "pass"
    with pytest.raises(MismatchError, match=r"field n_layers: found 4, needed 3 as tiny-source had"):
        mapper.bind(target, target)
    other = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    with pytest.raises(MismatchError, match=r"field weight_fingerprint: .* as tiny-target had"):
        mapper.bind(target_model=other)
    with pytest.raises(MismatchError, match="weight_fingerprint"):
        mapper.check_models(target_model=other)


def test_models_are_checked_once_and_not_kept_alive(target, monkeypatch):
    mapper = identity_mapper(target)
    checked = []
    monkeypatch.setattr("kvfit.runtime.known.check_model", lambda _, model: checked.append(model))
    for _ in range(3):
        mapper.check_models(target_model=target)
        mapper.check_models(source_model=target)
    assert len(checked) == 2  # once in either role
    checked.clear()
    monkeypatch.setattr("kvfit.runtime.known.check_model", lambda _, model, tokenizer=None: checked.append((model, tokenizer)))
    bound = identity_mapper(target).bind(target, target)
    bound.check_models(target, target)
    assert len(checked) == 2  # by bind; first use finds them known
    checked.clear()
    model = copy.deepcopy(target)
    mapper.check_models(target_model=model)
    seen = weakref.ref(model)
    checked.clear()
    del model
    gc.collect()
    assert seen() is None
    assert len(mapper._models) == 1


def test_a_checked_model_that_changed_is_checked_again(target):
    mapper, model = identity_mapper(target), copy.deepcopy(target)
    mapper.check_models(target_model=model)
    saved = copy.deepcopy(model.state_dict())
    other = {name: weight * 1.01 for name, weight in saved.items()}
    # New weights for the same object, as a trainer hands them to the model that it serves from.
    model.load_state_dict(other)
    for _ in range(2):
        with pytest.raises(MismatchError, match="weight_fingerprint"):
            mapper.check_models(target_model=model)
    model.load_state_dict(saved)
    mapper.check_models(target_model=model)
    # A weight that is another object, and an adapter around a projection.
    attention = model.model.layers[1].self_attn
    own = attention.v_proj.weight
    attention.v_proj.weight = torch.nn.Parameter(own.detach() * 1.01)
    with pytest.raises(MismatchError, match="weight_fingerprint"):
        mapper.check_models(target_model=model)
    attention.v_proj.weight = own
    mapper.check_models(target_model=model)
    attention.v_proj = Adapter(attention.v_proj)
    with pytest.raises(MismatchError, match=r"found an adapter on model\.layers\.1\.self_attn\.v_proj"):
        mapper.check_models(target_model=model)
    attention.v_proj = attention.v_proj.base_layer
    mapper.check_models(target_model=model.to(torch.float32))
    # What torch does not count: an adapter merged as peft does, and frequencies.
    delta = [torch.randn(layer.self_attn.q_proj.weight.shape) * 0.01 for layer in model.model.layers]
    for layer, part in zip(model.model.layers, delta, strict=True):
        layer.self_attn.q_proj.weight.data += part
    with pytest.raises(MismatchError, match="weight_fingerprint"):
        mapper.check_models(target_model=model)
    for layer, part in zip(model.model.layers, delta, strict=True):
        layer.self_attn.q_proj.weight.data -= part
    model.load_state_dict(saved)
    mapper.check_models(target_model=model)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(MismatchError, match=r"rope.tables"):
        mapper.check_models(target_model=model)


def test_an_offloaded_model_is_checked_once(target, monkeypatch):
    from accelerate import cpu_offload

    checked = []
    monkeypatch.setattr("kvfit.runtime.known.check_model", lambda _, model: checked.append(model))
    model = copy.deepcopy(target)
    cpu_offload(model, execution_device=torch.device("cpu"))
    mapper = identity_mapper(target)
    for _ in range(3):
        mapper.check_models(target_model=model)
        model(torch.tensor([[5, 6, 7]]))
    assert len(checked) == 1


class Adapter(torch.nn.Module):
    """A low-rank addition to a projection, as adapters make it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden):
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))


def test_the_check_takes_milliseconds(target):
    mapper = identity_mapper(target)
    begun = time.perf_counter()
    mapper.bind(target, target)
    first = time.perf_counter() - begun
    fastest = math.inf
    for _ in range(100):
        begun = time.thread_time()  # other processes of a busy machine do not count
        mapper.check_models(target, target)
        fastest = min(fastest, time.thread_time() - begun)
    assert fastest < 0.001
    assert first < 1.0  # generous: a busy machine


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda mapper: pickle.loads(pickle.dumps(mapper))])
def test_copies_and_pickles_are_right(copied):
    mapper = make(support="head")
    pairs = random_pairs(mapper.spec.source, 2, 5)
    other = copied(mapper)
    assert other is not mapper
    assert (other.spec, other.verdict, other.nbytes) == (mapper.spec, mapper.verdict, mapper.nbytes)
    assert same(other.transfer(pairs), mapper.transfer(pairs))


def test_threads_may_share_one(target):
    mapper = identity_mapper(target)
    caches_ = [prefilled(target, torch.randint(5, 2000, (1, 24), generator=torch.Generator().manual_seed(i))) for i in range(8)]
    wanted = [content(mapper.transfer(cache)) for cache in caches_]
    found = [None] * 8
    barrier = threading.Barrier(8)

    def work(index):
        barrier.wait()
        for _ in range(5):
            mapper.check_models(target, target)
            found[index] = content(mapper.transfer(caches_[index], target_model=target))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(found, wanted, strict=True):
        assert same(a, b)


def test_inference_mode_on_either_side():
    mapper = make()
    pairs = random_pairs(mapper.spec.source, 1, 5)
    wanted = mapper.transfer(pairs)
    with torch.inference_mode():
        source = cache_of(pairs)
        inside = mapper.transfer(source)
    assert same(inside, wanted)
    assert same(mapper.transfer(source), wanted)
    grown = mapper.transfer([(k[:, :, :2], v[:, :, :2]) for k, v in pairs])
    with torch.inference_mode():
        mapper.transfer(cache_of(pairs), into=grown)
    close(caches.read_cache(grown), [(k.double(), v.double()) for k, v in caches.read_cache(wanted)], 1e-6)


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for a graphics card: values read back, and tensors made from the host's numbers."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "lift_fresh", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        empty = isinstance(arguments[0], torch.Tensor) and arguments[0].numel() == 0 if arguments else False
        if any(name in str(function) for name in self.NAMES) and not empty:  # a cache's layers begin as empty vectors
            self.found.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("support", ["full", "head"])
@pytest.mark.parametrize("inputs", ["same", "both"])
def test_a_transfer_waits_for_no_device(support, inputs):
    mapper = make(support=support, inputs=inputs)
    pairs = random_pairs(mapper.spec.source, 2, 40)
    positions = torch.arange(40).expand(2, -1)
    with Waits() as first:
        mapper.transfer(pairs, positions=positions, chunk_tokens=16)
    assert set(first.found) == {"aten.lift_fresh.default"}  # the inverse frequencies, which the mapper keeps
    with Waits() as later:
        held = mapper.transfer([(keys[:, :, :30], values[:, :, :30]) for keys, values in pairs], chunk_tokens=16)
        mapper.transfer(pairs, positions=positions, into=held, chunk_tokens=16)
    assert later.found == []
    with Waits() as control:
        torch.tensor([1.0]).sum().item()
    assert len(control.found) == 2


def test_no_gradient_is_recorded():
    mapper = make()
    pairs = [(k.requires_grad_(), v) for k, v in random_pairs(mapper.spec.source, 1, 5)]
    assert not any(half.requires_grad for half in content(mapper.transfer(pairs)))
    assert not any(half.requires_grad for pair in mapper.transfer_layers(pairs) for half in pair)


def test_memory_beside_the_result_is_bounded_by_the_chunk():
    """What the arithmetic allocates, counted by the allocator itself, does not grow with the number of tokens."""
    mapper = make()

    def beside(n_tokens, chunk_tokens):
        pairs = random_pairs(mapper.spec.source, 1, n_tokens)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = mapper.transfer(pairs, chunk_tokens=chunk_tokens)
        total = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
        return peak - sum(half.nbytes for half in content(result))

    positions = 8 * (2048 - 256)  # whole numbers of 8 bytes, one per token
    assert beside(2048, 64) - beside(256, 64) < positions + 20_000
    assert beside(2048, 2048) - beside(256, 256) > positions + 100_000  # the control: one chunk of all


def test_kinds_cover_the_weights():
    mapper = make()
    assert set(mapper.maps.weights) == {(kind, layer) for kind in KINDS for layer in range(5)}
    assert mapper.to(dtype=torch.float16).nbytes * 2 == mapper.nbytes
    with pytest.raises(MismatchError, match="device: found 2 devices"):
        mapper.to([torch.device("cpu")] * 2)
