"""The examples of the documentation run on the demo pair and do what their first lines say."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def bundle():
    """A mapper made as the examples make one."""
    return runpy.run_path(str(EXAMPLES / "demo_pair.py"))["_quick_bundle"]()


@pytest.fixture
def said(bundle, monkeypatch, capsys):
    """What an example prints."""

    def run(name):
        monkeypatch.setattr(sys, "argv", [name, str(bundle)])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        sys.modules.pop("demo_pair", None)
        with pytest.warns(UserWarning, match="was not evaluated"):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert "fallback_prefill" not in printed
        return printed.splitlines()

    return run


def test_cascade(said):
    *answers, last = said("cascade")
    escalated = sum("target (applied)" in line for line in answers)
    assert len(answers) == 4
    assert all((float(line[:4]) < 0.25) == ("target" in line) for line in answers)
    assert last == f"escalated {escalated} of 4"


def test_switch(said):
    lines = said("switch")
    assert [line.split(":")[0] for line in lines] == ["source", "moved", "target", "moved", "target"]
    # 240 + 16 + 60 tokens, of which the last is left to the target; then its own 16 are kept and the new 60 mapped.
    assert lines[1].split(":")[1].split() == "299 tokens mapped, 16 run by the target".split()
    assert lines[3].split(":")[1].split() == "331 tokens kept, 60 tokens mapped".split()


def test_router(said):
    lines = said("router")
    assert len(lines) == 4
    for line in lines:
        assert (float(line.split()[0]) < 4.0) == (" source " in line)


def test_batch_escalation(said):
    lines = said("batch_escalation")
    sure = [float(line[:4]) for line in lines]
    moved = ["target (applied)" in line for line in lines]
    assert (len(lines), sum(moved)) == (4, 2)
    assert max(s for s, m in zip(sure, moved, strict=True) if m) <= min(s for s, m in zip(sure, moved, strict=True) if not m)


def test_every_example_is_run():
    tested = set(re.findall(r'said\("(\w+)"\)', Path(__file__).read_text()))
    # Those of vLLM run in its own environment: tests/vllm/test_example.py.
    assert {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("vllm_")} - {"demo_pair"} == tested
