"""Loading: a checkpoint that is not whole is refused by name, never filled with random numbers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_server import File, running_hub
from made_mappers import model_spec
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertModel
from zoo import FAMILIES, build

from kvfit.demo import demo_path
from kvfit.errors import KvfitError, MismatchError, OptionError, RefError
from kvfit.fit.capture.capture import Options as CaptureOptions
from kvfit.fit.capture.capture import capture
from kvfit.fit.capture.inspect import inspect_model
from kvfit.fit.capture.models import Options, check_encodings, check_tokenizers, load, load_config, load_tokenizer
from kvfit.fit.capture.sequences import beginnings
from kvfit.fit.capture.text import TextOptions, mix
from kvfit.model.digests import encoding_digest, tokenization_digest, tokenizer_fingerprint
from kvfit.model.identity import check_tokenizer
from kvfit.spec import RopeSpec

KEY = "model.layers.2.self_attn.k_proj.weight"


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], str]:
    """A copy of the demo's source with its weights changed."""

    def make(change: Callable[[dict[str, Tensor]], object]) -> str:
        folder = tmp_path / "damaged"
        shutil.copytree(str(demo_path("demo:source")), folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    return make


def test_missing_weights_are_named(damaged, tmp_path: Path) -> None:
    folder = damaged(lambda weights: weights.pop(KEY))
    text = TextOptions("demo:text")
    options = CaptureOptions(seq_len=64)

    def run(ref: str) -> object:
        return capture(ref, "demo:target", tmp_path / "s.zarr", text=text, options=options, progress=False)

    for verb in (load, inspect_model, run):
        with pytest.raises(RefError, match=rf"damaged: found no weights for {KEY}, needed every weight"):
            verb(folder)
    assert not (tmp_path / "s.zarr").exists()


def test_many_missing_weights_are_counted(damaged) -> None:
    folder = damaged(lambda weights: [weights.pop(name) for name in list(weights) if ".layers.1." in name])
    with pytest.raises(
        RefError, match=r"model\.layers\.1\.\S+, model\.layers\.1\.\S+, model\.layers\.1\.\S+ and \d+ more, needed"
    ):
        load(folder)


def test_weights_of_another_shape_are_named(damaged) -> None:
    folder = damaged(lambda weights: weights.update({KEY: weights[KEY][:-1].clone()}))
    with pytest.raises(RefError, match=f"found weights of another shape for {KEY}"):
        load(folder)


def test_an_encoder_without_its_head_is_refused(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=2048)
    BertModel(config).save_pretrained(tmp_path / "bert")
    load_tokenizer("demo:source").save_pretrained(tmp_path / "bert")
    with pytest.raises(
        RefError, match=r"bert: found no weights for cls\.predictions.* needed every weight of a causal language"
    ):
        inspect_model(str(tmp_path / "bert"))


def test_a_head_that_shares_its_weights_is_not_missing(tmp_path: Path) -> None:
    llama = next(family for family in FAMILIES if family.name == "llama")
    build(llama, vocab_size=2048, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    load_tokenizer("demo:source").save_pretrained(tmp_path / "tied")
    assert not any("lm_head" in name for name in load_file(tmp_path / "tied" / "model.safetensors"))
    loaded = load(str(tmp_path / "tied"))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


@pytest.mark.parametrize("kept", [0, 7, 0.5, -1])
def test_a_download_that_was_cut_short_is_named(damaged, kept: float) -> None:
    folder = damaged(lambda _weights: None)
    path = Path(folder, "model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if kept == 0.5 else int(kept)])
    with pytest.raises(
        RefError, match=r"damaged: found model\.safetensors cut short or damaged, needed all of it: fetch it again"
    ):
        inspect_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "found no loadable"),
        ("config.json", b"{", "found no loadable"),
        ("tokenizer.json", b"{", "found no loadable tokenizer there"),
        ("pytorch_model.bin", b"abc", "found no loadable model there"),
    ],
)
def test_files_that_are_no_model_s(damaged, name: str, content: bytes, message: str) -> None:
    """Whatever transformers raises for them, it is one line that names the model."""
    folder = damaged(lambda _weights: None)
    Path(folder, name).write_bytes(content)
    if name.endswith(".bin"):
        Path(folder, "model.safetensors").unlink()
    with pytest.raises(RefError, match=rf"^damaged: {message}") as caught:
        inspect_model(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(damaged) -> None:
    folder = damaged(lambda _weights: None)
    for path in Path(folder).glob("token*"):
        path.unlink()
    with pytest.raises(KvfitError):  # which one depends on the version of transformers
        inspect_model(folder)


def test_a_package_that_an_option_needs() -> None:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("flash-attn is installed")
    with pytest.raises(MismatchError, match=r"demo:source: found a package missing .*FlashAttention2"):
        load("demo:source", options=Options(attn_implementation="flash_attention_2"))


def test_a_missing_folder_is_no_failed_connection() -> None:
    with pytest.raises(
        RefError, match=r"models/nothere: found no such folder; and on the Hub: .* not in the local cache"
    ) as caught:
        load("models/nothere")
    assert "connect to" not in str(caught.value)
    with pytest.raises(RefError, match="found no such folder"):
        load_tokenizer("models/nothere")


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"device": "foo"}, {"device": "meta"}, {"device_map": "foo"}, {"attn_implementation": "foo"}]
)
def test_options_are_checked_by_name(wrong: dict[str, str]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(OptionError, match=f"{name.replace('_', '-')}: found '{value}'.* needed"):
        Options(**wrong)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Points the Hub's client of this process, with a cache of its own, at an address. It may not wait and try again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    def wait(seconds: float) -> None:
        pytest.fail(f"the client waits {seconds} s and tries again")

    monkeypatch.setattr(_http.time, "sleep", wait)
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(tmp_path / "cache"))):
        monkeypatch.setattr(constants, name, value)

    def at(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    return at


NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("verb", [load_config, load_tokenizer, load])
def test_without_a_connection_a_name_fails_at_once(ask, verb: Callable[[str], object]) -> None:
    ask(NOWHERE)
    needed = "org/model: found no such folder; and on the Hub: .*the Hub cannot be reached; fetch it once with a connection"
    with pytest.raises(RefError, match=needed):
        verb("org/model")


def test_without_a_connection_what_was_fetched_before_loads(ask) -> None:
    """Of the files that a model may have and this one has not, nothing is known without a connection, and nothing is asked."""
    folder = demo_path("demo:source")
    assert folder is not None
    with running_hub() as hub:
        ask(hub.url)
        hub.create("org/model").commit({path.name: File(path.read_bytes(), False) for path in folder.glob("*.*")}, "main")
        fetched = load("org/model")
    ask(NOWHERE)
    again = load("org/model")
    assert again.revision == fetched.revision == hub.repositories["org/model"].branches["main"]
    assert again.model.state_dict().keys() == fetched.model.state_dict().keys()
    assert load_tokenizer("org/model").get_vocab() == fetched.tokenizer.get_vocab()


def test_a_repository_without_a_configuration_is_no_model(ask) -> None:
    with running_hub() as hub:
        ask(hub.url)
        hub.create("org/empty")
        with pytest.raises(RefError, match=r"org/empty: found no config\.json there"):
            load_config("org/empty")
        with pytest.raises(RefError, match="org/absent: found no such folder; and on the Hub: org/absent: missing, or"):
            load_config("org/absent")


# Tokenizers of one vocabulary

END = "<|endoftext|>"
FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
}
OTHER_IDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lower case": ({"normalizer": {"type": "Lowercase"}}, {}, {}),
    "compatibility characters": ({"normalizer": {"type": "NFKC"}}, {}, {}),
    "spaces at the ends": ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, {}, {}),
    "spaces at the end": ({"normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}}, {}, {}),
    "spaces before a special token": ({}, {"lstrip": True}, {}),
    "spaces after a special token": ({}, {"rstrip": True}, {}),
    "only whole words are special": ({}, {"single_word": True}, {}),
    "no special tokens in a text": ({}, {}, {"split_special_tokens": True}),
    "a first token": ({"post_processor": FIRST}, {}, {}),
}
SAME_IDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {}),
    "chat template": (
        {},
        {},
        {"chat_template": "{{ messages }}", "padding_side": "left"},
    ),
    "longest text": ({}, {}, {"model_max_length": 8, "truncation_side": "left"}),
    "other roles": ({}, {}, {"bos_token": END, "unk_token": END}),
    "truncation": ({"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}}, {}, {}),
}


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Any]:
    """The demo's tokenizer with other settings: of the file, of its special token, of its configuration."""

    def make(file: dict[str, Any], special: dict[str, Any], config: dict[str, Any]) -> Any:
        folder = tmp_path / "changed"
        shutil.copytree(str(demo_path("demo:target")), folder, ignore=shutil.ignore_patterns("*.safetensors"))
        stored = json.loads((folder / "tokenizer.json").read_text())
        stored["added_tokens"][0].update(special)
        (folder / "tokenizer.json").write_text(json.dumps({**stored, **file}))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
        return load_tokenizer(str(folder))

    return make


