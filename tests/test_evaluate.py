"""Evaluation against a slow written-out one, and the verdict's reasons."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfit.bundle import Bundle
from kvfit.cache import cache_argument
from kvfit.errors import MismatchError
from kvfit.fit import models
from kvfit.fit.arms import Pair, prefix_cache, source_pairs
from kvfit.fit.capture import Options as CaptureOptions
from kvfit.fit.capture import capture
from kvfit.fit.evaluate import Options, Thresholds, evaluate, judge, share_of_gap
from kvfit.fit.recall import probes
from kvfit.fit.solve import solve
from kvfit.fit.text import TextOptions, documents
from kvfit.mapper import Mapper

Loader = Callable[[Path | str], Any]
FLOAT32 = (models.Options(dtype="float32", device="cpu"),) * 2
SMALL = Options(prefix=40, continuation=12, documents=6, probes=3, batch_size=4, repeats=2, resamples=200)


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    options = CaptureOptions(num_sequences=60, seq_len=64, token_stride=1, holdout=0.25)
    refs = str(tiny_pair[0]), str(tiny_pair[1])
    capture(*refs, folder / "pair.zarr", text=TextOptions("demo:text"), options=options, loading=FLOAT32, progress=False)
    return solve(folder / "pair.zarr", folder / "bundle", progress=False).bundle


@pytest.fixture(scope="module")
def report(bundle: Path, tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    found = evaluate(bundle, source=str(tiny_pair[0]), target=str(tiny_pair[1]), options=SMALL, loading=FLOAT32, progress=False)
    return found.report


def written_out(model: Any, cache: Any, ids: list[int], prefix: int) -> list[float]:
    """Negative log-likelihood of each continuation token, one forward pass a token, softmax by hand."""
    out = []
    for position in range(prefix - 1, len(ids) - 1):
        with torch.no_grad():
            logits = model(torch.tensor([[ids[position]]]), **{cache_argument(model): cache}).logits[0, -1].double()
        out.append(float(torch.logsumexp(logits, 0) - logits[ids[position + 1]]))
    return out


def test_numbers_equal_a_slow_written_out_evaluation(
    bundle: Path, report: dict[str, Any], tiny_pair: tuple[Path, Path], load: Loader
) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    mapper = Mapper.from_bundle(Bundle.open(bundle))
    pair = Pair(source.model, target.model, mapper)
    texts = list(documents(TextOptions("demo:heldout")))[:6]
    rows = [target.tokenizer(text)["input_ids"][:52] for text in texts]
    for arm in ("native", "transfer", "handoff", "source", "no_context"):
        losses = []
        for ids in rows:
            prefix = torch.tensor([ids[:39]])
            cache = prefix_cache(pair, arm, prefix, source_pairs(pair, prefix))
            if cache is None:
                from transformers import DynamicCache

                cache = DynamicCache(config=target.model.config)
            losses += written_out(source.model if arm == "source" else target.model, cache, ids, 40)
        assert report["arms"][arm]["nll"] == pytest.approx(sum(losses) / len(losses), abs=2e-4), arm
    full = []
    for ids in rows:
        with torch.no_grad():
            logits = target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        full += [-float(logits[t - 1, ids[t]]) for t in range(40, 52)]
    assert report["arms"]["native"]["nll"] == pytest.approx(sum(full) / len(full), abs=2e-4)


def test_native_is_its_own_measure(report: dict[str, Any]) -> None:
    native, source = report["arms"]["native"], report["arms"]["source"]
    assert native["kl"] == pytest.approx(0, abs=1e-6)
    assert native["top1"] == 1
    assert native["share_of_gap"] == pytest.approx(1)
    assert native["interval"] == pytest.approx([1, 1])
    assert source["share_of_gap"] == 0
    assert all(report["arms"][arm]["kl"] > 0.001 for arm in ("transfer", "mean", "shuffled", "source", "no_context"))


def test_the_report_is_in_the_bundle_and_bound_to_its_weights(bundle: Path, report: dict[str, Any]) -> None:
    opened = Bundle.open(bundle)
    assert opened.evaluation == json.loads(json.dumps(report))
    assert opened.evaluation["weights_digest"] == opened.weights_digest
    assert opened.verdict == report["verdict"]


def test_other_models_are_refused(bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_pair[1], other)
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.add_(0.5)
    model.save_pretrained(other)
    with pytest.raises(MismatchError, match="weight"):
        evaluate(bundle, source=str(tiny_pair[0]), target=str(other), options=SMALL, loading=FLOAT32, progress=False)


def arms(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A table that passes, with changes."""
    table = {
        "native": {"nll": 2.0, "kl": 0.0, "share_of_gap": 1.0, "interval": [1, 1], "recall": 0.9},
        "source": {"nll": 2.4, "kl": 0.3, "share_of_gap": 0.0, "interval": [0, 0], "recall": 0.8},
        "handoff": {"nll": 2.1, "kl": 0.1, "share_of_gap": 0.75, "interval": [0.6, 0.9], "recall": 0.7},
        "mean": {"nll": 2.6, "kl": 0.6, "share_of_gap": -0.5, "interval": [-1, 0], "recall": None},
        "shuffled": {"nll": 2.8, "kl": 0.8, "share_of_gap": -1.0, "interval": [-2, 0], "recall": 0.0},
    }
    return {arm: {**row, **changes.get(arm, {})} for arm, row in table.items()}


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, "pass", None),
        ({"handoff": {"share_of_gap": 0.2}}, "fail", "share of gap 0.20, needed 0.25"),
        ({"handoff": {"interval": [-0.1, 0.9]}}, "fail", "interval begins at -0.10"),
        ({"handoff": {"kl": 0.9}}, "fail", "KL to native 0.900"),
        ({"mean": {"nll": 2.12}}, "fail", "lead over the better control 0.020"),
        ({"shuffled": {"nll": 2.0}}, "fail", "lead over the better control -0.100"),
        ({"handoff": {"recall": 0.1}}, "fail", "recall 0.10, needed 0.50 of the native 0.90"),
        ({"native": {"recall": 0.2}, "handoff": {"recall": 0.1}}, "pass", "recall is unknown"),
        ({"source": {"recall": None}}, "pass", "recall is unknown"),
        ({"source": {"nll": 1.9}}, "fail", "nothing to gain by moving"),
    ],
)
def test_each_fault_fails_for_its_own_reason(changes: dict[str, Any], verdict: str, reason: str | None) -> None:
    found, reasons = judge(arms(**changes), Thresholds())
    assert found == verdict
    assert reasons == [] if reason is None else [line for line in reasons if reason in line] == reasons


