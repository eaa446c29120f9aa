"""Lexical inputs and the shared basis, against a transfer written out in loops."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace

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

import kvfit
from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.runtime.mapper import Mapper
from kvfit.runtime.transfer import CHUNK_TOKENS, CHUNK_TOKENS_CUDA, chunk_length

# These conversations are short. With the default of eight exact first tokens, little of them would be mapped.
handoff = partial(kvfit.handoff, exact_head=1)

SHARED = [[0, 2]] * 4
OWN = [[0, 1, 2], [1], [0, 2], [0, 2]]
LEFT_PADDED = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3]])


def make(lags=(), rank=None, inputs="both", sets=None, dtype=torch.float32, keys_rotated=False):
    source, target = model_spec(3, 2, 8), model_spec(4, 2, 6)
    sets = (SHARED if rank else OWN) if sets is None else sets
    spec = mapper_spec(source, target, sets, inputs=inputs, lexical_lags=lags, rank=rank, keys_rotated=keys_rotated)
    return random_mapper(spec, dtype=dtype)


def first_layer_of(mapper, batch, n_tokens, dtype=torch.float32):
    return random_pairs(mapper.spec.target, batch, n_tokens, seed=7, dtype=dtype)[0]


def worst(found, wanted):
    """Largest difference, relative to the largest value of a layer."""
    assert len(found) == len(wanted)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for pair, other in zip(found, wanted, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


COMBINATIONS = [
    pytest.param(lags, rank, inputs, id=f"lags {lags} rank {rank} {inputs}")
    for lags in ((), (0,), (0, 1, 2), (1, 3))
    for rank in (None, 9)
    for inputs in ("both", "same")
    if not (rank and inputs == "same")
]


@pytest.mark.parametrize(("lags", "rank", "inputs"), COMBINATIONS)
@pytest.mark.parametrize("positions", [LEFT_PADDED, torch.arange(7) + 990], ids=["left-padded", "far"])
def test_equals_the_written_out_definition(lags, rank, inputs, positions):
    mapper = make(lags, rank, inputs)
    pairs = random_pairs(mapper.spec.source, 2, 7)
    given = first_layer_of(mapper, 2, 7) if lags else None
    wanted = reference_transfer(mapper, pairs, positions, given)
    for chunk_tokens in (None, 3, 8):
        found = mapper.transfer(cache_of(pairs), positions=positions, first_layer=given, chunk_tokens=chunk_tokens)
        assert worst(caches.read_cache(found), wanted) < 2e-5
    streamed = list(mapper.stream_layers(pairs, positions=positions, first_layer=given, chunk_tokens=3))
    assert worst(streamed, wanted) < 2e-5
    assert worst(mapper.transfer_layers(pairs, positions=positions, first_layer=given), wanted) < 2e-5


@pytest.mark.parametrize("wrong", ["lag", "order of lags", "keys and values", "rotation", "padding", "basis"])
def test_the_oracle_notices(wrong):
    """The control: each way of getting the inputs wrong is far from the definition."""
    mapper = make((0, 1, 2), 9)
    pairs, given = random_pairs(mapper.spec.source, 2, 7), first_layer_of(mapper, 2, 7)
    wanted = reference_transfer(mapper, pairs, LEFT_PADDED, given)
    other, positions = mapper, LEFT_PADDED
    if wrong == "lag":
        other = Mapper(make((0, 1, 3), 9).spec, mapper.maps.weights, basis=mapper.maps.basis)
    elif wrong == "order of lags":
        split = list(mapper.maps.basis.split([64, 24, 24, 24]))
        other = Mapper(mapper.spec, mapper.maps.weights, basis=torch.cat([split[0], split[2], split[1], split[3]]))
    elif wrong == "keys and values":
        other = Mapper(
            mapper.spec, mapper.maps.weights, basis=torch.cat([mapper.maps.basis[:64], mapper.maps.basis[64:].roll(12, 0)])
        )
    elif wrong == "rotation":
        other = Mapper(make((0, 1, 2), 9, keys_rotated=True).spec, mapper.maps.weights, basis=mapper.maps.basis)
    elif wrong == "padding":
        positions = torch.arange(7)
    else:
        other = Mapper(mapper.spec, mapper.maps.weights, basis=-mapper.maps.basis)
    found = other.transfer_layers(pairs, positions=positions, first_layer=given)
    assert worst(found, wanted) > 1e-2


@pytest.mark.parametrize("lags", [(), (0, 2)])
@pytest.mark.parametrize("rank", [None, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(lags, rank, dtype):
    mapper = make(lags, rank, dtype=dtype)
    pairs = random_pairs(mapper.spec.source, 1, 6, dtype=dtype)
    given = first_layer_of(mapper, 1, 6, dtype) if lags else None
    found = mapper.transfer(pairs, first_layer=given)
    assert {half.dtype for half in content(found)} == {dtype}
    wanted = reference_transfer(mapper, pairs, torch.arange(6), given)
    # Angles are float32, as in the models.
    assert worst(caches.read_cache(found), wanted) < (1e-6 if dtype == torch.float64 else 3e-2)


@pytest.mark.parametrize("held", [1, 4, 7])
@pytest.mark.parametrize("rank", [None, 9])
def test_into_appends_only_new_tokens(held, rank):
    mapper = make((0, 1, 3), rank)
    pairs, given = random_pairs(mapper.spec.source, 2, 7), first_layer_of(mapper, 2, 7)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]])
    whole = caches.read_cache(mapper.transfer(pairs, positions=positions, first_layer=given))
    cut = [(k[:, :, :held], v[:, :, :held]) for k, v in pairs]
    first = (given[0][:, :, :held], given[1][:, :, :held])
    cache = mapper.transfer(cut, positions=positions[:, :held], first_layer=first)
    before = content(cache)
    mapper.transfer(pairs, positions=positions, into=cache, first_layer=given)
    assert same([half[:, :, :held] for half in content(cache)], before)
    assert worst(caches.read_cache(cache), whole) < 1e-6


def test_what_is_passed_in_is_not_changed_and_not_shared():
    mapper = make((0,))
    pairs, given = random_pairs(mapper.spec.source, 1, 5), first_layer_of(mapper, 1, 5)
    before = [half.clone() for half in given]
    moved = mapper.transfer(pairs, first_layer=given)
    assert torch.equal(moved.layers[0].keys, given[0])
    for layer in moved.layers:
        layer.keys.zero_(), layer.values.zero_()
    assert same(list(given), before)


def test_layers_can_be_chosen():
    mapper = make((0, 1), 9)
    pairs, given = random_pairs(mapper.spec.source, 1, 5), first_layer_of(mapper, 1, 5)
    whole = mapper.transfer(pairs, first_layer=given)
    for layers in ([0], [1, 3], [0, 2]):
        some = mapper.transfer(pairs, first_layer=given, layers=layers)
        for layer_index in layers:
            assert torch.equal(some.layers[layer_index].keys, whole.layers[layer_index].keys)


def test_streaming_maps_a_layer_when_it_is_asked_for():
    mapper = make((0, 1), 9)
    pairs, given = random_pairs(mapper.spec.source, 1, 50), first_layer_of(mapper, 1, 50)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stream = mapper.stream_layers(pairs, first_layer=given, chunk_tokens=20)
        next(stream), next(stream)
    products = [event for event in profile.events() if event.name == "aten::addmm"]
    assert len(products) == 2 * 3  # keys and values of one mapped layer, in three chunks
    assert len(list(stream)) == 2


@pytest.mark.parametrize(("lags", "rank"), [((), None), ((0, 1), None), ((0, 1), 9)])
def test_a_stream_has_read_its_source_before_it_gives_anything_away(lags, rank):
    """An engine may use the memory of the source's blocks again once the first layer is here."""
    mapper = make(lags, rank)
    pairs, given = random_pairs(mapper.spec.source, 2, 7), first_layer_of(mapper, 2, 7) if lags else None
    wanted = mapper.transfer_layers(pairs, first_layer=given)
    stream = mapper.stream_layers(pairs, first_layer=given, chunk_tokens=5)
    found = [next(stream)]
    for half in (half for pair in pairs for half in pair):
        half.zero_()
    found += stream
    assert worst(found, wanted) < 1e-6


