"""Real engines of vLLM: a source that saves, a target that starts from it, and whatever can go wrong between them.

Three engines run side by side: the demo source, the demo target with the demo mapper, and the demo source once more as the
target of a mapper that must change nothing. Starting one takes a quarter of a minute, so all tests share them.
"""

import json
import random
import time
from pathlib import Path

import pytest
import torch

# A module of vLLM's: this folder alone would pass for a package of that name.
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from planted_identity import write_identity
from vllm_engines import counters, generate, running

from kvfit import handoff, load_mapper
from kvfit.demo import MODELS, TEXTS
from kvfit.model.cache import forward, full_cache
from kvfit.model.content import content_of
from kvfit.model.generate import generate as continued
from kvfit.vllm.addresses import AddressBook, SourceIdentity, content_identity
from kvfit.vllm.entries import pack, unpack
from kvfit.vllm.store import FolderStore

MAPPER = Path(__file__).resolve().parents[2] / "registry" / "demo-mapper"
LENGTH, BLOCK, N_TOKENS = 500, 128, 12
MAPPED = 384


def transformers_model(name):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def models():
    return transformers_model("demo:source"), transformers_model("demo:target")


@pytest.fixture(scope="module")
def text():
    """Ids of held-out text, one document after the other."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo:source"])
    documents = [json.loads(line)["text"] for line in TEXTS["demo:heldout"].read_text(encoding="utf-8").splitlines()]
    return [number for document in documents for number in tokenizer(document)["input_ids"]]


@pytest.fixture(scope="module")
def fresh(text):
    """Prompts that no test has used: each call gives another one."""
    starts = iter(range(0, len(text) - LENGTH, 211))

    def prompt(length=LENGTH):
        start = next(starts)
        return text[start : start + length]

    return prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def options(folder):
    """What all engines share."""
    return {"store": "vllm_engines:failing_store", "store_options": {"folder": str(folder)}, "salt": "pepper"}


@pytest.fixture(scope="module")
def source(options):
    """Steps of 256 tokens, so that several steps complete a prompt; with its own prefix cache, as by default."""
    more = {"max_num_batched_tokens": 256, "max_num_seqs": 64, "enable_prefix_caching": True}
    with running(MODELS["demo:source"], more, role="source", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def target(options):
    extra = {"mapper": str(MAPPER), "require": "any", "max_age_seconds": 3600, "timeout_seconds": 5.0}
    with running(MODELS["demo:target"], role="target", **options, **extra) as engine:
        yield engine


@pytest.fixture(scope="module")
def itself(options, models, tmp_path_factory):
    bundle = write_identity(tmp_path_factory.mktemp("identity") / "bundle", models[0])
    with running(MODELS["demo:source"], role="target", mapper=str(bundle), **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def mapper():
    return load_mapper(MAPPER, require="any", dtype=torch.float32)


@pytest.fixture(scope="module")
def book(mapper):
    return AddressBook(SourceIdentity.of(mapper.spec.source).sampled, BLOCK, "pepper")


@pytest.fixture(scope="module")
def store(folder):
    return FolderStore(folder, 1 << 30)


def native(engine, prompt):
    """What the engine answers without the connector's help."""
    (answer,), (told,) = generate(engine, [prompt], map=False)
    assert told["reason"] == "opted_out"
    return answer


def moved(models, mapper, prompt, mapped=MAPPED, **wanted):
    """What `handoff` in transformers answers with the same exact tail."""
    ids = torch.tensor([prompt])
    cache = full_cache()
    forward(models[0], ids[:, :-1], cache, base=True)
    done = handoff(mapper, models[1], ids, cache, exact_tail=len(prompt) - 1 - mapped, **wanted)
    answer = continued(models[1], ids, done.cache, max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=None)
    return answer[0, len(prompt) :].tolist()


def read_by_source(source, fresh, count=1):
    prompts = [fresh() for _ in range(count)]
    generate(source, prompts, n_tokens=1)
    return prompts


def expect_prefill(engine, prompt, reason, **asked):
    """The engine prefills: the plain answer, and the reason told and counted."""
    name = f"fallback_prefill:{reason}"
    before = counters(engine).get(name, 0)
    (answer,), (told,) = generate(engine, [prompt], **asked)
    assert (told["status"], told["reason"], told["mapped_tokens"]) == ("fallback_prefill", reason, 0)
    assert counters(engine)[name] == before + 1
    assert answer == native(engine, prompt)