def test_share_of_gap_is_one_for_native_and_zero_for_the_source() -> None:
    source, native = torch.tensor([2.0, 3.0]), torch.tensor([1.5, 2.5])
    assert share_of_gap(source, native, native) == 1
    assert share_of_gap(source, native, source) == 0
    assert share_of_gap(source, native, source + 0.5) == -1
    assert share_of_gap(source, source, native) == 0


def test_probes_hold_their_answer_once_and_only_in_the_list() -> None:
    tokenizer = models.load_tokenizer("demo:source")
    fillers = [text for text in documents(TextOptions("demo:heldout")) if "[Codes" not in text]
    asked = probes(tokenizer, fillers, count=20, context_tokens=150, n_entries=6, seed=4)
    assert len({probe.context_ids for probe in asked}) == 20
    for probe in asked:
        context = tokenizer.decode(probe.context_ids)
        name = tokenizer.decode(probe.question_ids).split()[-1]
        code = tokenizer.decode(probe.answer_ids).strip()
        assert len(probe.context_ids) == 150
        assert f"{name} {code}" in context
        assert len(code) == 2
    assert probes(tokenizer, fillers, count=20, context_tokens=150, n_entries=6, seed=4) == asked
    assert probes(tokenizer, fillers, count=20, context_tokens=150, n_entries=6, seed=5) != asked
