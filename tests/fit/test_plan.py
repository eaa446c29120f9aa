"""Plans against real runs: the store's and the bundle's files, byte for byte."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvfit.bundle.bundle import Bundle
from kvfit.errors import KvfitError, MismatchError, OptionError, RefError, UnsupportedModelError
from kvfit.fit import plan as planning
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import Options, capture
from kvfit.fit.capture.geometry import Geometry
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.hardware import EFFICIENCY, PEAKS, Rates, measure_rates, published_rates
from kvfit.fit.payoff import break_even
from kvfit.fit.plan import Plan
from kvfit.fit.solve.solve import Options as SolveOptions
from kvfit.fit.solve.solve import solve
from kvfit.fit.stats.accumulate import Accumulator
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.record import read_record
from kvfit.fit.stats.store import Store
from kvfit.spec import KINDS

SOURCE, TARGET = "demo:source", "demo:target"
FLOAT32 = models.Options(dtype="float32", device="cpu")
OF_SOLVE, OF_PLAN = ("top_k", "support", "dtype", "rank"), ("memory_budget", "batch_size", "revisions", "gpus")


def plan(source: str, target: str, rates: Rates | None = None, **asked: Any) -> Plan:
    """A plan by the names of the parts' options; separate maps of keys from keys and values from values, in float32."""
    solving = {"dtype": "float32", "rank": "none"} | {name: asked.pop(name) for name in OF_SOLVE if name in asked}
    rest = {name: asked.pop(name) for name in OF_PLAN if name in asked}
    options = planning.Options(capture=Options(**asked), solve=SolveOptions(**solving), **rest)
    return planning.plan(source, target, options, rates)


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
    # By default the weights are stored in float32 for this target, and its own weights are in float32 too.
    auto = plan(*refs, top_k=2, dtype="auto", **SMALL)
    assert (auto.bundle_bytes, auto.model_bytes) == (weights, 4 * sum(one.parameters for one in (auto.source, auto.target)))


def test_arithmetic_and_commits_equal_a_real_run_of_the_demo_pair(tmp_path: Path) -> None:
    """Torch's own counter of floating-point operations is the oracle; a small budget makes several commits."""
    options = Options(num_sequences=200, seq_len=64, token_stride=2, holdout=0.0, lexical=(0, 2))
    budget = 22 << 20
    planned = plan(
        SOURCE, TARGET, num_sequences=200, seq_len=64, token_stride=2, memory_budget=budget, batch_size=4, lexical=(0, 2)
    )
    captured = capture(
        SOURCE, TARGET, tmp_path / "pair.zarr", text=TextOptions("demo:text"), options=options,
        loading=(FLOAT32, FLOAT32), batch_size=4, memory_budget=budget, progress=False,
    )  # fmt: skip
    found = Store.open(captured.store)
    assert planned.commits >= 4
    assert read_record(captured.store).commit == planned.commits
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        for ref in (SOURCE, TARGET):
            models.load(ref, options=FLOAT32).model(torch.ones(4, 64, dtype=torch.long))
    # What the counter does not see are attention's scores, which are no parameters and little at 64 tokens.
    assert planned.forward_flops == pytest.approx(50 * forward.get_total_flops(), rel=0.02)  # 200 sequences, 4 at a time
    rows = [
        {kind: [torch.randn(captured.tokens, model.width)] * model.n_layers for kind in KINDS}
        for model in (found.source, found.target)
    ]
    rows[0]["lexical"] = [torch.randn(captured.tokens, 2 * found.target.width)] * 2
    layout = Layout(found.source, found.target, "both", lexical_lags=(0, 2))
    with (
        Accumulator.create(tmp_path / "again", layout, recipe={}) as again,
        FlopCounterMode(display=False) as statistics,
    ):
        again.add("fit", *rows, None)
        again.finish(None)
    assert planned.statistics_flops == statistics.get_total_flops()


def test_a_budget_that_capture_would_refuse_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"--memory-budget: found 1048576 bytes, needed at least \d+KiB"):
        plan("qwen3-8b", "qwen3-14b", memory_budget=1 << 20)


