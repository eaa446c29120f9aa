"""Running a model on top of a cache: masks, positions, logits, devices."""

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, VOCABULARY, build

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches

BY_NAME = {family.name: family for family in FAMILIES}


def prompt(n_tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return build(BY_NAME["qwen3"])


def test_a_mask_of_the_wrong_length_is_refused(qwen3: Any) -> None:
    """transformers takes a mask of the new tokens alone and gives wrong logits."""
    cache = caches.new_cache(qwen3)
    caches.forward(qwen3, prompt(8), cache)
    with pytest.raises(MismatchError, match=r"attention_mask: found shape \(1, 4\), needed \(1, 12\)"):
        caches.forward(qwen3, prompt(4), cache, attention_mask=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(MismatchError, match=r"position_ids: found shape \(1, 12\), needed \(1, 4\)"):
        caches.forward(qwen3, prompt(4), cache, position_ids=torch.arange(12)[None])
    assert caches.cache_length(cache) == 8


def test_left_padding_gets_its_positions_from_the_mask(qwen3: Any) -> None:
    ids = prompt(10)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 10, dtype=torch.long)], 1)
    plain, left = caches.full_cache(), caches.full_cache()
    caches.forward(qwen3, ids[:, :7], plain)
    caches.forward(qwen3, padded[:, :11], left, attention_mask=mask[:, :11])
    for (keys, _), (shifted, _) in zip(caches.read_cache(plain), caches.read_cache(left), strict=True):
        torch.testing.assert_close(shifted[:, :, 4:], keys, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        caches.forward(qwen3, padded[:, 11:], left, attention_mask=mask),
        caches.forward(qwen3, ids[:, 7:], plain),
        rtol=0,
        atol=1e-3,
    )


def test_logits_to_keep_and_base(qwen3: Any) -> None:
    ids = prompt(9)
    everything = caches.forward(qwen3, ids, caches.new_cache(qwen3))
    last = caches.forward(qwen3, ids, caches.new_cache(qwen3), logits_to_keep=2)
    hidden = caches.forward(qwen3, ids, caches.new_cache(qwen3), base=True)
    assert everything.shape == (1, 9, VOCABULARY)
    torch.testing.assert_close(last, everything[:, -2:], rtol=0, atol=1e-5)
    torch.testing.assert_close(qwen3.lm_head(hidden), everything, rtol=0, atol=1e-5)
    assert not everything.requires_grad


def test_a_model_that_is_only_its_head_has_no_base(qwen3: Any) -> None:
    class Alone:
        config = qwen3.config

        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> None: ...

    with pytest.raises(UnsupportedModelError, match="qwen3: found no base model without a language-model head"):
        caches.forward(Alone(), prompt(3), caches.full_cache(), base=True)


def test_layer_devices(qwen3: Any) -> None:
    assert caches.layer_devices(qwen3, 3) == [torch.device("cpu")] * 3
    meta = build(BY_NAME["qwen3"])
    meta.model.layers[1].to("meta")
    assert [device.type for device in caches.layer_devices(meta, 3)] == ["cpu", "meta", "cpu"]
