"""One adapter for every cache of transformers: what it reads, what it builds, and what it refuses to pass on in silence."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer
from zoo import FAMILIES, VOCABULARY, build

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches

BY_NAME = {family.name: family for family in FAMILIES}
WINDOWED = [family for family in FAMILIES if family.windows is not None]


def prompt(n_tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def full(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    cache = caches.full_cache()
    caches.forward(model, ids, cache, base=True)
    return caches.read_cache(cache)


def filled(model: Any, pairs: list[tuple[Tensor, Tensor]], n_tokens: int | None = None) -> Any:
    cache = caches.new_cache(model)
    for layer_index, (keys, values) in enumerate(pairs):
        caches.append(cache, layer_index, keys[:, :, :n_tokens].clone(), values[:, :, :n_tokens].clone())
    return cache


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return build(BY_NAME["qwen3"])


# The argument's name


def test_the_argument_is_the_one_that_forward_has(qwen3: Any) -> None:
    name = caches.cache_argument(qwen3)
    assert name in inspect.signature(qwen3.forward).parameters
    assert caches.cache_argument(torch.compile(qwen3)) == name

    class Plain:
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    with pytest.raises(UnsupportedModelError, match="neither cache= nor past_key_values="):
        caches.cache_argument(Plain())


def test_the_cache_is_really_used(qwen3: Any) -> None:
    """Under the wrong name it would be swallowed: empty, and no error."""
    cache = caches.new_cache(qwen3)
    caches.forward(qwen3, prompt(9), cache)
    assert caches.cache_length(cache) == 9
    caches.forward(qwen3, prompt(3), cache, base=True)
    assert caches.cache_length(cache) == 12


# Reading


def test_reads_every_kind_of_cache(qwen3: Any) -> None:
    from transformers import DynamicCache, StaticCache

    ids = prompt(11, batch=2)
    wanted = full(qwen3, ids)
    assert [tuple(keys.shape) for keys, _ in wanted] == [(2, 2, 11, 16)] * 3
    kinds = {
        "dynamic": DynamicCache(),
        "dynamic with config": DynamicCache(config=qwen3.config),
        "static": StaticCache(config=qwen3.config, max_cache_len=32),
    }
    for name, cache in kinds.items():
        caches.forward(qwen3, ids, cache, base=True)
        assert caches.cache_length(cache) == 11, name
        for found, needed in zip(caches.read_cache(cache), wanted, strict=True):
            torch.testing.assert_close(found, needed, rtol=1e-5, atol=1e-4)
    for pairs in (tuple(wanted), list(wanted), [list(pair) for pair in wanted]):
        assert caches.cache_length(pairs) == 11
        assert all(
            torch.equal(a, b)
            for one, two in zip(caches.read_cache(pairs), wanted, strict=True)
            for a, b in zip(one, two, strict=True)
        )


def test_a_static_cache_that_ends_in_zeros_is_not_shortened() -> None:
    """Its length is counted, not guessed from its numbers, where the version counts."""
    from transformers import StaticCache

    model = build(BY_NAME["mistral-window"])
    cache = StaticCache(config=model.config, max_cache_len=64)
    caches.forward(model, prompt(20), cache, base=True)
    assert caches.read_cache(cache)[0][0].shape[2] == 20


def test_reading_copies_nothing(qwen3: Any) -> None:
    cache = caches.full_cache()
    caches.forward(qwen3, prompt(5), cache, base=True)
    assert caches.read_cache(cache)[1][0].data_ptr() == cache.layers[1].keys.data_ptr()


def test_a_legacy_tuple_is_what_older_versions_make(qwen3: Any) -> None:
    from transformers import DynamicCache

    if not hasattr(DynamicCache, "to_legacy_cache"):
        pytest.skip("this transformers has no legacy tuples")
    ids = prompt(11, batch=2)
    cache = DynamicCache()
    caches.forward(qwen3, ids, cache, base=True)
    legacy = cache.to_legacy_cache()
    assert isinstance(legacy, tuple)
    assert caches.cache_length(legacy) == 11
    for (keys, values), layer in zip(caches.read_cache(legacy), cache.layers, strict=True):
        assert keys.data_ptr() == layer.keys.data_ptr()
        assert values.data_ptr() == layer.values.data_ptr()


@pytest.mark.parametrize("listed", [list, tuple])
def test_a_cache_spelled_out_as_a_sequence(listed: Any) -> None:
    """Newer versions put the window beside keys and values. Where every layer has one, no length gives a lost token away."""
    model = build(BY_NAME["mistral-window"])
    whole = listed(filled(model, full(model, prompt(20))))
    assert [keys.shape[2] for keys, _ in caches.read_cache(whole)] == [20] * 3
    dropped = listed(filled(model, full(model, prompt(40))))
    if len(dropped[0]) < 3:
        pytest.skip("this transformers does not tell the window")
    with pytest.raises(MismatchError, match=r"cache layer 0: found 23 tokens of a layer with a window of 24, needed"):
        caches.read_cache(dropped)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_cache_that_offloads_its_layers(name: str) -> None:
    """What `DynamicCache(offloading=True)` holds after a pass: most layers are on the CPU. It wants an accelerator."""
    from transformers import DynamicCache

    if not torch.accelerator.is_available():
        pytest.skip("layers are offloaded from an accelerator")
    device = torch.accelerator.current_accelerator()
    model = build(BY_NAME[name]).to(device)
    ids = prompt(20).to(device)
    cache = DynamicCache(config=model.config, offloading=True)
    caches.forward(model, ids, cache, base=True)
    assert "cpu" in {layer.keys.device.type for layer in cache.layers}
    for (keys, values), (wanted, other) in zip(caches.read_cache(cache), full(model, ids), strict=True):
        assert torch.equal(keys.cpu(), wanted.cpu())
        assert torch.equal(values.cpu(), other.cpu())


def test_an_offloaded_layer_is_read_where_it_lies(qwen3: Any) -> None:
    cache = caches.full_cache()
    caches.forward(qwen3, prompt(5), cache, base=True)
    wanted = [keys.clone() for keys, _ in caches.read_cache(cache)]
    for layer in cache.layers:
        layer.offload()
    assert all(torch.equal(keys, other) for (keys, _), other in zip(caches.read_cache(cache), wanted, strict=True))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_window_that_dropped_tokens_is_refused(kind: str) -> None:
    from transformers import StaticCache

    model = build(BY_NAME["gemma2"])

    def cache() -> Any:
        return caches.new_cache(model) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=64)

    held = cache()
    caches.forward(model, prompt(20), held, base=True)
    caches.read_cache(held)
    dropped = cache()
    caches.forward(model, prompt(40), dropped, base=True)
    assert caches.cache_length(dropped) == 40
    with pytest.raises(MismatchError, match=r"cache layer 0: found the last 2[34] of 40 tokens \(sliding window\)"):
        caches.read_cache(dropped)


def test_what_is_no_full_cache_is_refused(qwen3: Any) -> None:
    from transformers import DynamicCache

    with pytest.raises(MismatchError, match="found no tokens"):
        caches.read_cache(caches.full_cache())
    with pytest.raises(MismatchError, match="nothing stored"):
        caches.read_cache(DynamicCache(config=qwen3.config))
    with pytest.raises(MismatchError, match="found int"):
        caches.read_cache(3)
    keys = torch.zeros(1, 2, 4, 16)
    with pytest.raises(MismatchError, match="cache layer 1: found keys of 1 sequences and 3 tokens, needed 1 and 4"):
        caches.read_cache([(keys, keys), (keys[:, :, :3], keys)])
    with pytest.raises(MismatchError, match="cache layer 0: found Tensor"):
        caches.read_cache([keys])
    with pytest.raises(MismatchError, match="cache layer 0: found shapes"):
        caches.read_cache([(keys[0], keys[0])])
    with pytest.raises(MismatchError, match="found int, needed a transformers Cache with layers"):
        caches.layer_states(3)
    one_layer_missing = caches.full_cache()
    caches.append(one_layer_missing, 1, keys, keys)
    with pytest.raises(MismatchError, match="cache layer 0: found DynamicLayer with nothing stored"):
        caches.read_cache(one_layer_missing)


def test_quantised_and_recurrent_layers_are_refused() -> None:
    class QuantoQuantizedLayer:
        keys = values = torch.zeros(1, 2, 4, 16)

    class LinearAttentionLayer:
        is_initialized = True

    class Cache:
        def __init__(self, layer: Any) -> None:
            self.layers = [layer]

    with pytest.raises(MismatchError, match="cache layer 0: found QuantoQuantizedLayer, which keeps its tokens quantised"):
        caches.read_cache(Cache(QuantoQuantizedLayer()))
    with pytest.raises(MismatchError, match="LinearAttentionLayer with no keys and values of its own"):
        caches.read_cache(Cache(LinearAttentionLayer()))


# Building


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_rebuilt_cache_continues_bit_for_bit(family: Any) -> None:
    """Full-length keys and values of windowed layers too; the target's cache truncates by itself."""
    model = build(family)
    ids = prompt(60, batch=2)
    native = caches.new_cache(model)
    caches.forward(model, ids[:, :50], native, base=True)
    rebuilt = filled(model, full(model, ids[:, :50]))
    assert caches.cache_length(rebuilt) == 50
    for mine, theirs in zip(caches.own_layers(rebuilt), caches.own_layers(native), strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    assert torch.equal(caches.forward(model, ids[:, 50:], rebuilt), caches.forward(model, ids[:, 50:], native))


def test_a_truncated_window_would_have_been_wrong() -> None:
    """The negative control: what `read_cache` refuses to hand out changes the logits."""
    model = build(BY_NAME["gemma3"])
    ids = prompt(60)
    native = caches.new_cache(model)
    caches.forward(model, ids[:, :50], native, base=True)
    truncated = [(layer.keys, layer.values) for layer in native.layers]
    wrong = filled(model, truncated)
    right = filled(model, full(model, ids[:, :50]))
    reference = caches.forward(model, ids[:, 50:], right)
    difference = (caches.forward(model, ids[:, 50:], wrong) - reference).abs().max()
    assert difference > 1e-2 * reference.std()


@pytest.mark.parametrize("family", WINDOWED, ids=lambda family: family.name)
def test_windows_are_those_of_the_mask(family: Any) -> None:
    model = build(family)
    assert caches.layer_windows(model, 3) == family.windows


@pytest.mark.parametrize("family", [family for family in WINDOWED if family.windows[0]], ids=lambda family: family.name)
def test_a_window_counts_the_tokens_that_attention_reaches(family: Any) -> None:
    """The last of the 24 tokens in reach changes what the first layer attends to, the one before it does not."""
    model = build(family)
    seen: list[Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0][:, -1]))
    ids = prompt(50)
    for position in (None, 50 - 24, 50 - 25):
        changed = ids.clone()
        if position is not None:
            changed[0, position] = (changed[0, position] + 1) % VOCABULARY
        caches.forward(model, changed, caches.new_cache(model), base=True)
    assert (seen[1] - seen[0]).abs().max() > 1e-4
    assert (seen[2] - seen[0]).abs().max() < 1e-6


