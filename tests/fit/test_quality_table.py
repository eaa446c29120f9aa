"""The script that makes docs/quality.md: its steps are ones that solve takes, and its page shows what was measured."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvfit.fit.solve.options import Options

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quality_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality_table"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def given(work: Path, **changes: Any) -> argparse.Namespace:
    values = {
        "source": "demo:source", "target": "demo:target", "text": "demo:text", "heldout": "demo:heldout", "work": str(work),
        "sequences": 30, "seq_len": 64, "token_stride": 1, "prefix": 48, "continuation": 16, "documents": 4, "questions": 2,
        "batch": 4, "refine_sequences": 8, "refine_steps": 2, "facts_share": 0.25, "holdout": 0.1,
        "seconds": 0.0, "dtype": "auto", "pair": None, "lags": [0, 1, 2],
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def row(**changes: Any) -> dict[str, Any]:
    found = {
        "nll": 2.0, "share": 0.5, "interval": [0.25, 0.75], "kl": 0.125, "recall": {"names": [0.75, -0.5]}, "work": 0.03,
        "milliseconds": None,
    }  # fmt: skip
    return {**found, **changes}


def test_every_step_is_one_that_solve_takes(script: ModuleType) -> None:
    names = [step.name for step in script.STEPS]
    assert len({script.slug(name) for name in names}) == len(names)
    for number, step in enumerate(script.STEPS):
        assert step.calibration in ("text", "mix")
        assert step.start is None or step.start in names[:number]
        Options(**step.solve)


def test_the_page_has_a_row_a_step_and_the_ways_to_compare_with(script: ModuleType, tmp_path: Path) -> None:
    mapped = row(r2=[0.75, 0.5], nbytes=3_000_000, milliseconds=12.4)
    models = {"native": row(work=1.0, milliseconds=40.0), "no_context": row(recall={}, work=None)}
    text = script.page(script.Study(given(tmp_path, seconds=1.0)), [("a map", mapped)], models)
    quality, recall = text.split("## Recall")
    rows = [line for line in quality.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| a map | 0.750 / 0.500 | 2.000 | 50% (25% to 75%) | 0.125 | 3 | 3.0% | 12 |",
        "| target, its own cache (full prefill) |  | 2.000 | 50% (25% to 75%) | 0.125 |  | 100.0% | 40 |",
        "| target without the context |  | 2.000 | 50% (25% to 75%) | 0.125 |  |  |  |",
    ]
    assert len({line.count(" |") for line in rows}) == 1
    assert [line for line in recall.splitlines() if line.startswith("| ")] == [
        "| map | names |", "| a map | 75% (-0.50) |", "| target, its own cache (full prefill) | 75% (-0.50) |",
    ]  # fmt: skip
    assert " 12 |" not in script.page(script.Study(given(tmp_path)), [("a map", mapped)], models)


def test_rows_say_how_much_was_recomputed(script: ModuleType) -> None:
    step = script.Step("a map")
    assert [script.row_name(step, share) for share in (0.0, 0.1, "auto")] == [
        "a map", "a map; 10% recomputed", "a map; recompute auto",
    ]  # fmt: skip


@pytest.mark.parametrize(("sequences", "share", "count"), [(30, 0.25, 10), (90, 0.1, 10), (4, 0.01, 2)])
def test_facts_are_the_share_that_was_asked_for(
    script: ModuleType, tmp_path: Path, sequences: int, share: float, count: int
) -> None:
    assert script.Study(given(tmp_path, sequences=sequences, facts_share=share)).n_facts == count


def test_what_is_there_is_not_made_again(script: ModuleType, tmp_path: Path) -> None:
    study = script.Study(given(tmp_path))
    calls: list[Path] = []

    def make(path: Path) -> None:
        calls.append(path)
        path.mkdir()

    assert study.made(tmp_path / "once", make) == study.made(tmp_path / "once", make) == tmp_path / "once"
    assert len(calls) == 1
    assert (tmp_path / "facts.jsonl").read_text(encoding="utf-8").count("\n") == study.n_facts + 8