def refusals():
    given = first_layer_of(make(), 2, 5)
    yield "nothing", {}, "input_ids: found none, needed the ids"
    yield "no target", {"input_ids": torch.zeros(2, 5, dtype=torch.long)}, "target_model: found none"
    yield "short ids", {"input_ids": torch.zeros(2, 4, dtype=torch.long)}, r"input_ids: found \(2, 4\), needed \(2, 5\)"
    yield "fractional ids", {"input_ids": torch.zeros(2, 5)}, "input_ids: found torch.float32"
    yield (
        "short layer",
        {"first_layer": tuple(half[:, :, :4] for half in given)},
        r"first_layer, keys: found shape \(2, 2, 4, 6\)",
    )
    yield "one half", {"first_layer": (given[0],)}, "first_layer: found tuple"
    yield "a layer of ids", {"first_layer": tuple(half.long() for half in given)}, "of torch.int64, needed"


@pytest.mark.parametrize(("arguments", "message"), [c[1:] for c in refusals()], ids=[c[0] for c in refusals()])
def test_refused_before_anything_changes(arguments, message):
    mapper = make((0, 1))
    into = cache_of(random_pairs(mapper.spec.target, 2, 2))
    before = content(into)
    with pytest.raises(MismatchError, match=message):
        mapper.transfer(random_pairs(mapper.spec.source, 2, 5), into=into, **arguments)
    with pytest.raises(MismatchError, match=message):
        mapper.stream_layers(random_pairs(mapper.spec.source, 2, 5), **arguments)
    assert same(into, before)