def test_new_cache_without_a_model_keeps_everything() -> None:
    cache = caches.new_cache()
    keys = torch.zeros(1, 2, 40, 16)
    caches.append(cache, 0, keys, keys)
    assert caches.read_cache(cache)[0][0].shape[2] == 40


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window"])
def test_crop_forgets_the_last_tokens(name: str) -> None:
    model = build(BY_NAME[name])
    ids, other = prompt(20), prompt(20, seed=9)
    cache = caches.new_cache(model)
    caches.forward(model, torch.cat([ids[:, :12], other[:, :7]], 1), cache, base=True)
    caches.crop(cache, 12)
    assert caches.cache_length(cache) == 12
    reference = filled(model, full(model, ids), 12)
    torch.testing.assert_close(
        caches.forward(model, ids[:, 12:], cache), caches.forward(model, ids[:, 12:], reference), rtol=0, atol=2e-5
    )
    with pytest.raises(MismatchError, match="found 20 tokens, needed at least 21"):
        caches.crop(cache, 21)


def test_crop_refuses_a_window_that_dropped_tokens() -> None:
    model = build(BY_NAME["gemma3"])
    cache = caches.new_cache(model)
    caches.forward(model, prompt(40), cache, base=True)
    before = cache.layers[1].keys.clone()
    with pytest.raises(MismatchError, match="cache layer 0: found a sliding window that has dropped tokens"):
        caches.crop(cache, 30)
    assert torch.equal(cache.layers[1].keys, before)
    assert caches.cache_length(cache) == 40