def test_an_engine_without_help_answers_as_transformers_does(target, models, fresh):
    prompt = fresh()
    ids = torch.tensor([prompt])
    plain = models[1].generate(ids, max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=None)[0, LENGTH:].tolist()
    assert native(target, prompt) == plain


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, {"recompute": 0.1}),
        ({"recompute": 0}, {}),
        ({"recompute": 0.3}, {"recompute": 0.3}),
        ({"recompute": "auto"}, {"recompute": "auto"}),
        ({"exact_tokens": [[100, 140], 17, 300]}, {"exact_tokens": [17, *range(100, 140), 300]}),
    ],
)
def test_the_target_answers_as_handoff_does(source, target, models, mapper, fresh, asked, wanted):
    prompts = read_by_source(source, fresh, 4)
    answers, told = generate(target, prompts, **asked)
    assert [one["mapped_tokens"] for one in told] == [MAPPED] * 4
    guided = {"guide": models[0]} if "recompute" in wanted else {}
    assert answers == [moved(models, mapper, prompt, **wanted, **guided) for prompt in prompts]


def test_mapping_is_not_prefilling_in_disguise(source, target, fresh):
    prompts = read_by_source(source, fresh, 6)
    answers, _ = generate(target, prompts, recompute=0)
    assert answers != [native(target, prompt) for prompt in prompts]


def test_less_can_be_mapped_and_the_rest_is_exact(source, target, models, mapper, fresh):
    (prompt,) = read_by_source(source, fresh)
    for asked in ({"max_mapped_tokens": 300}, {"exact_tail": 200}):
        (answer,), (told,) = generate(target, [prompt], recompute=0, **asked)
        assert told["mapped_tokens"] == 256
        assert answer == moved(models, mapper, prompt, mapped=256)


def test_everything_run_again_is_the_native_answer(source, target, fresh):
    prompts = read_by_source(source, fresh, 3)
    answers, told = generate(target, prompts, exact_tokens=[[0, MAPPED]])
    assert [one["status"] for one in told] == ["applied"] * 3
    assert answers == [native(target, prompt) for prompt in prompts]


def test_a_mapper_that_changes_nothing_gives_the_native_answer(source, itself, fresh):
    prompts = read_by_source(source, fresh, 4)
    answers, told = generate(itself, prompts, recompute=0)
    assert [one["mapped_tokens"] for one in told] == [MAPPED] * 4
    assert answers == [native(itself, prompt) for prompt in prompts]


def test_what_the_source_saved_is_its_own_cache(source, models, book, store, fresh):
    (prompt,) = read_by_source(source, fresh)
    cache = full_cache()
    forward(models[0], torch.tensor([prompt]), cache, base=True)
    saved = torch.cat([unpack(store.get(address)).states for address in book.blocks(prompt)], 3)
    assert saved.shape[3] == MAPPED
    for layer, (states, plain) in enumerate(zip(saved, cache.layers, strict=True)):
        for half, expected in zip(states, (plain.keys[0], plain.values[0]), strict=True):
            torch.testing.assert_close(half, expected[:, :MAPPED], atol=1e-4, rtol=1e-4, msg=f"layer {layer}")