def recorded(tokenizer: Any) -> Any:
    """The part of a spec that records a tokenizer."""
    return model_spec(
        1, 1, 4, RopeSpec((), (None,)), tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        tokenization_digest=tokenization_digest(tokenizer), encoding_digest=encoding_digest(tokenizer),
    )  # fmt: skip


@pytest.mark.parametrize("change", OTHER_IDS)
def test_tokenizers_that_encode_differently_are_refused(changed: Callable[..., Any], change: str) -> None:
    """When a pair is captured, and when a tokenizer is bound, in both directions."""
    own, other = load_tokenizer("demo:source"), changed(*OTHER_IDS[change])
    assert own.get_vocab() == other.get_vocab()
    for pair in ((own, other), (other, own)):
        with pytest.raises(MismatchError, match=r"same token-to-id map but different splits of a text, from token \d+ on "):
            check_tokenizers(*pair)
        with pytest.raises(MismatchError, match=r"^field (tokenization|encoding)_digest: .*this one has its vocabulary but"):
            check_tokenizer(recorded(pair[0]), pair[1])


@pytest.mark.parametrize("change", SAME_IDS)
def test_settings_that_change_no_id_pass(changed: Callable[..., Any], change: str) -> None:
    own, other = load_tokenizer("demo:source"), changed(*SAME_IDS[change])
    check_tokenizers(own, other)
    check_tokenizers(other, own)
    check_tokenizer(recorded(own), other)
    check_tokenizer(recorded(other), own)