def test_a_basis_is_checked():
    mapper = make((), 9)
    for basis in (None, mapper.maps.basis[:, :8], mapper.maps.basis[:-1]):
        with pytest.raises(MismatchError, match="basis: found shape"):
            Mapper(mapper.spec, mapper.maps.weights, basis=basis)
    with pytest.raises(MismatchError, match="one floating dtype"):
        Mapper(mapper.spec, mapper.maps.weights, basis=mapper.maps.basis.half())
    with pytest.raises(MismatchError, match="basis: found shape"):
        Mapper(make().spec, make().maps.weights, basis=mapper.maps.basis)


def test_copies_carry_the_basis():
    mapper = make((0, 1), 9)
    pairs, given = random_pairs(mapper.spec.source, 1, 5), first_layer_of(mapper, 1, 5)
    wanted = mapper.transfer(pairs, first_layer=given)
    for other in (copy.deepcopy(mapper), pickle.loads(pickle.dumps(mapper)), mapper.to("cpu", torch.float32)):
        assert other.nbytes == mapper.nbytes
        assert same(other.transfer(pairs, first_layer=given), wanted)
    assert mapper.to(dtype=torch.bfloat16).nbytes * 2 == mapper.nbytes


def test_read_from_a_bundle():
    """What a bundle hands out is passed on: spec, layers, basis."""
    mapper = make((0, 1), 9)
    bundle = SimpleNamespace(
        spec=mapper.spec,
        layer=lambda kind, layer_index, **_: mapper.maps.weights[kind, layer_index],
        basis=lambda **_: mapper.maps.basis,
        verdict="pass",
        judged_recompute=0.1,
    )
    read = Mapper.from_bundle(bundle)
    assert (read.nbytes, read.verdict, read.judged_recompute) == (mapper.nbytes, "pass", 0.1)
    bundle.basis = lambda **_: None
    with pytest.raises(MismatchError, match="basis: found shape None"):
        Mapper.from_bundle(bundle)


def test_chunks_are_longer_where_a_kernel_costs_time_to_start():
    assert chunk_length(torch.device("cpu")) == CHUNK_TOKENS
    assert chunk_length(torch.device("cuda", 1)) == CHUNK_TOKENS_CUDA > CHUNK_TOKENS


@pytest.fixture(scope="module")
def target(tiny_pair, load):
    return load(tiny_pair[1]).model


def lexical_mapper(model, lags=(0, 1)):
    """Random maps between a model and itself that read its first layer."""
    side = spec_of(model)
    return random_mapper(mapper_spec(side, side, [range(side.n_layers)] * side.n_layers, inputs="both", lexical_lags=lags))