def test_times_are_the_arithmetic_at_the_rates_of_a_machine() -> None:
    rates = Rates("cpu", forward=2e12, float32=1e12, float64=5e11, bandwidth=1e11)
    options = {"inputs": "same", "lexical": ()}
    planned = plan("qwen3-14b", "qwen3-32b", rates=rates, **options)
    assert plan("qwen3-14b", "qwen3-32b").seconds is None
    assert planned.seconds == {
        "forward": planned.forward_flops / 2e12,
        "statistics": planned.statistics_flops / 0.8e12,
        "solve": planned.solve_flops / 3e11,
        "evaluate": planned.evaluate_flops / 2e12,
    }
    four = plan("qwen3-14b", "qwen3-32b", rates=rates, gpus=4, **options).seconds
    assert {name: planned.seconds[name] / four[name] for name in four} == pytest.approx(
        {"forward": 4, "statistics": 4, "solve": 1, "evaluate": 4}
    )
    assert planned.to_json()["seconds"] == planned.seconds
    assert "4.71e+04 TFLOP, at least 6.5 h" in str(planned)
    assert "63, 7.09 TB read and written; a larger --memory-budget makes them fewer" in str(planned)
    assert "fewer" not in str(plan("qwen3-14b", "qwen3-32b", memory_budget=32 << 30, **options))


def test_rates_are_of_this_machine() -> None:
    rates = measure_rates("cpu", seconds=0.01)
    assert rates.device == "cpu"
    assert min(rates.forward, rates.float32, rates.float64, rates.bandwidth) > 1e8
    assert not rates.published


def test_published_rates_are_a_stated_share_of_the_peak() -> None:
    planned = plan("qwen3-14b", "qwen3-32b", rates=published_rates("h100"))
    assert published_rates("h100").forward == EFFICIENCY * 989e12
    assert "on H100, 50% of the published peaks" in str(planned)
    for name in PEAKS:
        rates = published_rates(name)
        assert rates.forward > rates.float32 >= rates.float64
    with pytest.raises(OptionError, match="--hardware: found tpu, needed this or one of h100"):
        published_rates("tpu")


def test_maps_of_the_papers_pair_cost_what_their_shapes_say() -> None:
    free = {"rank": "auto", "dtype": "auto", "rates": published_rates("h100")}
    maps = {option.name: option for option in plan("qwen3-14b", "qwen3-32b", **free).maps}
    inputs, outputs = 2 * 40 * 1024 + 3 * 2048, 2 * 63 * 1024
    full, basis = maps["all 40 layers, float32"], maps["shared basis, rank 4096"]
    assert full.parameters == inputs * outputs
    assert basis.parameters == 4096 * (inputs + outputs)
    assert (full.nbytes, basis.nbytes) == (4 * full.parameters, 2 * basis.parameters)
    # A map of all layers in float32 costs more than the prefill takes; a basis of all layers costs less than 8 layers each.
    assert full.break_even is None
    assert full.milliseconds[0] > full.milliseconds[1]
    assert basis.cost.share < 0.05 < maps["8 layers each"].cost.share
    assert basis.cost.share == pytest.approx(max(basis.cost.flops_per_token / 64e9, basis.nbytes / 64e9))
    assert basis.break_even < 1000
    assert all(option.break_even is None for option in plan("qwen3-14b", "qwen3-32b").maps)  # no machine, no length


def test_maps_are_those_that_were_asked_for() -> None:
    """Each number is written out for 40 layers of 1,024 to 64, and lags of 2,048."""

    def weights(**asked: Any) -> dict[str, int]:
        free = {"rank": "auto", "dtype": "auto", "lexical": (0, 1)} | asked
        return {option.name: option.parameters for option in plan("qwen3-14b", "qwen3-32b", **free).maps}

    of_layer, lags, outputs = 2 * 1024, 2 * 2048, 2 * 63 * 1024
    three = (3 * of_layer + lags) * outputs
    assert weights(top_k=3) == {"3 layers each, float32": three, "3 layers each": three}
    same = weights(inputs="same")
    assert same["all 40 layers"] == (40 * 1024 + lags) * outputs
    assert same["8 layers each"] == (8 * 1024 + lags) * outputs
    assert not any("basis" in name for name in same)  # which needs keys and values
    # One head of 128 in place of 8, no lexical inputs, and so a map of layer 0 as well.
    assert weights(support="head", top_k=3, inputs="same")["3 layers each"] == 3 * 128 * 2 * 64 * 1024
    assert weights(rank="none", dtype="float16") == {
        "all 40 layers, float16": (40 * of_layer + lags) * outputs,
        "8 layers each, float16": (8 * of_layer + lags) * outputs,
    }
    assert weights(rank=512, top_k=3) == {"shared basis, rank 512": 512 * (3 * of_layer + lags + outputs)}
    with pytest.raises(OptionError, match="--rank 512: found --inputs same"):
        weights(rank=512, inputs="same")


def test_memory_for_a_basis_is_needed_where_solve_makes_one() -> None:
    needed = {rank: plan("qwen3-8b", "qwen3-14b", top_k=8, rank=rank).solve_bytes for rank in ("none", "auto", 64)}
    assert needed["none"] == needed["auto"] < needed[64]


