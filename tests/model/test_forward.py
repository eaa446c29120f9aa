"""Running a model on top of a cache: masks, positions, logits, devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, VOCABULARY, Family, build

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device

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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("make", [caches.full_cache, caches.new_cache], ids=["full", "own"])
def test_a_pass_that_only_fills_a_cache_leaves_the_same_bits(family: Family, make: Any) -> None:
    """In two steps, the second beyond the windows; every layer, in the cache that keeps all tokens and in the model's own."""
    model, ids, ended = build(family), prompt(40, batch=2), []
    whole, filled = (make() if make is caches.full_cache else make(model) for _ in range(2))
    model.get_input_embeddings().register_forward_hook(lambda *_: ended.append("begun"))
    caches.base_model(model).register_forward_hook(lambda *_: ended.append("ended"))
    for piece in ids.split(30, dim=1):
        caches.forward(model, piece, whole, base=True)
        with caches.stops_when_filled(model, filled):
            caches.forward(model, piece, filled, base=True)
    assert ended == ["begun", "ended", "begun"] * 2
    assert len(whole.layers) == len(filled.layers)
    for one, other in zip(caches.own_layers(whole), caches.own_layers(filled), strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert int(one.get_seq_length()) == int(other.get_seq_length()) == 40


def test_a_pass_that_only_fills_a_cache_ends_at_its_last_layer() -> None:
    """Its attention and all that follows do not run; afterwards cache and model are as they were, also after an error."""
    model, ids, ran, cache = build(BY_NAME["qwen3"]), prompt(6), [], caches.full_cache()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda *_, index=index: ran.append(index))
    with caches.stops_when_filled(model, cache):
        caches.forward(model, ids, cache, base=True)
    assert ran == [0, 1]
    assert "update" not in vars(cache)
    with pytest.raises(MismatchError, match="attention_mask"), caches.stops_when_filled(model, cache):
        caches.forward(model, ids, cache, attention_mask=torch.ones(1, 3))
    assert "update" not in vars(cache)
    found, wanted = caches.forward(model, prompt(3), cache), caches.full_cache()
    caches.forward(model, ids, wanted)
    assert torch.equal(found, caches.forward(model, prompt(3), wanted))
    assert ran[2:] == [0, 1, 2] * 3


def test_a_pass_that_only_fills_a_cache_leaves_offloaded_weights_offloaded(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids, wanted, found = build(BY_NAME["qwen3"]), prompt(9), caches.full_cache(), caches.full_cache()
    caches.forward(model, ids, wanted, base=True)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "disk", "model.rotary_emb": "cpu"}
    model = accelerate.dispatch_model(
        model, {**places, "lm_head": "cpu"}, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    with caches.stops_when_filled(model, found):
        caches.forward(model, ids, found, base=True)
    for one, other in zip(caches.read_cache(found), caches.read_cache(wanted), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(parameter.is_meta for parameter in model.model.layers[2].parameters())


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


def test_the_input_device_is_found_without_walking_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, walked, walk = build(BY_NAME["qwen3"]), [], torch.nn.Module.named_modules

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        for found in walk(self, *args, **kwargs):
            walked.append(found)
            yield found

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    assert input_device(model) == torch.device("cpu")
    assert not any("layers.1" in path or "norm" in path for path, _ in walked)
    walked.clear()
    assert caches.layer_devices(model, 3) == [torch.device("cpu")] * 3
    assert any("layers.2" in path for path, _ in walked)