def test_blocks_that_the_source_need_not_compute_are_saved_too(source, target, book, store, fresh):
    """They are in its prefix cache, from before they were evicted here; and looking back has not changed them."""
    (prompt,) = read_by_source(source, fresh)
    before = [unpack(store.get(address)).states for address in book.blocks(prompt)]
    for address in (*book.blocks(prompt), book.guide(prompt)):
        store._path(address).unlink()
    generate(source, [prompt], n_tokens=1)
    after = [unpack(store.get(address)).states for address in book.blocks(prompt)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    (_,), (told,) = generate(target, [prompt])
    assert told["status"] == "applied"


def test_prompts_that_the_source_has_not_read_are_prefilled(source, target, fresh):
    read_by_source(source, fresh)
    expect_prefill(target, fresh(), "missing")
    expect_prefill(target, fresh(100), "short")


def test_a_torn_entry_is_a_miss(source, target, book, store, fresh):
    (prompt,) = read_by_source(source, fresh)
    path = store._path(book.blocks(prompt)[1])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    expect_prefill(target, prompt, "corrupt")
    path.write_bytes(data[:1000])
    expect_prefill(target, prompt, "corrupt")


def test_another_prompts_entry_is_a_miss(source, target, book, store, fresh):
    one, other = read_by_source(source, fresh, 2)
    store._path(book.blocks(one)[0]).write_bytes(store.get(book.blocks(other)[0]))
    expect_prefill(target, one, "mismatch")


def test_another_models_entry_is_a_miss(source, target, mapper, book, store, fresh):
    """Were a digest to collide, what is in the entry would still tell."""
    (prompt,) = read_by_source(source, fresh)
    address = book.blocks(prompt)[0]
    entry = unpack(store.get(address))
    cases = [(entry.states[:3], entry.content), (entry.states[..., :16], entry.content)]
    if mapper.spec.source.content is not None:
        cases.append((entry.states, "another"))
    for states, content in cases:
        store._path(address).write_bytes(pack(states, content, address))
        expect_prefill(target, prompt, "mismatch")


def test_the_engine_knows_its_weights_as_the_mapper_does(source, models, book, store, fresh):
    """What entries carry is what `describe_model` would record of the same checkpoint."""
    (prompt,) = read_by_source(source, fresh)
    content = content_of(models[0], 2048)
    assert unpack(store.get(book.blocks(prompt)[0])).content == content_identity(content.rounded, content.n_ids)


def test_not_a_number_is_a_miss(source, target, book, store, fresh):
    (prompt,) = read_by_source(source, fresh)
    address = book.blocks(prompt)[2]
    entry = unpack(store.get(address))
    states, content = entry.states, entry.content
    states[1, 0, 2, 5, 3] = torch.nan
    store._path(address).write_bytes(pack(states, content, address))
    expect_prefill(target, prompt, "nonfinite")


def test_an_old_entry_is_a_miss(source, target, book, store, fresh, monkeypatch):
    (prompt,) = read_by_source(source, fresh)
    address = book.blocks(prompt)[0]
    entry = unpack(store.get(address))
    states, content = entry.states, entry.content
    monkeypatch.setattr(time, "time", lambda: 1e9)
    store._path(address).write_bytes(pack(states, content, address))
    monkeypatch.undo()
    expect_prefill(target, prompt, "stale")


@pytest.mark.parametrize(("sign", "reason"), [("vanish", "evicted"), ("late", "slow")])
def test_what_vanishes_or_comes_late_is_a_miss(source, target, folder, fresh, sign, reason):
    (prompt,) = read_by_source(source, fresh)
    (folder / sign).touch()
    try:
        expect_prefill(target, prompt, reason)
    finally:
        (folder / sign).unlink()
    (_,), (told,) = generate(target, [prompt])
    assert told["status"] == "applied"


def test_an_evicted_block_ends_the_prefix(source, target, models, mapper, book, store, fresh):
    (prompt,) = read_by_source(source, fresh)
    store._path(book.blocks(prompt)[1]).unlink()
    (answer,), (told,) = generate(target, [prompt], recompute=0)
    assert told["mapped_tokens"] == BLOCK
    assert answer == moved(models, mapper, prompt, mapped=BLOCK)
    store._path(book.guide(prompt)).unlink()
    expect_prefill(target, prompt, "no_guide")


def test_tenants_share_nothing(source, target, fresh):
    prompt = fresh()
    generate(source, [prompt], n_tokens=1, tenant="one")
    expect_prefill(target, prompt, "missing")
    expect_prefill(target, prompt, "missing", tenant="two")
    (_,), (told,) = generate(target, [prompt], tenant="one")
    assert told["status"] == "applied"


def test_parameters_that_cannot_be_are_a_miss(source, target, fresh):
    (prompt,) = read_by_source(source, fresh)
    expect_prefill(target, prompt, "bad_parameters", recompute=7)
    expect_prefill(target, prompt, "bad_parameters", maps=True)


@pytest.mark.parametrize("sampled", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_a_request_whose_whole_prompt_is_run_is_a_miss(source, target, fresh, sampled):
    (prompt,) = read_by_source(source, fresh)
    expect_prefill(target, prompt, "whole_prompt", sampled=sampled)
    (_,), (told,) = generate(target, [prompt])
    assert told["status"] == "applied"


def test_fifty_requests_at_once_hits_and_misses_mixed(source, target, fresh):
    hits = read_by_source(source, fresh, 20)
    alone = [generate(target, [prompt])[0][0] for prompt in hits]
    misses = [fresh() for _ in range(20)]
    short = [fresh(90) for _ in range(10)]
    order = list(enumerate([*hits, *misses, *short]))
    random.Random(0).shuffle(order)
    before = counters(target)
    answers, told = generate(target, [prompt for _, prompt in order])
    after = counters(target)
    for (number, prompt), answer, one in zip(order, answers, told, strict=True):
        expected = ("applied", None) if number < 20 else ("fallback_prefill", "missing" if number < 40 else "short")
        assert (one["status"], one["reason"]) == expected
        assert answer == (alone[number] if number < 20 else native(target, prompt))
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert (grown["applied"], grown["mapped_tokens"]) == (20, 20 * MAPPED)
    assert grown["recomputed_tokens"] == 20 * (16 + 37)  # the first tokens, and a tenth of the others
    assert (grown["fallback_prefill:missing"], grown["fallback_prefill:short"]) == (20, 10)
    assert grown["loaded_bytes"] > 20 * 3 * 2 * 4 * BLOCK * 128 * 4  # three blocks of 4 layers of 128 keys and values
    assert grown["load_milliseconds"] > 0


def test_the_source_counts_what_it_saves(source, fresh):
    before = counters(source)
    read_by_source(source, fresh, 2)
    after = counters(source)
    assert after["saved_blocks"] - before["saved_blocks"] == 2 * (3 + 1)  # three blocks and a guide each
    assert after["saved_bytes"] > before["saved_bytes"]
    assert after.get("unsaved_blocks", 0) == 0
