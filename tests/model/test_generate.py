"""Generation on a cache that holds part of the prompt is plain generation of the whole prompt, token for token."""

from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import FAMILIES, UNLISTED, VOCABULARY, Family, build, multimodal

from kvfit.errors import MismatchError, UnsupportedModelError
from kvfit.model import cache as caches
from kvfit.model.generate import generate

BY_NAME = {family.name: family for family in FAMILIES + UNLISTED}
LENGTH, HELD, NEW = 20, 11, 20
VERSION = tuple(int(part) for part in metadata.version("transformers").split(".")[:2])
NEWER = VERSION >= (5, 0)


def prompt(batch: int = 1, n_tokens: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, n_tokens), generator=torch.Generator().manual_seed(0))


def filled(model: Any, ids: Tensor, held: int = HELD, mask: Tensor | None = None) -> Any:
    """A cache as a handoff makes it: full-length keys and values appended to the model's own kind of cache."""
    full = caches.full_cache()
    caches.forward(model, ids[:, :held], full, base=True, attention_mask=None if mask is None else mask[:, :held])
    cache = caches.new_cache(model)
    for layer_index, (keys, values) in enumerate(caches.read_cache(full)):
        caches.append(cache, layer_index, keys, values)
    return cache


def same_as_plain(model: Any, ids: Tensor, held: int = HELD, mask: Tensor | None = None, **kwargs: Any) -> bool:
    mask = torch.ones_like(ids) if mask is None else mask
    kwargs = {"max_new_tokens": NEW, **kwargs}
    torch.manual_seed(7)
    wanted = model.generate(ids, attention_mask=mask, **kwargs)
    cache = filled(model, ids, held, mask)
    torch.manual_seed(7)
    found = generate(model, ids, cache, attention_mask=mask, **kwargs)
    # Beams leave the prompt alone, because their rows are not those of the sequences; a dropped window leaves nothing.
    left = (ids.shape[1], 0) if kwargs.get("num_beams", 1) > 1 else (wanted.shape[1] - 1, wanted.shape[1])
    return torch.equal(found, wanted) and caches.cache_length(cache) in left


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return build(BY_NAME["qwen3"])


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams and sequences": {"num_beams": 3, "num_return_sequences": 2},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[41], [7, 8]]},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_every_mode_is_plain_generate(name: str, mode: str) -> None:
    """A left-padded batch; with windows, which drop tokens on the way."""
    model, ids = build(BY_NAME[name]), prompt(2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    # 4.57 and 5.19 begin their chunks at the first token, so kvfit refuses there; 5.24 begins at the first that is not cached.
    if mode == "chunked prefill" and VERSION < (5, 24):
        with pytest.raises(MismatchError, match="prefill_chunk_size"):
            same_as_plain(model, ids, mask=mask, **MODES[mode])
        return
    assert same_as_plain(model, ids, mask=mask, **MODES[mode])


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window"])
@pytest.mark.parametrize("mode", ["model", "itself", "sampling", "lookup"])
def test_assisted_decoding(name: str, mode: str) -> None:
    """Versions up to the newest feed the whole prompt onto the cache when an assistant proposes tokens."""
    if not NEWER and (name != "qwen3" or mode == "sampling"):
        pytest.skip("version 4 cannot take back tokens of a window, and draws other proposals for each call")
    model, assistant = build(BY_NAME[name]), build(BY_NAME[name], seed=1)
    # The usual schedule writes the number it arrives at into the assistant, where the next call begins with it.
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    options = {
        "model": {"assistant_model": assistant},
        "itself": {"assistant_model": model},
        "sampling": {"assistant_model": assistant, "do_sample": True},
        "lookup": {"prompt_lookup_num_tokens": 3, "eos_token_id": VOCABULARY - 1},
    }[mode]
    assert same_as_plain(model, prompt(), **options)


@pytest.mark.parametrize("held", [1, LENGTH - 1])
@pytest.mark.parametrize("family", FAMILIES + UNLISTED, ids=lambda family: family.name)
def test_every_family(family: Family, held: int) -> None:
    assert same_as_plain(build(family), prompt(2), held, max_new_tokens=6)


def test_an_empty_cache_is_a_plain_prefill(qwen3: Any) -> None:
    ids = prompt(2)
    wanted = qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    assert torch.equal(generate(qwen3, ids, caches.full_cache(), max_new_tokens=6), wanted)


def test_one_wrong_token_in_the_cache_shows(qwen3: Any) -> None:
    """The negative control of every equality above."""
    ids, other = prompt(2), prompt(2)
    other[:, 3] += 1
    wanted = qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    assert not torch.equal(generate(qwen3, ids, filled(qwen3, other), max_new_tokens=NEW), wanted)


# Settings that contradict a cache that is passed


def switch_off(model: Any, place: str) -> None:
    if place == "config":
        model.config.use_cache = False
    elif place == "generation_config":
        model.generation_config.use_cache = False
    else:
        model.config.get_text_config(decoder=True).use_cache = False


@pytest.mark.parametrize("place", ["config", "generation_config", "both"])
def test_a_model_saved_with_its_cache_off(place: str) -> None:
    """transformers feeds the whole prompt onto the cache: hundreds of cached tokens, other tokens, no error."""
    ids = prompt()
    wanted = build(BY_NAME["qwen3"]).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    model = build(BY_NAME["qwen3"])
    for one in ("config", "generation_config") if place == "both" else (place,):
        switch_off(model, one)
    cache = filled(model, ids)
    assert torch.equal(generate(model, ids, cache, max_new_tokens=24, do_sample=False), wanted)
    assert caches.cache_length(cache) == LENGTH + 24 - 1


def test_a_nested_text_configuration_with_its_cache_off() -> None:
    def make(use_cache: bool) -> Any:
        text = {
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": VOCABULARY, "use_cache": use_cache,
        }  # fmt: skip
        return multimodal("llava", text, image_token_index=1)

    ids = prompt()
    wanted = make(True).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    model = make(False)
    assert model.config.get_text_config(decoder=True).use_cache is False
    cache = filled(model, ids)
    assert torch.equal(generate(model, ids, cache, max_new_tokens=NEW), wanted)
    assert caches.cache_length(cache) == LENGTH + NEW - 1


def test_a_generation_configuration_that_names_a_kind_of_cache() -> None:
    """In the model's own file it gives way; asked for, it is an error, because a cache is given already."""
    from transformers import GenerationConfig

    ids = prompt()
    model = build(BY_NAME["qwen3"])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    model.generation_config.cache_implementation = "static"
    assert torch.equal(generate(model, ids, filled(model, ids), max_new_tokens=6), wanted)
    for name, value in [
        ("cache_implementation", "static"),
        ("cache_implementation", "offloaded"),
        ("past_key_values", caches.full_cache()),
        ("cache", caches.full_cache()),
        ("use_cache", False),
    ]:
        with pytest.raises(MismatchError, match=rf"^{name}: found .* drop it"):
            generate(model, ids, filled(model, ids), max_new_tokens=6, **{name: value})
    given = GenerationConfig(cache_implementation="static", max_new_tokens=6)
    with pytest.raises(MismatchError, match="cache_implementation: found a value, needed none"):
        generate(model, ids, filled(model, ids), generation_config=given)
    for name, value in {
        "inputs_embeds": torch.zeros(1, LENGTH, 64), "inputs": ids, "input_ids": ids, "position_ids": torch.zeros_like(ids),
    }.items():  # fmt: skip
        with pytest.raises(MismatchError, match=f"^{name}: found a tensor, needed .*: drop {name}"):
            generate(model, ids, filled(model, ids), max_new_tokens=6, **{name: value})


@pytest.mark.parametrize("where", ["argument", "given", "model"])
def test_beams_asked_for_in_a_configuration(where: str) -> None:
    from transformers import GenerationConfig

    model, ids = build(BY_NAME["qwen3"]), prompt(2)
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, num_beams=3)
    options: dict[str, Any] = {"max_new_tokens": NEW}
    if where == "given":
        options = {"generation_config": GenerationConfig(num_beams=3, max_new_tokens=NEW)}
    elif where == "model":
        model.generation_config.num_beams = 3
    else:
        options["num_beams"] = 3
    cache = filled(model, ids)
    assert torch.equal(generate(model, ids, cache, **options), wanted)
    assert cache.layers[0].keys.shape[0] == 2


