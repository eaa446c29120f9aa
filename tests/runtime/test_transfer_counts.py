"""What a transfer asks of a device, counted: kernels and waits, bounded by layers and chunks; and where its tensors go."""

import copy
import math
from collections import Counter

import pytest
import torch
from made_mappers import identity_mapper, mapper_spec, model_spec, prefilled, random_mapper, random_pairs
from torch.utils._python_dispatch import TorchDispatchMode

from kvfit.spec import RopeSpec, RopeTable

# What starts no kernel: shapes, strides, memory.
FREE = (
    "view", "as_strided", "transpose", "slice", "select", "expand", "permute", "unsqueeze", "alias", "detach", "empty",
    "t.default", "split", "unbind", "promote_types", "_reshape_alias", "reshape", "squeeze",
)  # fmt: skip
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "unique", "masked_select")


class Kernels(TorchDispatchMode):
    """Counts the operations that start a kernel, by name, and the memory that is taken."""

    def __init__(self):
        super().__init__()
        self.kernels, self.waits, self.taken = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function).removeprefix("aten.")
        result = function(*arguments, **(keywords or {}))
        if any(name.startswith(wait) for wait in WAITS):
            self.waits[name] += 1
        if not any(name.startswith(free) for free in FREE):
            self.kernels[name] += 1
        elif name.startswith("empty") and result.numel() > 64:
            self.taken[tuple(result.shape)] += 1
        return result


def rope(head_dim, n_layers):
    half = head_dim // 2
    frequencies = torch.tensor([10000.0 ** (-i / half) for i in range(half)])
    return RopeSpec((RopeTable(tuple(frequencies.tolist()), head_dim, "half", 1.0),), (0,) * n_layers)


