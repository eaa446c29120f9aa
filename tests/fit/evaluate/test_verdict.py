"""The verdict: every way to go wrong fails for its own reason, on tables and on bundles that are really spoiled."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import PLAIN, changed

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.errors import MismatchError
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import Options as CaptureOptions
from kvfit.fit.capture.capture import capture
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.diagnose import Diagnosis
from kvfit.fit.evaluate.evaluate import Options, evaluate
from kvfit.fit.evaluate.verdict import Reasons, Thresholds, control_lead, judge, judge_map
from kvfit.fit.solve.solve import solve
from kvfit.runtime.mapper import Mapper

# Keys from keys and values from values, so that what is spoiled in one kind shows in that kind.
SEPARATE = replace(PLAIN, inputs="same", lexical="none")
QUICK = Options(
    prefix=192, continuation=64, documents=8, probes=10, probe_kinds=("names",), greedy=0, diagnose=4, seconds=0, transcripts=0,
    resamples=500,
    thresholds=Thresholds(speed=0),
)  # fmt: skip


# -- on tables -------------------------------------------------------------------------------------------------


def table(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arms that pass, with changes."""
    rows = {
        "native": {"nll": 2.0, "kl": 0.0, "share_of_gap": 1.0, "interval": [1, 1]},
        "source": {"nll": 2.4, "kl": 0.3, "share_of_gap": 0.0, "interval": [0, 0]},
        "handoff": {"nll": 2.1, "kl": 0.1, "share_of_gap": 0.75, "interval": [0.6, 0.9]},
        "mean": {"nll": 2.6, "kl": 0.6, "share_of_gap": -0.5, "interval": [-1, 0]},
        "shuffled": {"nll": 2.8, "kl": 0.8, "share_of_gap": -1.0, "interval": [-2, 0]},
    }
    return {arm: {**row, **changes.get(arm, {})} for arm, row in rows.items()}


def recall(judges: bool = True, handoff: float = 0.8, shuffled: float = 0.0) -> dict[str, Any]:
    found = {"native": 0.9, "source": 0.8, "handoff": handoff, "shuffled": shuffled}
    return {
        "names": {
            "judges": judges,
            "reason": None if judges else "the target with its own cache answers 8%",
            "arms": {arm: {"recall": value} for arm, value in found.items()},
        }
    }


def judged(table: Any, *, documents: int = 8, recall: Any = None) -> Reasons:
    """The verdict on tables of a handoff twice as fast as a prefill."""
    row = {"speed": 2.0, "milliseconds": 10.0, "breaks_even": 64}
    return judge(table, Thresholds(), recall=recall, documents=documents, speed=(row, 383))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"handoff": {"share_of_gap": 0.2}}, "share of gap 0.20, needed 0.25"),
        ({"handoff": {"interval": [-0.1, 0.9]}}, "its interval begins at -0.10, needed 0.00"),
        ({"handoff": {"kl": 0.9}}, "KL to native 0.900 nats, needed at most 0.500"),
        ({"mean": {"nll": 2.12}}, "lead over the better control 0.020 nats, needed 0.050"),
        ({"shuffled": {"nll": 2.0}}, "lead over the better control -0.100 nats, needed 0.050"),
        ({"handoff": {"nll": 2.45, "share_of_gap": -0.1}}, "the source alone is better than the moved target (2.400 against"),
        ({"source": {"nll": 1.9}}, "there is nothing to gain by moving"),
    ],
)
def test_each_number_fails_for_its_own_reason(changes: dict[str, Any], reason: str) -> None:
    found = judged(table(**changes), recall=recall())
    assert len(found.failed) == 1
    assert reason in found.failed[0]
    assert (found.missing, found.unknown, found.verdict) == ([], [], "fail")
    both = Reasons()
    both.add(found, at="at 256 tokens: ")
    assert both.failed[0].startswith("at 256 tokens: ")
    assert both.verdict == "fail"


def test_a_good_table_passes() -> None:
    found = judged(table(), recall=recall())
    assert (found.verdict, list(found)) == ("pass", [])