def test_a_bundle_without_the_digest_is_checked_by_what_it_has(changed: Callable[..., Any]) -> None:
    old = replace(recorded(load_tokenizer("demo:source")), encoding_digest=None)
    check_tokenizer(old, changed(*OTHER_IDS["spaces at the ends"]))


def test_a_difference_that_only_the_text_shows_is_refused(tmp_path: Path, changed: Callable[..., Any]) -> None:
    """Both tokenizers encode the documents that are captured, of every text."""
    own = load_tokenizer("demo:source")
    other = changed({"normalizer": {"type": "Replace", "pattern": {"String": "zebra"}, "content": "horse"}}, {}, {})
    check_tokenizers(own, other)
    for name, words in (("a", ["a cat"] * 40), ("b", ["a cat", "a zebra ran"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    texts = mix([f"{tmp_path}/a.jsonl=3", f"{tmp_path}/b.jsonl=1"], TextOptions())
    assert len(list(beginnings(texts, 8, 5))) == 8
    check_encodings(own, other, beginnings(texts, 4, 5))  # which reads one document of the second text
    with pytest.raises(MismatchError, match=r"from token \d+ on '.*zebra.*' in the source and '.*horse.*' in the target"):
        check_encodings(own, other, beginnings(texts, 8, 5))
    arguments = {"text": texts, "options": CaptureOptions(seq_len=2, num_sequences=8), "progress": False}
    with pytest.raises(MismatchError, match="horse"):
        capture("demo:source", str(tmp_path / "changed"), tmp_path / "s.zarr", **arguments)
    assert not (tmp_path / "s.zarr").exists()
