"""What `inspect_model` reports."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from zoo import FAMILIES, REFUSED, build, build_refused

from kvfit.cli import main as cli
from kvfit.fit.capture import inspect as inspecting
from kvfit.fit.capture.inspect import inspect_model
from kvfit.fit.capture.models import load_tokenizer

BY_NAME = {family.name: family for family in FAMILIES}


def test_a_supported_model() -> None:
    report = inspect_model(build(BY_NAME["olmo3"], torch.bfloat16), ref="org/olmo")
    assert report.supported
    found = json.loads(json.dumps(report.to_json()))
    assert (found["ref"], found["family"], found["reason"], found["dtype"]) == ("org/olmo", "olmo3", None, "bfloat16")
    assert (found["n_layers"], found["n_heads"], found["head_dim"], found["n_query_heads"]) == (3, 2, 16, 4)
    assert [(layer["window"], layer["table"]) for layer in found["layers"]] == [(24, 0), (None, 1), (24, 0)]
    assert [table["attention_scaling"] for table in found["tables"]] == [1.0, 1.138629436111989]
    assert [len(table["inverse_frequencies"]) for table in found["tables"]] == [8, 8]


def test_the_table_says_what_matters() -> None:
    lines = dict(line.split(None, 1) for line in inspect_model(build(BY_NAME["glm"])).table().splitlines())
    assert lines["verdict"] == "supported"
    text = inspect_model(build(BY_NAME["cohere2"])).table()
    assert "rotation    table 0 x2, no rotation" in text
    assert "windows     24 tokens x2, full" in text
    assert "interleaved pairs" in text
    assert "first 4 features, half-split pairs" in inspect_model(build(BY_NAME["stablelm"])).table()
    assert "attention scaling 1.277" in inspect_model(build(BY_NAME["llama-yarn-1.277"])).table()


def test_patterns_are_folded() -> None:
    model = build(BY_NAME["gemma2"], num_hidden_layers=6, layer_types=None)
    assert "windows     (24 tokens, full) x3" in inspect_model(model).table()


def test_a_model_that_cannot_be_mapped_is_a_result() -> None:
    refused = next(refused for refused in REFUSED if refused.name == "deepseek-v3")
    report = inspect_model(build_refused(refused), ref="org/deepseek")
    assert not report.supported
    assert report.to_json()["layers"] == []
    assert "latent attention" in str(report.reason)
    assert report.table().splitlines()[-1].startswith("verdict     not supported: deepseek_v3, all layers: latent attention")


def test_the_built_in_pair_by_ref() -> None:
    report = inspect_model("demo:source")
    assert report.supported
    assert report.ref == "demo:source"
    assert report.family == "qwen3"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `kvfit inspect` prints; it must end with the given code."""

    def run(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["kvfit", "inspect", *words])
        try:
            cli.main()
            ended = 0
        except SystemExit as stop:
            ended = int(stop.code or 0)
        assert ended == code
        return capsys.readouterr().out

    return run


def test_the_command_prints_the_table(command: Callable[..., str]) -> None:
    words = {line[:11].strip(): line[12:] for line in command("demo:source").splitlines()}
    assert words["model"] == "demo:source"
    assert words["family"] == "qwen3"
    assert words["verdict"] == "supported"
    assert {"KV layers", "KV heads", "dtype", "windows", "rotation", "table 0"} <= set(words)
    assert "half-split pairs" in words["table 0"]


def test_the_command_prints_json(command: Callable[..., str]) -> None:
    found = json.loads(command("demo:source", "--json"))
    assert (found["supported"], found["reason"], found["family"]) == (True, None, "qwen3")
    assert {layer["table"] for layer in found["layers"]} == {0}
    assert len(found["layers"]) == found["n_layers"]
    assert found["tables"][0]["pairing"] == "half"
    assert len(found["tables"][0]["inverse_frequencies"]) == found["head_dim"] // 2


def test_the_command_says_which_value_differs_by_layer(command: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded model whose configuration raises where it is asked for one number of heads."""
    model = build(BY_NAME["llama"])
    model.config.per_layer_config = {1: {"num_attention_heads": 8}}
    if getattr(type(model.config), "per_layer_config", None) is None:
        pytest.skip("in this transformers a value has one name for all layers")
    monkeypatch.setattr(inspecting, "load", lambda *_, **__: model)
    last = command("org/llama", code=3).splitlines()[-1]
    assert last.startswith("verdict     not supported: llama, all layers: found no single num_attention_heads")


def test_the_command_says_why_not(command: Callable[..., str], tmp_path: Path) -> None:
    """A model that cannot be mapped is an answer, and exit 3 for who asks in a script."""
    model = build(BY_NAME["llama"], vocab_size=2048, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model.save_pretrained(tmp_path / "dynamic")
    load_tokenizer("demo:source").save_pretrained(tmp_path / "dynamic")
    reason = "llama, all layers: dynamic rotary frequencies depend on the longest position of each call"
    assert reason in command(str(tmp_path / "dynamic"), code=3).splitlines()[-1]
    found = json.loads(command(str(tmp_path / "dynamic"), "--json", code=3))
    assert found["supported"] is False
    assert found["reason"].startswith(reason)
    assert found["layers"] == found["tables"] == []