def test_a_handoff_slower_than_a_prefill_fails_and_says_from_where_on_it_pays() -> None:
    slow = {"speed": 0.8, "milliseconds": 20.3, "breaks_even": 2048}
    found = judge(table(), Thresholds(), recall=recall(), documents=8, speed=(slow, 383))
    assert found.verdict == "fail"
    assert found.failed == [
        "the handoff takes 20.3 ms for 383 tokens, 0.80 x as fast as a prefill, needed 1 x: it pays from 2048 tokens on; move "
        "longer contexts, or fit a cheaper map"
    ]
    guided = judge(table(), Thresholds(), recall=recall(), documents=8, speed=(slow, 383), recompute=0.1)
    assert "; move longer contexts, recompute less, or fit a cheaper map" in guided.failed[0]
    never = judge(table(), Thresholds(), recall=recall(), documents=8, speed=(slow | {"breaks_even": None}, 383))
    assert "it pays at no length that was timed" in never.failed[0]
    # Another bar, or none, is asked for by name.
    assert judge(table(), Thresholds(speed=0.75), recall=recall(), documents=8, speed=(slow, 383)).verdict == "pass"
    assert judge(table(), Thresholds(speed=0), recall=recall(), documents=8, speed=(slow, 383)).verdict == "pass"
    assert judge(table(), Thresholds(speed=0), recall=recall(), documents=8).verdict == "pass"
    assert judge(table(), Thresholds(speed=3), recall=recall(), documents=8, speed=(slow | {"speed": 2.9}, 1)).verdict == "fail"
    # What was not timed did not pass.
    for untimed in (None, ({"speed": None}, 383)):
        found = judge(table(), Thresholds(), recall=recall(), documents=8, speed=untimed)
        assert (found.verdict, found.missing[0].split(":")[0]) == ("unknown", "speed was not measured")


@pytest.mark.parametrize(
    ("recompute", "advice"),
    [
        (0.0, "hand over with guided recompute, and evaluate so (--recompute 0.1)"),
        (0.05, "recompute more, and evaluate so (--recompute 0.1)"),
        (0.1, "recompute more, and evaluate so (--recompute 0.25)"),
        (0.3, "recompute more, and evaluate so (--recompute 0.5)"),
        (0.5, "recomputing 50% did not bring it back: fit a better map, on more text or with a larger --cost"),
    ],
)
def test_lost_recall_advises_the_next_step(recompute: float, advice: str) -> None:
    speed = {"speed": 2.0, "milliseconds": 10.0, "breaks_even": 64}, 383
    lost = recall(handoff=0.4)
    found = judge(table(), Thresholds(), recall=lost, documents=8, speed=speed, recompute=recompute)
    assert found.failed == [f"recall of names 0.40, needed 0.50 of the native 0.90: {advice}"]


def test_recall_counts_where_the_target_can() -> None:
    found = judged(table(), recall=recall(handoff=0.4))
    assert len(list(found)) == 1
    assert found.failed[0].startswith("recall of names 0.40, needed 0.50 of the native 0.90: hand over with guided recompute")
    assert found.verdict == "fail"
    found = judged(table(), recall=recall(judges=False, handoff=0.0))
    assert list(found) == ["recall is unknown: no kind of question judges (names: the target with its own cache answers 8%)"]
    assert found.verdict == "pass"
    assert "can be guessed" in judged(table(), recall=recall(shuffled=0.5)).unknown[0]


@pytest.mark.parametrize("arm", ["handoff", "native", "source", "mean"])
@pytest.mark.parametrize("field", ["nll", "kl", "share_of_gap", "interval"])
def test_no_number_is_no_pass(arm: str, field: str) -> None:
    nan = float("nan")
    found = judged(table(**{arm: {field: [nan, nan] if field == "interval" else nan}}), recall=recall(), documents=8)
    matters = field == "nll" or arm == "handoff"
    assert found.verdict == ("fail" if matters else "pass")


