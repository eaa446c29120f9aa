"""Families whose last layers read the keys and values of earlier ones: from the cache, or refused."""

from typing import Any

import pytest
import torch
from zoo import FAMILIES, VOCABULARY, build

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import cached_heads, owning_layers, projected_heads
from kvfit.model.generate import generate
from kvfit.model.rope_probe import probe
from kvfit.model.sharing import refuse_private_sharing

BY_NAME = {family.name: family for family in FAMILIES}
SHARING = ["gemma3n", "gemma4-shared"]


def ids(n_tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, n_tokens), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("name", SHARING)
def test_only_layers_with_keys_and_values_count(name: str) -> None:
    model = build(BY_NAME[name])
    seen = probe(model)
    assert (model.config.num_hidden_layers, seen.n_layers, owning_layers(model)) == (5, 3, 3)
    for cache in (caches.full_cache(), caches.new_cache(model)):
        caches.forward(model, ids(9), cache, base=True)
        assert len(caches.read_cache(cache)) == 3
        assert [state.length for state in caches.layer_states(cache)] == [9] * 3


@pytest.mark.parametrize("name", SHARING)
def test_a_pass_without_the_head_fills_the_same_cache_and_gives_the_last_state(name: str) -> None:
    model, cache, whole = build(BY_NAME[name]), caches.full_cache(), caches.full_cache()
    state = caches.forward(model, ids(9), cache, base=True)
    logits = caches.forward(model, ids(9), whole)
    for mine, theirs in zip(caches.read_cache(cache), caches.read_cache(whole), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    head = model.lm_head(state[:, -1])
    cap = getattr(model.config, "final_logit_softcapping", None)
    head = head if cap is None else cap * torch.tanh(head / cap)
    torch.testing.assert_close(head, logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHARING)
def test_other_keys_in_the_cache_are_read_by_the_layers_that_have_none(name: str) -> None:
    """The control of the proof: what the cache holds in the layer that is read changes the logits."""
    model, cache = build(BY_NAME[name]), caches.full_cache()
    caches.forward(model, ids(9), cache, base=True)
    pairs = caches.read_cache(cache)
    found = []
    for scale in (1.0, -1.0):
        given = caches.new_cache(model)
        for layer_index, (keys, values) in enumerate(pairs):
            caches.append(given, layer_index, keys.clone(), scale * values if layer_index == 2 else values.clone())
        found.append(caches.forward(model, ids(10)[:, 9:], given))
    assert float((found[0] - found[1]).abs().max()) > 1e-2


def test_layers_that_read_from_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that keeps the keys and values of its first pass for the layers that have none, past the cache."""
    from transformers.models.gemma4 import modeling_gemma4

    original = modeling_gemma4.Gemma4TextAttention.forward

    def forgetful(self: Any, *args: Any, shared_kv_states: Any, **kwargs: Any) -> Any:
        """Of keys and values that are read, the last tokens only: those of the pass that runs."""
        if self.is_kv_shared_layer:
            n_new = kwargs["hidden_states"].shape[1]
            pair = shared_kv_states[self.layer_type]
            if pair[0].shape[2] > n_new:
                shared_kv_states = {self.layer_type: tuple(half[:, :, -n_new:].repeat(1, 1, 8, 1) for half in pair)}
        return original(self, *args, shared_kv_states=shared_kv_states, **kwargs)

    model = build(BY_NAME["gemma4-shared"])
    refuse_private_sharing(model)
    monkeypatch.setattr(modeling_gemma4.Gemma4TextAttention, "forward", forgetful)
    with pytest.raises(UnsupportedModelError, match="layer 3: it reads the keys and values of an earlier layer from elsewhere"):
        refuse_private_sharing(model)


def test_heads_of_equal_width_are_told_apart() -> None:
    """Two heads of 16 and one of 32 are as wide; the cache of the one is not the other's."""
    model = build(BY_NAME["gemma4-fewer"])
    assert projected_heads(model) == {0: (2, 16, 16), 1: (2, 16, 16), 2: (1, 32, 32)}
    assert cached_heads(model).get(2, (1, 32)) == (1, 32)
    cache = caches.new_cache(model)
    caches.forward(model, ids(6), cache, base=True)
    assert generate(model, ids(7), cache, max_new_tokens=2, do_sample=False).shape == (1, 9)
    wrong = caches.full_cache()
    for layer_index in range(3):
        caches.append(wrong, layer_index, torch.zeros(1, 1, 6, 32), torch.zeros(1, 1, 6, 32))
    if 0 in cached_heads(model):
        with pytest.raises(MismatchError, match="layer 0: found heads and head size"):
            generate(model, ids(7), wrong, max_new_tokens=2)


def test_values_of_another_size() -> None:
    model = build(BY_NAME["mimo-v2-flash"])
    assert projected_heads(model) == dict(enumerate(BY_NAME["mimo-v2-flash"].geometry))