@pytest.mark.parametrize(("beams", "returned"), [(3, 1), (3, 3), (4, 2)])
def test_after_beams_the_cache_is_that_of_the_prompts(qwen3: Any, beams: int, returned: int) -> None:
    """One row for each sequence that is returned, in their order, so that a conversation can go on from it."""
    ids = prompt(2)
    cache = filled(qwen3, ids)
    out = generate(qwen3, ids, cache, max_new_tokens=NEW, num_beams=beams, num_return_sequences=returned)
    assert out.shape[0] == 2 * returned
    wanted = caches.full_cache()
    caches.forward(qwen3, out[:, :LENGTH], wanted, base=True)
    for (keys, values), (wanted_keys, wanted_values) in zip(caches.read_cache(cache), caches.read_cache(wanted), strict=True):
        assert torch.allclose(keys, wanted_keys, atol=1e-4)
        assert torch.allclose(values, wanted_values, atol=1e-4)


def test_the_output_object_is_passed_on(qwen3: Any) -> None:
    ids = prompt(2)
    out = generate(qwen3, ids, filled(qwen3, ids), max_new_tokens=6, return_dict_in_generate=True, output_scores=True)
    assert out.sequences.shape == (2, LENGTH + 6)
    assert len(out.scores) == 6


def test_the_model_itself_is_left_alone(qwen3: Any) -> None:
    before = dict(vars(qwen3))
    generate(qwen3, prompt(), filled(qwen3, prompt()), max_new_tokens=3)
    assert vars(qwen3) == before


