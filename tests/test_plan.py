"""Plans against real runs: the store's and the bundle's files, byte for byte."""

from pathlib import Path

import pytest

from kvfit.bundle import Bundle
from kvfit.errors import RefError
from kvfit.fit.capture import Options, capture
from kvfit.fit.plan import plan
from kvfit.fit.solve import Options as SolveOptions
from kvfit.fit.solve import solve
from kvfit.fit.store import Store
from kvfit.fit.text import TextOptions

SMALL = {"num_sequences": 12, "seq_len": 48, "token_stride": 3, "skip_tokens": 1}


def test_sizes_equal_a_real_run(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    refs = str(tiny_pair[0]), str(tiny_pair[1])
    planned = plan(*refs, top_k=2, **SMALL)
    options = Options(holdout=0.3, **SMALL)
    captured = capture(*refs, tmp_path / "pair.zarr", text=TextOptions("demo:text"), options=options, progress=False)
    assert planned.tokens == captured.tokens == Store.open(captured.store).count("all")
    chunks = sum(path.stat().st_size for path in captured.store.rglob("c.*"))
    assert planned.store_bytes == chunks
    bundle = Bundle.open(solve(captured.store, tmp_path / "bundle", options=SolveOptions(top_k=2), progress=False).bundle)
    weights = sum(tensor.nbytes for layer in bundle.spec.layers for tensor in bundle.layer(layer.kind, layer.layer_index))
    assert planned.bundle_bytes == weights


def test_parameters_are_counted_from_the_configuration(tiny_pair: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    planned = plan(str(tiny_pair[0]), str(tiny_pair[1]), **SMALL)
    for folder, geometry in zip(tiny_pair, (planned.source, planned.target), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert geometry.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert (geometry.n_heads, geometry.head_dim) == (2, 16)


def test_a_published_pair_by_name() -> None:
    """The bundle of the paper's 14B to 32B pair with 8 layers: 1.07 billion parameters (table 12), biases apart."""
    planned = plan("qwen3-14b", "qwen3-32b", top_k=8)
    assert planned.bundle_bytes / 4 == pytest.approx(1.07e9, rel=0.01)
    assert plan("qwen3-14b", "qwen3-32b", top_k=8, support="head").bundle_bytes < planned.bundle_bytes / 7.9
    assert planned.tokens == 128_000
    assert "40 layers x 8 KV heads x 128" in str(planned)


def test_what_cannot_be_planned_is_named() -> None:
    with pytest.raises(RefError, match="found no such folder"):
        plan("nothing", "qwen3-32b")