def test_crop_refuses_layers_of_unequal_length(qwen3: Any) -> None:
    cache = caches.new_cache(qwen3)
    caches.forward(qwen3, prompt(20), cache, base=True)
    last = len(cache.layers) - 1
    for name in ("keys", "values"):
        setattr(cache.layers[last], name, getattr(cache.layers[last], name)[:, :, :15])
    with pytest.raises(MismatchError, match=f"cache layer {last}: found 15 tokens, needed 20 as in layer 0"):
        caches.crop(cache, 10)
    assert caches.cache_length(cache) == 20


def test_crop_of_a_static_cache(qwen3: Any) -> None:
    from transformers import StaticCache

    ids = prompt(20)
    cache = StaticCache(config=qwen3.config, max_cache_len=32)
    caches.forward(qwen3, ids[:, :12], cache, base=True)
    caches.forward(qwen3, prompt(5, seed=9), cache, base=True)
    try:
        caches.crop(cache, 12)
    except MismatchError as error:
        assert "static" in str(error)  # noqa: PT017
        return
    reference = filled(qwen3, full(qwen3, ids[:, :12]))
    torch.testing.assert_close(
        caches.forward(qwen3, ids[:, 12:], cache), caches.forward(qwen3, ids[:, 12:], reference), rtol=0, atol=2e-5
    )


class Rounded(QuantizedLayer):
    """A quantised layer of a user's own, whose name does not say so."""

    def __init__(self) -> None:
        super().__init__(residual_length=6)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:  # noqa: ARG002
        return tensor

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor


def test_a_quantised_cache_of_ones_own_is_named(qwen3: Any) -> None:
    cache = Cache(layers=[Rounded() for _ in range(qwen3.config.num_hidden_layers)])
    for step in (slice(0, 8), slice(8, 9)):
        caches.forward(qwen3, torch.arange(5, 14)[None, step], cache)
    assert cache.layers[0].keys.shape[-2] == 1  # the newest token; the others are quantised
    for call in (caches.read_cache, lambda cache: caches.crop(cache, 4)):
        with pytest.raises(
            MismatchError, match=r"cache layer 0: found Rounded, which keeps its tokens quantised.* DynamicCache"
        ):
            call(cache)