# A static cache


def test_a_static_cache_continues_and_refuses_what_it_cannot(qwen3: Any) -> None:
    from transformers import StaticCache

    ids = prompt(2)

    def static() -> Any:
        cache = StaticCache(config=qwen3.config, max_cache_len=LENGTH + NEW)
        caches.forward(qwen3, ids[:, :HELD], cache, base=True)
        return cache

    wanted = qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    assert torch.equal(generate(qwen3, ids, static(), max_new_tokens=NEW), wanted)
    for options in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(MismatchError, match="cache: found a static cache, needed a dynamic one"):
            generate(qwen3, ids, static(), max_new_tokens=NEW, **options)


# Refusals


def test_a_cache_of_the_whole_prompt_is_refused(qwen3: Any) -> None:
    """transformers would feed the prompt a second time, without an error."""
    ids = prompt()
    with pytest.raises(MismatchError, match="found 20 tokens for a prompt of 20, needed at least one prompt token outside"):
        generate(qwen3, ids, filled(qwen3, ids, LENGTH), max_new_tokens=4)
    with pytest.raises(MismatchError, match=r"attention_mask: found shape \(1, 4\), needed \(1, 20\)"):
        generate(qwen3, ids, filled(qwen3, ids), attention_mask=torch.ones(1, 4), max_new_tokens=4)
    with pytest.raises(MismatchError, match="input_ids: found list, needed a tensor"):
        generate(qwen3, ids.tolist(), filled(qwen3, ids))
    with pytest.raises(MismatchError, match="cache: found 1 sequences, needed 2 as input_ids has"):
        generate(qwen3, prompt(2), filled(qwen3, ids), max_new_tokens=4)


def test_a_pass_that_does_not_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gradient checkpointing in a model that trains does on older versions: every later token would lack its context."""
    model = build(BY_NAME["qwen3"])
    ids = prompt()
    cache = filled(model, ids)
    original = type(model.model).forward

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = {name: None for name in ("cache", "past_key_values") if name in kwargs}
        out = original(self, *args, **{**kwargs, **dropped, "use_cache": False})
        out[caches.cache_argument(model)] = cache
        return out

    monkeypatch.setattr(type(model.model), "forward", forgetful)
    with pytest.raises(MismatchError, match="an earlier pass did not cache its tokens"):
        generate(model, ids, cache, max_new_tokens=4)


def test_a_base_model_does_not_generate(qwen3: Any) -> None:
    class Base:
        config = qwen3.config

    with pytest.raises(UnsupportedModelError, match="qwen3: found no generate"):
        generate(Base(), prompt(), caches.full_cache())
