"""Mappers side by side: the numbers are those of `evaluate`, and what they share is run once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import FLOAT32, fit_tiny

from kvfit.bundle.bundle import Bundle
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate.compare import Comparison, Row
from kvfit.fit.evaluate.evaluate import Options, evaluate
from kvfit.runtime.mapper import Mapper

SMALL = Options(
    prefix=40, continuation=20, documents=5, probes=4, batch_size=2, seconds=0.0, resamples=200, greedy=0,
    probe_kinds=("names",), diagnose=0, transcripts=0, exact_head=1, recompute=0.25,
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_tiny(tiny_pair, tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def compared(bundle: Path, tiny_pair: tuple[Path, Path]) -> Comparison:
    source, target = map(str, tiny_pair)
    text = TextOptions("demo:heldout")
    return Comparison(Bundle.open(bundle), text, SMALL, source=source, target=target, loading=FLOAT32)


def same(row: Row, reported: dict[str, Any], recalled: dict[str, Any]) -> None:
    assert row.nll == pytest.approx(reported["nll"], rel=1e-5)
    assert row.kl == pytest.approx(reported["kl"], rel=1e-3, abs=1e-6)
    assert row.share == pytest.approx(reported["share_of_gap"], rel=1e-3, abs=1e-5)
    assert row.interval == pytest.approx(reported["interval"], rel=1e-2, abs=1e-4)
    for kind, (exact, log_probability) in row.recall.items():
        found = recalled[kind]["arms"][reported["way"]]
        assert exact == found["recall"]
        assert log_probability == pytest.approx(found["log_probability"], rel=1e-4)


def test_rows_are_those_of_evaluate(bundle: Path, compared: Comparison, tiny_pair: tuple[Path, Path]) -> None:
    source, target = map(str, tiny_pair)
    # Every kind judges, so that every arm is asked.
    options = replace(SMALL, thresholds=replace(SMALL.thresholds, recall_native=0.0))
    report = evaluate(bundle, source=source, target=target, options=options, loading=FLOAT32, progress=False).report
    ways = {way["way"]: way for way in report["ways"]}
    mapper = compared.mapper(Bundle.open(bundle))
    for arm in ("native", "source"):
        assert compared.without_map[arm].recall.keys() == {"names"}
        same(compared.without_map[arm], ways[arm], report["recall"])
    assert compared.without_map["no_context"].nll == pytest.approx(ways["no_context"]["nll"], rel=1e-5)
    same(compared.row(mapper, 0.25), ways["handoff"], report["recall"])
    same(compared.row(mapper, "auto"), ways["auto"], report["recall"])
    same(compared.row(mapper, arm="mean"), ways["mean"], report["recall"])
    assert compared.row(mapper, 0.25).work == pytest.approx(ways["handoff"]["share_of_work"])
    # Both run the same passes but for the number of tokens, so their work differs by what was run.
    more_work, more_run = (ways["auto"][name] - ways["handoff"][name] for name in ("share_of_work", "recomputed"))
    assert more_work == pytest.approx(more_run)
    assert ways["handoff"]["recomputed"] == pytest.approx(10 / 39)  # a quarter, rounded up
    assert compared.row(mapper, 0.0).work == pytest.approx(ways["transfer"]["share_of_work"], rel=0.2)


def test_the_second_mapper_runs_neither_prefill(bundle: Path, compared: Comparison) -> None:
    mapper = compared.mapper(Bundle.open(bundle))
    compared.row(mapper)
    lengths: list[int] = []

    def seen(_module: Any, _args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    models = (compared.pair.source.base_model, compared.pair.target.base_model)
    hooks = [model.register_forward_pre_hook(seen, with_kwargs=True) for model in models]
    try:
        weights = {
            (part.kind, part.layer_index): Bundle.open(bundle).layer(part.kind, part.layer_index) for part in mapper.spec.layers
        }
        worse = Mapper(mapper.spec, {key: (torch.zeros_like(weight), bias) for key, (weight, bias) in weights.items()})
        row = compared.row(worse)
    finally:
        for hook in hooks:
            hook.remove()
    assert row.kl != pytest.approx(compared.row(mapper).kl, rel=1e-3)
    assert lengths
    assert max(lengths) < SMALL.prefixes[-1] - 1
