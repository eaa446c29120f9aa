"""The demo pair is worth transferring, and the default map transfers it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvfit.cli.demo import Demo, run_demo
from kvfit.demo import FOLDER, MODELS
from kvfit.errors import MismatchError


def test_the_pair_is_worth_transferring(demo: dict[str, Any]) -> None:
    nll = demo["nll"]
    assert nll["no_context"] - nll["native"] >= 0.25
    assert nll["source"] - nll["native"] >= 0.1


def test_the_default_map_recovers_half_of_the_gap_and_controls_less_than_nothing(demo: dict[str, Any]) -> None:
    shares = demo["shares_of_gap"]
    assert demo["share_of_gap"] == shares["transfer"] >= 0.5
    assert shares["handoff"] >= 0.5
    assert shares["mean"] < 0
    assert shares["shuffled"] < 0
    assert demo["interval"][0] > 0


def test_recall_is_what_the_models_can_do(demo: dict[str, Any]) -> None:
    recall = demo["recall"]
    assert recall["native"] >= 0.5
    assert recall["source"] >= 0.5
    # Two random digits: another document's cache answers one question in a hundred by chance.
    assert recall["shuffled"] <= 0.1


def test_more_layers_explain_more_than_the_best_single_one(demo: dict[str, Any]) -> None:
    for kind in ("keys", "values"):
        r2 = demo["r2"][kind]
        assert r2["chosen"]["holdout"] > r2["single"]["holdout"] > 0
        assert r2["chosen"]["fit"] >= r2["chosen"]["holdout"]


def test_the_report_is_one_json_object_with_the_promised_fields(demo: dict[str, Any]) -> None:
    report = json.loads(json.dumps(demo, allow_nan=False))
    assert {"native", "transfer", "source", "no_context", "mean", "shuffled"} <= set(report["nll"])
    assert {"native", "transfer", "source", "shuffled"} <= set(report["recall"])
    for row in report["ways"]:
        assert {"way", "nll", "share_of_gap", "recall", "greedy_match", "milliseconds", "speed", "share_of_work"} <= set(row)
        assert row["greedy_match"] is not None
    assert {"kl", "share_of_gap", "bytes", "store", "bundle"} <= set(report)
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")


def test_every_row_of_the_table_is_about_one_way(demo: dict[str, Any]) -> None:
    """The handoff's line has the handoff's recall and the handoff's time, and where moving does not pay is said."""
    table = str(Demo(demo))
    for row in demo["ways"]:
        if row["milliseconds"] is not None:
            (line,) = [
                line for line in table.split("\n") if f"{row['nll']:.3f} " in line and f" {row['milliseconds']:.1f} " in line
            ]
            assert f"{row['recall']:.0%}" in line
    for name, begins in demo["milliseconds"]["breaks_even"].items():
        if name != "reused_transfer":
            where = "does not pay at any length that was timed" if begins is None else f"pays from {begins} tokens on"
            assert f"{name}: {where}" in table


def test_the_table_can_be_read(demo: dict[str, Any]) -> None:
    table = str(Demo(demo))
    for words in (
        "best single source layer",
        "native prefill",
        "source alone",
        "control: another document",
        "load_mapper(",
        demo["store"],
    ):
        assert words in table
    assert max(map(len, table.split("\n")[:24])) <= 120


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(MismatchError, match="found something there already"):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_models_are_small_bf16_and_load_plainly() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = [path for folder in MODELS.values() for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    vocabularies = []
    for folder in MODELS.values():
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen3"
        vocabularies.append(AutoTokenizer.from_pretrained(folder).get_vocab())
    assert vocabularies[0] == vocabularies[1]
    assert (FOLDER / "ORIGIN.md").is_file()


def test_no_text_is_in_both_files() -> None:
    works = [
        {json.loads(line)["work"] for line in (FOLDER / name).open(encoding="utf-8")}
        for name in ("text.jsonl", "heldout.jsonl")
    ]
    assert works[0]
    assert works[1]
    assert not works[0] & works[1]
