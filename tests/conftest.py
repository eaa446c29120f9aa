"""What tests share: no network, and tiny models made on the spot."""

import os

# Before torch is imported anywhere, because it reads this once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before transformers, datasets or huggingface_hub are imported anywhere.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    """The report of one `kvfit demo`, with the paths of its store and bundle; about a minute on two cores, run once."""
    from kvfit.cli.demo import run_demo

    return run_demo(tmp_path_factory.mktemp("demo") / "out", progress=False).report
