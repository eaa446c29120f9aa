"""What tests share: no network, and tiny models made on the spot."""

import os

# Before torch is imported anywhere, because the thread pools read these once. One thread a process: the processes that pytest
# starts already fill the cores, and threads that wait for each other on a busy machine made the suite several times slower.
# The tests' own subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before transformers, datasets or huggingface_hub are imported anywhere.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from kvfit.demo import MODELS


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two random Qwen3 models with the demo tokenizer: 3 layers x 64 and 4 layers x 96, both 2 KV heads x 16."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo:source"])
    folders = []
    for name, hidden, layers in (("tiny-source", 64, 3), ("tiny-target", 96, 4)):
        torch.manual_seed(layers)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("models") / name
        Qwen3ForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def load() -> Callable[[Path | str], Any]:
    """A model of a folder or ref, in float32, loaded once."""
    from kvfit.fit.capture import models

    kept: dict[str, Any] = {}

    def loaded(ref: Path | str) -> Any:
        if str(ref) not in kept:
            kept[str(ref)] = models.load(str(ref), options=models.Options(dtype="float32", device="cpu"))
        return kept[str(ref)]

    return loaded


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one `kvfit demo`, with the paths of its store and bundle. Tests must not change the two.

    It takes about a minute, so the processes of pytest share one run: the first makes it, the others wait and read it.
    """
    from kvfit.cli import demo as command

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    report = base / "demo-report.json"
    with FileLock(base / "demo.lock"):
        if not report.exists():
            # Half of the text and fewer documents are enough here.
            command.CAPTURE = replace(command.CAPTURE, num_sequences=150)
            command.EVALUATION = replace(command.EVALUATION, documents=24, seconds=2.0)
            made = command.run_demo(base / "demo-out", progress=False).report
            report.write_text(json.dumps(made), encoding="utf-8")
    loaded: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return loaded