def test_a_handoff_pays_from_where_it_is_faster() -> None:
    def prefill(tokens: int) -> float:
        return max(5.0, 0.1 * tokens)

    for rate in (0.01, 0.05, 0.09):
        found = break_even(lambda tokens, rate=rate: rate * tokens, prefill)
        assert found is not None
        assert rate * found + 5 < prefill(found)
        assert not rate * (found - 1) + 5 < prefill(found - 1)
    assert break_even(lambda tokens: 0.1 * tokens, prefill) is None


def test_parameters_are_counted_from_the_configuration(tiny_pair: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    planned = plan(str(tiny_pair[0]), str(tiny_pair[1]), **SMALL)
    for folder, geometry in zip(tiny_pair, (planned.source, planned.target), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert geometry.parameters == sum(parameter.numel() for parameter in model.parameters())
        layers = sum(p.numel() for layer in model.model.layers for p in layer.parameters() if p.dim() == 2)
        assert geometry.decoder_parameters == layers
        assert (geometry.hidden_size, geometry.n_query_heads) == (model.config.hidden_size, model.config.num_attention_heads)
        assert (geometry.n_heads, geometry.head_dim) == (2, 16)
    # Weights of so small a pair are told in megabytes, those of a large one in gigabytes.
    assert f"| all 3 layers, float32 | {planned.maps[0].nbytes / 1e6:.3g} MB |" in str(planned)
    assert "| 45.4 GB |" in str(plan("qwen3-14b", "qwen3-32b"))


def test_a_published_pair_by_name() -> None:
    """The bundle of the paper's 14B to 32B pair with 8 layers: 1.07 billion parameters (table 12), biases apart."""
    planned = plan("qwen3-14b", "qwen3-32b", top_k=8, inputs="same", lexical=())
    assert planned.bundle_bytes / 4 == pytest.approx(1.07e9, rel=0.01)
    assert (
        plan("qwen3-14b", "qwen3-32b", top_k=8, inputs="same", lexical=(), support="head").bundle_bytes
        < planned.bundle_bytes / 7.9
    )
    assert planned.tokens == 128_000
    assert "40 layers x 8 KV heads x 128" in str(planned)


def test_what_cannot_be_planned_is_named() -> None:
    with pytest.raises(RefError, match="found no such folder"):
        plan("nothing", "qwen3-32b")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(num_layers=2, d_model=32, d_kv=8, num_heads=4).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match="t5: found no causal language model for this configuration"):
        plan(str(tmp_path / "t5"), "qwen3-32b")


def test_a_configuration_whose_values_differ_by_layer_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """No code of this family makes such layers."""
    from transformers import PreTrainedConfig

    other = Path(shutil.copytree(tiny_pair[1], tmp_path / "other"))
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    for name in ("intermediate_size", "num_attention_heads"):
        changed = {**config, "per_layer_config": {"1": {name: 2 * config[name]}}}
        (other / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        if not hasattr(PreTrainedConfig, "per_layer_config"):
            pytest.skip("in this transformers a value has one name for all layers")
        with pytest.raises(KvfitError, match=name):
            plan(str(tiny_pair[0]), str(other))


def test_a_pair_that_tokenizes_differently_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_pair[1], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(MismatchError, match="tokenizers: found 2 tokens with different ids"):
        plan(str(tiny_pair[0]), str(other))
    for path in other.glob("token*"):  # a configuration alone is enough for sizes
        path.unlink()
    assert plan(str(tiny_pair[0]), str(other)).target.n_layers == 4


@pytest.mark.parametrize(
    ("parameters", "text"),
    [(336, "336 parameters"), (336_320, "336 k p"), (2.5e6, "2.5 M p"), (8e9, "8 B p"), (1.2e12, "1.2e+03 B")],
)
def test_parameters_have_a_readable_unit(parameters: float, text: str) -> None:
    planned = replace(plan("qwen3-8b", "qwen3-32b"), source=Geometry("x", 1, 1, 1, parameters))
    assert text in str(planned)


def test_a_folder_has_no_revision(tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(RefError, match="found revision v1 beside a folder"):
        plan(str(tiny_pair[0]), str(tiny_pair[1]), revisions=("v1", None))


def test_a_built_in_model_has_no_revision() -> None:
    with pytest.raises(RefError, match="found revision v1 beside a built-in model"):
        plan("demo:source", "demo:target", revisions=("v1", None))


def test_no_name_is_no_folder() -> None:
    with pytest.raises(RefError, match="found no such folder"):
        plan("", "demo:target")
