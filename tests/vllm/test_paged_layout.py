"""A layout finds every key and value of a block again, whichever backend has stored it."""

import pytest
import torch

from kvfit.errors import UnsupportedModelError
from kvfit.vllm.layout import Layout, watched_layout

H, N, D = 3, 8, 4


def store_split(keys, values, cache, slots):
    """FlashAttention and FlashInfer: one token at a time, keys before values."""
    for index, slot in enumerate(slots.tolist()):
        cache[slot // N, :, slot % N, :D] = keys[index]
        cache[slot // N, :, slot % N, D:] = values[index]


def split_layout():
    """Of `store_split`: (blocks, H, N, 2 D). Whether heads or tokens come first in memory shows in the view's strides only."""
    return Layout(torch.arange(H * N * 2 * D).view(H, N, 2, D).permute(2, 0, 1, 3).contiguous())


def store_transposed(keys, values, cache, slots):
    """vLLM's "vec" on a CPU: a head's keys as (D, N), then its values as (N, D)."""
    halves = cache.view(cache.shape[0], H, 2, N * D)
    for index, slot in enumerate(slots.tolist()):
        halves[slot // N, :, 0].view(H, D, N)[:, :, slot % N] = keys[index]
        halves[slot // N, :, 1].view(H, N, D)[:, slot % N] = values[index]


def store_stacked(keys, values, cache, slots):
    """(2, blocks, N, H, D), as vLLM had it before."""
    for index, slot in enumerate(slots.tolist()):
        cache[0, slot // N, slot % N] = keys[index]
        cache[1, slot // N, slot % N] = values[index]


def split_cache(tokens_first=False, dtype=torch.float32):
    """An empty cache of five blocks; the view is the same whether heads or tokens come first in memory."""
    if tokens_first:
        return torch.zeros(5, N, H, 2 * D, dtype=dtype).transpose(1, 2)
    return torch.zeros(5, H, N, 2 * D, dtype=dtype)


def tokens(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, H, D, generator=generator).to(dtype) for _ in range(2)]


CASES = {
    "split": (split_layout(), store_split, split_cache()),
    "split, tokens first": (split_layout(), store_split, split_cache(tokens_first=True)),
    "split, bfloat16": (split_layout(), store_split, split_cache(dtype=torch.bfloat16)),
    "transposed": (watched_layout(store_transposed, split_cache(), H, N, D), store_transposed, split_cache()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_backend_stores_is_read_and_written_alike(name):
    layout, store, empty = CASES[name]
    keys, values = tokens(2 * N, empty.dtype)
    cache = empty.clone()
    store(keys, values, cache, torch.cat([torch.arange(N) + 3 * N, torch.arange(N) + N]))  # blocks 3, then 1
    states = layout.read(cache, [3, 1])
    assert torch.equal(states, torch.stack([keys.transpose(0, 1), values.transpose(0, 1)]))
    written = empty.clone()
    layout.write(written, [3, 1], states)
    assert torch.equal(written, cache)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_watching_finds_the_layout_that_is_documented(tokens_first):
    cache = split_cache(tokens_first)
    found = watched_layout(store_split, cache, H, N, D)
    assert torch.equal(found.places, split_layout().places)
    assert not cache.any()


def test_the_wrong_layout_does_not_read_the_same():
    keys, values = tokens(N)
    cache = split_cache()
    store_transposed(keys, values, cache, torch.arange(N) + N)
    assert not torch.equal(split_layout().read(cache, [1])[0], keys.transpose(0, 1))


def test_a_cache_that_loses_numbers_is_refused():
    def store_keys_only(keys, values, cache, slots):  # noqa: ARG001
        store_split(keys, keys, cache, slots)

    def store_with_scales(keys, values, cache, slots):
        store_split(keys, values, cache[..., : 2 * D], slots)

    with pytest.raises(UnsupportedModelError, match="keys and values once"):
        watched_layout(store_keys_only, split_cache(), H, N, D)
    with pytest.raises(UnsupportedModelError, match="keys and values once"):
        watched_layout(store_with_scales, torch.zeros(5, H, N, 2 * D + 1), H, N, D)
    with pytest.raises(UnsupportedModelError, match="keys and values once"):  # blocks in the second dimension
        watched_layout(store_stacked, torch.zeros(2, 5, N, H, D), H, N, D)