def test_what_was_not_measured_is_no_pass() -> None:
    unasked = judged(table())
    assert unasked.verdict == "unknown"
    assert unasked.missing[0].startswith("recall was not measured: no probes were asked")
    few = judged(table(), recall=recall(), documents=7)
    assert (few.verdict, list(few)) == ("unknown", ["only 7 documents, needed 8: give more text or --documents"])
    # What fails has failed, however little was measured.
    assert judged(table(handoff={"kl": 0.9}), documents=2).verdict == "fail"


@pytest.mark.parametrize(
    "wrong", [{"exact_head": 500}, {"exact_tail": 383}, {"recompute": 0.8}, {"exact_head": 150, "exact_tail": 150}]
)
def test_an_arm_that_maps_next_to_nothing_is_not_judged(wrong: dict[str, Any]) -> None:
    """A map of zeros would pass, by what the target runs itself."""
    with pytest.raises(MismatchError, match=r"of 383 tokens of context left to the map, needed 25%"):
        Options(**wrong)
    Options(recompute=0.7)
    with pytest.raises(
        MismatchError, match=r"--exact-head 16.* 24% of 21 tokens .*: give a longer --prefix or fewer exact tokens"
    ):
        Options(prefix=22)
    Options(prefix=23)  # 6 of 22 tokens are mapped
    Options(prefix=3, exact_head=1)


def test_further_texts_must_lead_over_their_controls() -> None:
    assert control_lead(table(), Thresholds()) == []
    assert control_lead(table(mean={"nll": 2.1}), Thresholds()) == ["lead over the better control 0.000 nats, needed 0.050"]


def diagnosis(order: list[list[float]] | None = None, **changes: Any) -> Diagnosis:
    correlations = torch.tensor(order or [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.2, 0.1, 0.7]], dtype=torch.float64)
    values: dict[str, Any] = {
        "layers": [{"layer_index": i, "attention_cosine": 0.9 - 0.1 * i} for i in range(3)],
        "order": {"keys": correlations, "values": torch.eye(3, dtype=torch.float64)},
        "explained": {"keys": 0.7, "values": 0.6},
        "explained_rotated": 0.3,
    }
    return Diagnosis(**{**values, **changes})


SOLVED = {"tokens": {"fit": 5000}, "r2": {"keys": {"chosen": {"holdout": 0.75}}, "values": {"chosen": {"holdout": 0.6}}}}