def make(n_source, n_target, lags=(), rank=None, dtype=torch.float32):
    source, target = model_spec(n_source, 2, 16, rope(16, n_source)), model_spec(n_target, 2, 16, rope(16, n_target))
    every = [range(n_source)] * n_target
    return random_mapper(mapper_spec(source, target, every, inputs="both", lexical_lags=lags, rank=rank), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lags", "rank"), [((), None), ((), 24), ((0, 1, 2), 24)])
@pytest.mark.parametrize(("n_source", "n_target", "n_chunks"), [(3, 5, 1), (3, 5, 4), (12, 5, 4), (3, 20, 4)])
def test_kernels_are_bounded_by_layers_and_chunks(n_source, n_target, n_chunks, lags, rank, dtype):
    mapper = make(n_source, n_target, lags, rank, dtype)
    pairs = random_pairs(mapper.spec.source, 1, 64 * n_chunks, dtype=dtype)
    given = random_pairs(mapper.spec.target, 1, 64 * n_chunks, seed=1, dtype=dtype)[0] if lags else None
    mapper.transfer(pairs, first_layer=given)  # the first makes what a mapper keeps
    with Kernels() as mode:
        mapper.transfer_layers(pairs, first_layer=given, chunk_tokens=64)
    rounding = 2 * (dtype != torch.float32)  # keys are rotated in float32: one cast there, one back
    per_source_layer = 4 + rounding  # values copied; keys turned by three products
    per_target_layer = 5 + rounding  # two maps; keys turned
    per_chunk = 5 + (rank is not None) + 2 * len(lags)  # angles, projection, a lag gathered and put in its place
    mapped = n_target - bool(lags)
    lexical = 30 * bool(lags)  # once per transfer: un-rotated, indexed, and copied as the exact layer
    bound = n_chunks * (n_source * per_source_layer + mapped * per_target_layer + per_chunk) + lexical + 2
    assert 0.7 * bound - 30 < mode.kernels.total() <= bound
    assert not mode.waits


def test_memory_is_taken_once_and_not_for_every_chunk():
    mapper = make(6, 6, (0, 1), 24)
    pairs, given = random_pairs(mapper.spec.source, 1, 64 * 8), random_pairs(mapper.spec.target, 1, 64 * 8)[0]
    found = []
    for n_tokens in (64 * 2, 64 * 8):
        cut = [(k[:, :, :n_tokens], v[:, :, :n_tokens]) for k, v in pairs]
        with Kernels() as mode:
            mapper.transfer(cut, first_layer=(given[0][:, :, :n_tokens], given[1][:, :, :n_tokens]), chunk_tokens=64)
        found.append(mode.taken.total())
    assert found[0] == found[1] > 0


def test_the_14b_to_32b_shape_by_counts():
    """40 and 64 layers of 8 x 128 under a basis of 4,096: operations of 32K tokens at a card's chunk length."""
    from kvfit.runtime.transfer import CHUNK_TOKENS_CUDA

    source, target = model_spec(40, 1, 16, rope(16, 40)), model_spec(64, 1, 16, rope(16, 64))
    mapper = random_mapper(mapper_spec(source, target, [range(40)] * 64, inputs="both", rank=8), dtype=torch.bfloat16)
    pairs = random_pairs(source, 1, 32, dtype=torch.bfloat16)
    n_chunks = math.ceil(32768 / CHUNK_TOKENS_CUDA)
    mapper.transfer(pairs)
    with Kernels() as mode:
        mapper.transfer_layers(pairs, chunk_tokens=32 // n_chunks)
    assert mode.kernels.total() <= n_chunks * (40 * 6 + 64 * 7 + 7) + 2 < 2800


def on(device, pairs):
    return [tuple(half.to(device) for half in pair) for pair in pairs]


@pytest.mark.parametrize("rank", [None, 24])
@pytest.mark.parametrize("lags", [(), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operation_runs_where_the_weights_are(rank, lags, dtype):
    """On a pretend device, which keeps no numbers: whoever reads one there, or mixes devices, raises."""
    made = make(3, 4, lags, rank, dtype)
    mapper = made.to("meta")
    pairs, given = random_pairs(made.spec.source, 2, 12), random_pairs(made.spec.target, 2, 12)[0] if lags else None
    for source in (pairs, on("meta", pairs)):
        result = mapper.transfer_layers(source, first_layer=given, chunk_tokens=5)
        assert {half.device.type for pair in result for half in pair} == {"meta"}
        assert [half.shape for pair in result for half in pair] == [
            half.shape for pair in made.transfer_layers(pairs, first_layer=given) for half in pair
        ]
        assert len(list(mapper.stream_layers(source, first_layer=given, chunk_tokens=5))) == 4
    with pytest.raises((NotImplementedError, RuntimeError)):  # the control: a number that is read there
        torch.ones(1, device="meta").item()


@pytest.mark.parametrize("rank", [None, 24])
def test_a_target_on_two_devices_gets_each_layer_on_its_own(rank):
    made = make(3, 4, (), rank)
    devices = [torch.device(name) for name in ("cpu", "meta", "cpu", "meta")]
    pairs = random_pairs(made.spec.source, 1, 12)
    result = made.to(devices).transfer_layers(pairs)
    assert [half.device for pair in result for half in pair] == [device for device in devices for _ in range(2)]
    for found, wanted in zip(result[::2], made.transfer_layers(pairs)[::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_copies_between_devices_do_not_wait_except_on_the_way_to_the_host():
    """A host that reads a copy must wait for it; a device's own stream orders everything else."""
    waited = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            keywords = keywords or {}
            result = function(*arguments, **keywords)
            if "_to_copy" in str(function) and arguments[0].device != result.device:
                waited.append((result.device.type, bool(keywords.get("non_blocking"))))
            return result

    made = make(3, 4, (0, 1), 24, torch.bfloat16)
    mapper = made.to("meta")
    pairs, given = random_pairs(made.spec.source, 1, 12), random_pairs(made.spec.target, 1, 12)[0]
    with Copies():
        mapper.transfer_layers(pairs, first_layer=given)
    exact = 2  # what a caller passed in as the first layer is copied whole
    assert len(waited) > exact
    assert all(non_blocking for _, non_blocking in waited)


def test_a_models_modules_are_walked_once(tiny_pair, load, monkeypatch):
    model = copy.deepcopy(load(tiny_pair[1]).model)
    mapper = identity_mapper(model)
    source = prefilled(model, torch.arange(5, 15)[None])
    walked = []
    walk = torch.nn.Module.named_modules

    def counted(self, *args, **kwargs):
        walked.append(self)
        return walk(self, *args, **kwargs)

    mapper.transfer(source, target_model=model)
    n_modules = len(list(model.modules()))
    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    mapper.transfer(source, target_model=model)
    assert len(walked) < n_modules + 5  # once, to see that it is still the model that was checked
    mapper.bind(target_model=model)
    assert len(walked) > 3 * n_modules
    monkeypatch.undo()
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert [place.device for place in mapper._models.places(model)] == [cpu] * 4
    model.model.layers[1].to("meta")
    assert [place.device for place in mapper._models.places(model)] == [cpu, meta, cpu, cpu]
    model.model.layers[2] = copy.deepcopy(model.model.layers[1])  # another module in its place
    assert [place.device for place in mapper._models.places(model)] == [cpu, meta, meta, cpu]
    model.model.layers[3].self_attn.q_proj = torch.nn.ModuleDict({"base_layer": model.model.layers[3].self_attn.q_proj})
    assert [place.device for place in mapper._models.places(model)] == [cpu, meta, meta, cpu]