def test_the_targets_first_layer_is_computed_and_exact(target):
    mapper = lexical_mapper(target)
    ids = torch.randint(5, 2000, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    native = prefilled(target, ids, mask)
    moved = mapper.transfer(native, positions=positions, input_ids=ids, target_model=target)
    own = (native.layers[0].keys, native.layers[0].values)
    for found, wanted in zip((moved.layers[0].keys, moved.layers[0].values), own, strict=True):
        assert torch.allclose(found[0], wanted[0], atol=1e-5)
        assert torch.allclose(found[1, :, 4:], wanted[1, :, 4:], atol=1e-5)
    given = mapper.transfer(native, positions=positions, first_layer=own)
    real = [(k[1:, :, 4:], v[1:, :, 4:]) for k, v in caches.read_cache(moved)]
    assert worst(real, [(k[1:, :, 4:], v[1:, :, 4:]) for k, v in caches.read_cache(given)]) < 1e-5
    # A bound mapper needs no model in the call; one that is not bound, or whose model is gone, says so.
    bound = mapper.bind(target_model=target)
    assert same(bound.transfer(native, positions=positions, input_ids=ids), moved)
    # The next turn reads tokens of the one before.
    cut = [(k[:, :, :7], v[:, :, :7]) for k, v in caches.read_cache(native)]
    grown = bound.transfer(cut, positions=positions[:, :7], input_ids=ids[:, :7])
    bound.transfer(native, positions=positions, input_ids=ids, into=grown)
    assert worst(caches.read_cache(grown), caches.read_cache(moved)) < 1e-5


def test_handoff_passes_ids_and_positions_itself(target):
    """Maps that copy the source and ignore the lexical inputs are exact; a left-padded batch and a next turn stay so."""
    side = spec_of(target)
    sets = [[i] for i in range(side.n_layers)]
    spec = mapper_spec(side, side, sets, lexical_lags=(0, 1))
    weight = torch.cat([torch.eye(side.width), torch.zeros(4 * side.width, side.width)])
    weights = {(layer.kind, layer.layer_index): (weight, torch.zeros(side.width)) for layer in spec.layers}
    mapper = Mapper(spec, weights, verdict="pass")
    ids = torch.randint(5, 2000, (2, 14), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    native = prefilled(target, ids[:, :-1], mask[:, :-1])
    first = handoff(mapper, target, ids[:, :9], prefilled(target, ids[:, :8], mask[:, :8]), attention_mask=mask[:, :9])
    moved = handoff(mapper, target, ids, native, attention_mask=mask, target_cache=first.cache, target_ids=ids[:, :9])
    assert (first.n_mapped, moved.n_reused, moved.n_mapped) == (4, 8, 5)
    for found, wanted in zip(content(moved.cache), content(native), strict=True):
        assert torch.allclose(found[0], wanted[0], atol=1e-4)
        assert torch.allclose(found[1, :, 3:], wanted[1, :, 3:], atol=1e-4)


def test_a_target_that_is_gone_is_not_kept_alive(target):
    model = copy.deepcopy(target)
    bound = lexical_mapper(target).bind(target_model=model)
    ids = torch.arange(5, 15)[None]
    native = prefilled(target, ids)
    del model
    with pytest.raises(MismatchError, match="target_model: found none"):
        bound.transfer(native, input_ids=ids)


def test_another_models_first_layer_is_refused(target):
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.01)
    ids = torch.arange(5, 15)[None]
    with pytest.raises(MismatchError, match="weight_fingerprint"):
        lexical_mapper(target).transfer(prefilled(target, ids), input_ids=ids, target_model=other)


def test_binding_casts_to_the_targets_dtype(target):
    half = copy.deepcopy(target).bfloat16()
    mapper = identity_mapper(half)
    bound = mapper.bind(target_model=half)
    assert {part.dtype for pair in bound.maps.weights.values() for part in pair} == {torch.bfloat16}
    assert {part.dtype for pair in mapper.maps.weights.values() for part in pair} == {torch.float32}