SWAPPED = diagnosis([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
UNLIKE = diagnosis([[0.05, 0.1, 0.1]] * 3)
BLIND = diagnosis(layers=[{"layer_index": 5, "attention_cosine": 0.2}, {"layer_index": 6, "attention_cosine": None}])


@pytest.mark.parametrize(
    ("found", "solved", "reason"),
    [
        (diagnosis(), {**SOLVED, "tokens": {"fit": 1400}}, "fitted on 1400 tokens for 512 inputs, needed 3 per input"),
        (SWAPPED, SOLVED, "keys: layers are in the wrong order (the map for layer 0 gives 1, 1 gives 0)"),
        (UNLIKE, SOLVED, "keys: the map's outputs resemble no layer of the target (mean correlation 0.10"),
        (diagnosis(explained_rotated=0.85), SOLVED, "it was fitted on rotated keys"),
        (diagnosis(explained={"keys": 0.4, "values": 0.6}), SOLVED, "keys: explained variance 0.40, 0.75 when it was solved"),
        (BLIND, SOLVED, "attention of layer 5 reads something else (cosine 0.20"),
        (
            diagnosis(explained={"keys": 0.7, "values": float("nan")}),
            SOLVED,
            "values: explained variance nan, 0.60 when it was",
        ),
        (diagnosis([[float("nan")] * 3] * 3), SOLVED, "keys: the map's outputs resemble no layer of the target"),
        (diagnosis(layers=[{"layer_index": 2, "attention_cosine": float("nan")}]), SOLVED, "attention of layer 2 reads"),
    ],
)
def test_each_fault_of_a_map_has_its_own_reason(found: Diagnosis, solved: dict[str, Any], reason: str) -> None:
    failed = judge_map(found, solved, 512, Thresholds())
    assert len(failed) == 1, failed
    assert reason in failed[0]


def test_a_good_map_has_no_reason_to_fail() -> None:
    assert judge_map(diagnosis(), SOLVED, 512, Thresholds()) == []
    # A layer that resembles its neighbour a little more than its own is no wrong order.
    assert judge_map(diagnosis([[0.7, 0.75, 0.1], [0.1, 0.8, 0.1], [0.2, 0.1, 0.7]]), SOLVED, 512, Thresholds()) == []
    assert judge_map(diagnosis(explained_rotated=None), {}, 512, Thresholds()) == []
    # Records are not part of the bundle's format: what they do not say is not asked of them.
    assert judge_map(diagnosis(), {"tokens": [1], "r2": {"keys": 3}}, 512, Thresholds()) == []


def test_thresholds_from_the_command_line() -> None:
    assert Thresholds.changed({"kl": "0.2", "recall": "0.9"}) == Thresholds(kl=0.2, recall=0.9)
    for wrong in ({"perplexity": "1"}, {"kl": "low"}, {"kl": "nan"}):
        with pytest.raises(MismatchError, match=r"--threshold: found .*, needed a number for one of share_of_gap"):
            Thresholds.changed(wrong)


# -- on bundles of trained pairs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target without its last layer's feed-forward: a worse model with the same keys and values, so that a linear map
    is known to exist."""
    loaded = models.load("demo:target")
    with torch.no_grad():
        loaded.model.model.layers[-1].mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("models") / "weaker"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def good(weaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    options = CaptureOptions(num_sequences=40, seq_len=256, token_stride=1, holdout=0.2)
    capture(str(weaker), "demo:target", folder / "pair.zarr", text=TextOptions("demo:text"), options=options, progress=False)
    return solve(folder / "pair.zarr", folder / "bundle", options=SEPARATE, progress=False).bundle


def evaluated(bundle: Path, source: Path | None = None) -> dict[str, Any]:
    return evaluate(bundle, source=None if source is None else str(source), options=QUICK, progress=False).report


CAUSES = {
    "random": "resemble no layer",
    "order": "wrong order",
    "rotated": "fitted on rotated keys",
    "few": "needed 3 per input",
    "source": "the source alone is better",
}


def causes(report: dict[str, Any]) -> set[str]:
    return {name for name, mark in CAUSES.items() if any(mark in reason for reason in report["reasons"])}


def test_a_good_bundle_passes_and_a_changed_byte_makes_it_unknown(good: Path, weaker: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(good, tmp_path / "bundle"))
    report = evaluated(bundle, weaker)
    assert report["verdict"] == "pass", report["reasons"]
    assert report["reasons"] == []
    assert report["arms"]["handoff"]["share_of_gap"] > 0.9
    assert report["arms"]["handoff"]["recall"] >= 0.9 * report["arms"]["native"]["recall"] >= 0.8
    assert report["arms"]["shuffled"]["recall"] <= 0.1
    assert Bundle.open(bundle).verdict == "pass"
    # The same evaluation in a bundle with one other weight.
    other = changed(good, tmp_path / "other", lambda kind, layer, w, b: (w, b + (kind == "values" and layer == 1) * 1e-3))
    add_files(other, {"evaluation.json": (bundle / "evaluation.json").read_bytes()})
    assert Bundle.open(other).verdict == "unknown"
    assert Bundle.open(other).evaluation == json.loads((bundle / "evaluation.json").read_text())


def test_random_weights_fail(good: Path, weaker: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(kind: str, layer: int, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del kind, layer
        return torch.randn(weight.shape, generator=generator) * weight.std(), bias

    report = evaluated(changed(good, tmp_path / "random", random), weaker)
    assert report["verdict"] == "fail"
    assert "random" in causes(report)
    assert causes(report) <= {"random", "source"}


def test_layers_in_another_order_fail(good: Path, weaker: Path, tmp_path: Path) -> None:
    opened = Bundle.open(good)
    count = opened.spec.target.n_layers

    def shifted(kind: Any, layer: int, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del weight, bias
        return opened.layer(kind, (layer + 1) % count)

    report = evaluated(changed(good, tmp_path / "order", shifted), weaker)
    assert report["verdict"] == "fail"
    assert "order" in causes(report)
    assert causes(report) <= {"order", "source"}


def test_keys_fitted_rotated_and_applied_unrotated_fail(tmp_path: Path) -> None:
    """The position bug that likelihood hides: whatever likelihood says, the reason names the rotation."""
    source, target = models.load("demo:source"), models.load("demo:target")
    options = CaptureOptions(num_sequences=40, seq_len=256, token_stride=1, holdout=0.2)
    store = tmp_path / "pair.zarr"
    capture("demo:source", "demo:target", store, text=TextOptions("demo:text"), options=options, progress=False)
    # A map of its own per layer, which can be replaced one by one.
    fitted_right = solve(store, tmp_path / "right", options=SEPARATE, progress=False).bundle
    mapper = Mapper.from_bundle(Bundle.open(fitted_right))
    pair = arms.Pair(source.model, target.model, mapper)
    texts = [text for text, _ in zip(documents(TextOptions("demo:text")), range(24), strict=False)]
    ids = torch.tensor([target.tokenizer(text)["input_ids"][:256] for text in texts])
    rows: list[list[torch.Tensor]] = [[], []]
    for side, pairs in enumerate((arms.source_pairs(pair, ids), arms.target_pairs(pair, ids))):
        rows[side] = [keys[:, :, 1::2].transpose(1, 2).flatten(2).flatten(0, 1).double() for keys, _ in pairs]
    fitted = {}
    for layer in mapper.spec.layers:
        if layer.kind == "keys":
            inputs = torch.cat([rows[0][i] for i in layer.source_layers], 1)
            outputs = rows[1][layer.layer_index]
            x, y = inputs - inputs.mean(0), outputs - outputs.mean(0)
            penalty = 0.01 * x.square().mean(0).mean() * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
            weight = torch.linalg.solve(x.T @ x + penalty, x.T @ y)
            fitted[layer.layer_index] = (weight.float(), (outputs.mean(0) - inputs.mean(0) @ weight).float())

    def rotated(kind: str, layer: int, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fitted[layer] if kind == "keys" else (weight, bias)

    report = evaluated(changed(fitted_right, tmp_path / "rotated", rotated))
    assert report["verdict"] == "fail"
    assert "rotated" in causes(report)
    assert causes(report) <= {"rotated", "source"}
    assert report["explained"]["keys_rotated"] > report["explained"]["keys"] + 0.2


def test_a_bundle_fitted_on_two_sequences_fails(tmp_path: Path) -> None:
    options = CaptureOptions(num_sequences=2, seq_len=512, token_stride=2, holdout=0.5)
    store = tmp_path / "two.zarr"
    capture("demo:source", "demo:target", store, text=TextOptions("demo:text"), options=options, progress=False)
    report = evaluated(solve(store, tmp_path / "two", progress=False).bundle)
    assert report["verdict"] == "fail"
    assert "few" in causes(report)
    assert causes(report) <= {"few", "source"}


def test_a_source_that_is_better_than_the_transfer_fails(good: Path, weaker: Path, tmp_path: Path) -> None:
    """A map that is right but coarse: its layers are found, its rotation is right, and yet staying is better."""
    for noise in (0.7, 1.0, 1.4):
        generator = torch.Generator().manual_seed(0)

        def coarse(
            kind: str, layer: int, weight: torch.Tensor, bias: torch.Tensor, noise: float = noise, drawn: Any = generator
        ) -> tuple[torch.Tensor, torch.Tensor]:
            del kind, layer
            return weight + noise * torch.randn(weight.shape, generator=drawn) * weight.std(), bias

        report = evaluated(changed(good, tmp_path / f"coarse-{noise}", coarse), weaker)
        nll = {arm: row["nll"] for arm, row in report["arms"].items()}
        if nll["handoff"] > nll["source"]:
            break
    assert nll["handoff"] > nll["source"] > nll["native"]
    assert report["verdict"] == "fail"
    assert causes(report) == {"source"}
