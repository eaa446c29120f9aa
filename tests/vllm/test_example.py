"""The example of the guide runs as written: two servers and a router, a conversation that escalates, both times printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_escalates_and_prints_both_times():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "docs/examples/vllm_escalation.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *turns, last = done.stdout.splitlines()[-5:]
    for turn in turns:
        sure, who = re.match(r"(\d\.\d\d) sure -> (source|target)", turn).groups()
        assert (float(sure) < 0.25) == (who == "target"), turn
        assert who == "source" or "(applied, " in turn
    assert any("-> target" in turn for turn in turns)
    assert re.fullmatch(r"time to the target's first token: prefilled \d+ ms, moved \d+ ms", last)
