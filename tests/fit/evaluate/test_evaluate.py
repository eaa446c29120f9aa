"""Evaluation against a slow written-out one, and what ends up in the bundle."""

import html
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import FLOAT32, fit_tiny, heldout, paired

from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.errors import BundleError, MismatchError, TextError
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate import evaluate as evaluation
from kvfit.fit.evaluate.arms import Prefixes, Rewindable, greedy, mapped_pairs, source_pairs
from kvfit.fit.evaluate.clock import crossover, lengths_up_to, shown, timed
from kvfit.fit.evaluate.evaluate import Options, Thresholds, evaluate
from kvfit.fit.evaluate.intervals import cluster_interval, share_interval, share_of_gap
from kvfit.fit.evaluate.likelihood import likelihood
from kvfit.fit.evaluate.report import html_page
from kvfit.model.cache import cache_argument, new_cache

Loader = Callable[[Path | str], Any]
SMALL = Options(
    prefix=40, continuation=20, documents=5, probes=4, batch_size=2, seconds=0.001, resamples=200, greedy=6,
    probe_kinds=("names",), diagnose=3, transcripts=3,
)  # fmt: skip
ARMS = ("native", "transfer", "handoff", "auto", "source", "no_context", "mean", "shuffled")


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_tiny(tiny_pair, tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def report(bundle: Path, tiny_pair: tuple[Path, Path]) -> dict[str, Any]:
    source, target = map(str, tiny_pair)
    return evaluate(bundle, source=source, target=target, options=SMALL, loading=FLOAT32, progress=False).report


@torch.no_grad()
def written_out(model: Any, cache: Any, ids: list[int], prefix: int) -> torch.Tensor:
    """(C, vocabulary) log-probabilities of each continuation token, one forward pass a token, softmax by hand."""
    out = []
    for position in range(prefix - 1, len(ids) - 1):
        logits = model(torch.tensor([[ids[position]]]), **{cache_argument(model): cache}).logits[0, -1].double()
        out.append(logits - torch.logsumexp(logits, 0))
    return torch.stack(out)


@torch.no_grad()
def says(model: Any, cache: Any, last: int, n_tokens: int) -> list[int]:
    said = [last]
    for _ in range(n_tokens):
        said.append(int(model(torch.tensor([[said[-1]]]), **{cache_argument(model): cache}).logits[0, -1].argmax()))
    return said[1:]


def test_numbers_equal_a_slow_written_out_evaluation(
    bundle: Path, report: dict[str, Any], tiny_pair: tuple[Path, Path], load: Loader
) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(bundle, source, target)
    rows = heldout(target.tokenizer, 5, 60)
    prefixes = rows[:, :39]
    # Batches of two, two and one: the wrong document is the other one of a batch, and for the last the first of all.
    wrong = (1, 0, 3, 2, 0)
    found: dict[str, list[torch.Tensor]] = {}
    said: dict[str, list[list[int]]] = {}
    for arm in ARMS:
        if arm == "mean":
            continue
        model = source.model if arm == "source" else target.model
        for index, ids in enumerate(rows.tolist()):

            def made(index: int = index, arm: Any = arm, model: Any = model) -> Any:
                other = Prefixes(pair, prefixes[wrong[index]][None])
                cache = Prefixes(pair, prefixes[index : index + 1], other=other).cache(
                    arm, next_ids=rows[index : index + 1, 39:40]
                )
                return new_cache(model) if cache is None else cache

            found.setdefault(arm, []).append(written_out(model, made(), ids, 40))
            said.setdefault(arm, []).append(says(model, made(), ids[39], 6))
    for arm, by_document in found.items():
        row = report["arms"][arm]
        losses = [
            -float(found[t, ids[40 + t]]) for found, ids in zip(by_document, rows.tolist(), strict=True) for t in range(20)
        ]
        assert row["nll"] == pytest.approx(sum(losses) / len(losses), abs=2e-4), arm
        kl = torch.stack(
            [(native.exp() * (native - ours)).sum(-1) for native, ours in zip(found["native"], by_document, strict=True)]
        )
        assert row["kl"] == pytest.approx(float(kl.mean()), abs=2e-4), arm
        assert row["kl_first"] == pytest.approx(float(kl[:, :16].mean()), abs=2e-4), arm
        assert row["kl_p95"] == pytest.approx(float(kl.flatten().quantile(0.95)), abs=2e-3), arm
        same = [n.argmax(-1) == o.argmax(-1) for n, o in zip(found["native"], by_document, strict=True)]
        assert row["top1"] == pytest.approx(float(torch.stack(same).double().mean())), arm
        match = []
        for native, ours in zip(said["native"], said[arm], strict=True):
            differ = [i for i, (a, b) in enumerate(zip(native, ours, strict=True)) if a != b]
            match.append((differ[0] if differ else 6) / 6)
        assert row["greedy_match"] == pytest.approx(sum(match) / len(match)), arm


def test_native_is_a_plain_forward_pass(report: dict[str, Any], tiny_pair: tuple[Path, Path], load: Loader) -> None:
    target = load(tiny_pair[1])
    full = []
    for ids in heldout(target.tokenizer, 5, 60).tolist():
        with torch.no_grad():
            logits = target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        full += [-float(logits[t - 1, ids[t]]) for t in range(40, 60)]
    assert report["arms"]["native"]["nll"] == pytest.approx(sum(full) / len(full), abs=2e-4)


def test_native_is_its_own_measure(report: dict[str, Any]) -> None:
    native, source = report["arms"]["native"], report["arms"]["source"]
    assert native["kl"] == pytest.approx(0, abs=1e-6)
    assert native["top1"] == native["greedy_match"] == 1
    assert native["share_of_gap"] == pytest.approx(1)
    assert native["interval"] == pytest.approx([1, 1])
    assert source["share_of_gap"] == 0
    assert set(report["arms"]) == set(ARMS)
    assert all(report["arms"][arm]["kl"] > 0.001 for arm in ARMS if arm != "native")


def test_numbers_do_not_depend_on_the_batches(bundle: Path, tiny_pair: tuple[Path, Path], load: Loader) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(bundle, source, target)
    ids = heldout(target.tokenizer, 3, 50)
    one, all_ = (likelihood(pair, ids, 40, Options(batch_size=size, greedy=4), progress=False) for size in (1, 3))
    for arm in ("native", "transfer", "handoff", "source", "no_context", "mean"):
        assert torch.allclose(one[arm].nll, all_[arm].nll, atol=1e-4), arm  # type: ignore[index]
        assert torch.equal(one[arm].greedy, all_[arm].greedy), arm  # type: ignore[index]
    # In batches of one, every document still gets another one's cache.
    assert bool(((one["shuffled"].nll - one["transfer"].nll).abs() > 1e-3).all())
    assert torch.equal(one["transfer"].rows(torch.tensor([2])).nll, one["transfer"].nll[2:])


def test_the_mean_control_holds_no_content(bundle: Path, tiny_pair: tuple[Path, Path], load: Loader) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(bundle, source, target)
    ids = heldout(target.tokenizer, 3, 30)
    from kvfit.fit.evaluate.arms import mean_pairs

    mean = mean_pairs(pair, Prefixes(pair, ids).mapped)
    first, second = (Prefixes(pair, ids[i : i + 1], mean=mean).cache("mean") for i in (0, 1))
    for a, b in zip(first.layers, second.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    mapped = mapped_pairs(pair, ids, source_pairs(pair, ids))
    assert torch.allclose(first.layers[2].values[0, :, 7], mapped[2][1].mean((0, 2)), atol=1e-5)


def test_the_report_is_in_the_bundle_and_bound_to_its_weights(bundle: Path, report: dict[str, Any]) -> None:
    opened = Bundle.open(bundle)
    assert opened.evaluation == json.loads(json.dumps(report))
    assert opened.evaluation["weights_digest"] == opened.weights_digest
    assert opened.verdict == report["verdict"]
    assert {"evaluation.md", "evaluation-layers.png", "evaluation-time.png"} <= set(opened.digests)


def test_each_row_of_ways_is_about_one_way(report: dict[str, Any]) -> None:
    """Quality as in `arms`, recall as in `recall`, time as it was measured at the moved length, and the work beside it."""
    rows = {row["way"]: row for row in report["ways"]}
    assert set(rows) == set(ARMS)
    assert [row["way"] for row in report["ways"] if row["judged"]] == ["handoff"]
    assert {way for way, row in rows.items() if row["control"]} == {"no_context", "mean", "shuffled"}
    (timed,) = [row for row in report["milliseconds"]["lengths"] if row["tokens"] == 39]
    for way, name in (("native", "prefill"), ("transfer", "transfer"), ("handoff", "handoff"), ("auto", "auto")):
        assert rows[way]["milliseconds"] == timed[name]["median"]
        assert rows[way]["speed"] == pytest.approx(timed["prefill"]["median"] / timed[name]["median"])
    assert rows["mean"]["milliseconds"] is rows["mean"]["share_of_work"] is None
    for way, row in rows.items():
        assert {name: row[name] for name in report["arms"][way]} == report["arms"][way]
    assert rows["native"]["share_of_work"] == 1
    assert rows["source"]["share_of_work"] == 0
    assert 0 < rows["transfer"]["share_of_work"] < rows["handoff"]["share_of_work"] < rows["auto"]["share_of_work"]
    assert rows["handoff"]["recomputed"] == 0 < rows["auto"]["recomputed"] <= 0.25


def test_shares_of_work_are_those_of_a_profiler(bundle: Path, tiny_pair: tuple[Path, Path], load: Loader) -> None:
    """Operations counted by torch while they run, against the arithmetic from shapes."""
    from torch.utils.flop_counter import FlopCounterMode

    from kvfit.fit.evaluate.ways import work_shares

    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(bundle, source, target, exact_head=0)
    ids = heldout(target.tokenizer, 1, 49)
    prefixes = Prefixes(pair, ids[:, :48])
    counted = {}
    prefixes.cache("transfer")  # the first use of a model is checked, and that is no part of a transfer
    prefixes = Prefixes(pair, ids[:, :48], sources=prefixes.sources)
    for arm in ("native", "transfer"):
        with FlopCounterMode(display=False) as counter:
            prefixes.cache(arm)  # type: ignore[arg-type]
        counted[arm] = counter.get_total_flops()
    shares = work_shares(pair, 48, {"handoff": 0.0, "auto": 0.05})
    # The counter takes attention for a full square, and the mask halves it in the arithmetic.
    assert shares["transfer"] == pytest.approx(counted["transfer"] / counted["native"], rel=0.15)
    assert shares["handoff"] == shares["transfer"]
    tenth = work_shares(replace(pair, recompute=0.1), 48, {"handoff": 0.1})["handoff"]
    assert tenth - shares["auto"] == pytest.approx(0.05)
    parameters = sum(p.numel() for p in source.model.model.layers.parameters() if p.dim() > 1)
    guide = 2 * 20 * parameters / counted["native"]  # the guide reads eight tokens and drafts twelve
    assert tenth == pytest.approx(shares["transfer"] + 0.1 + guide, rel=0.1)


def test_an_interrupted_evaluation_goes_on(
    bundle: Path, report: dict[str, Any], tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before the interrupt is not measured again, and the numbers are those of one run."""
    copied = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    source, target = map(str, tiny_pair)
    saved = tmp_path / "bundle.evaluation-parts.json"

    def run(**changes: Any) -> dict[str, Any]:
        options = replace(SMALL, **changes)
        return evaluate(copied, source=source, target=target, options=options, loading=FLOAT32, progress=False).report

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    from kvfit.fit.evaluate import likelihood as module
    from kvfit.fit.evaluate import measure

    kept_diagnose = measure.diagnose
    monkeypatch.setattr(measure, "diagnose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    done = json.loads(saved.read_text())["parts"]
    assert {"time", "likelihood, 40 tokens, documents 0 to 1", "recall of names, 39 tokens"} <= set(done)
    with pytest.raises(KeyboardInterrupt):
        run(seed=1)  # another job does not take over what this one has saved
    assert json.loads(saved.read_text())["parts"]["time"] != done["time"]
    saved.write_text(json.dumps({"job": "another", "parts": {"time": 3}}))
    with pytest.raises(KeyboardInterrupt):
        run()
    done = json.loads(saved.read_text())["parts"]
    monkeypatch.setattr(measure, "diagnose", kept_diagnose)
    monkeypatch.setattr(module._Scorer, "batch", interrupted)  # were a batch measured again, this would end the run
    found = run()
    assert found["milliseconds"] == done["time"]
    for part in ("arms", "recall", "layers", "explained"):
        assert found[part] == report[part]
    assert not saved.exists()


def test_the_page_needs_no_other_file(bundle: Path, report: dict[str, Any]) -> None:
    """Tables, pictures and transcripts are in it; what the models said is text, never markup."""
    page = (bundle.parent / f"{bundle.name}.evaluation.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert page.count('class="context"') == 3  # as many transcripts as were asked for
    assert "href=" not in page
    assert page.count("src=") == 2
    assert f"<code>{report['weights_digest']}</code>" in page
    assert "`" not in re.sub("<table.*?</table>", "", page, flags=re.DOTALL)
    for row in report["ways"]:
        assert row["label"] in html.unescape(page)
    hostile = [{"context": "<script>alert(1)</script>", "native": "<b>", "handoff": "a & b", "source": "-"}]
    made = html_page(report | {"text": "<i>name</i>"}, Bundle.open(bundle).spec, {}, hostile)
    for markup in ("<script>", "<b>", "<i>", "a & b"):
        assert markup not in made
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in made


def test_the_markdown_has_whole_tables(bundle: Path, report: dict[str, Any]) -> None:
    text = (bundle / "evaluation.md").read_text()
    assert text.startswith("# Evaluation: ")
    assert f"**Verdict: {report['verdict']}.**" in text
    tables = [block.split("\n") for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) >= 4
    for lines in tables:
        assert set(lines[1]) == {"|", "-"}
        assert {line.count("|") for line in lines} == {lines[1].count("|")}
    assert "\n\n\n" not in text
    assert "transcripts" not in report  # quotes of the text stay out of what is published


def test_the_last_line_says_gap_recall_speed_and_where(bundle: Path, report: dict[str, Any]) -> None:
    line = str(evaluation.Evaluated(bundle, report, Path("page.html")))
    assert "\n" not in line
    for part in (
        report["verdict"],
        "% of the gap recovered",
        "ms for 39 tokens",
        "x as fast as a prefill",
        "report: page.html",
    ):
        assert part in line


def test_further_texts_and_lengths_are_reported_apart(bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    copied = shutil.copytree(bundle, tmp_path / "bundle")
    lines = [
        json.dumps({"text": f"{n} " + " ".join(f"{n * k % 97} + {k} = {n * k % 97 + k};" for k in range(60))}) for n in range(4)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join([*lines, lines[0]]))
    options = replace(SMALL, prefix=(40, 60), turns=2, probes=0, greedy=0, diagnose=2, recompute=0.1)
    options = replace(options, thresholds=Thresholds(speed=1e9))
    source, target = map(str, tiny_pair)
    found = evaluate(
        copied, source=source, target=target, texts={"sums": TextOptions(str(tmp_path / "sums.jsonl"))}, options=options,
        loading=FLOAT32, progress=False,
    )  # fmt: skip
    report = found.report
    assert list(report["prefixes"]) == ["40", "60"]
    assert report["arms"] == report["prefixes"]["60"]["arms"]
    assert report["arms"] != report["prefixes"]["40"]["arms"]
    assert report["tokens"]["prefix"] == 60
    apart = report["texts"]["sums"]
    assert apart["text"] == "sums.jsonl"
    assert apart["documents"] == 4  # the fifth is the first again
    assert apart["arms"]["native"]["nll"] != report["arms"]["native"]["nll"]
    assert len(apart["layers"]) == len(report["layers"]) == 4
    assert [turn["mapped"] for turn in report["turns"]] == [3, 20]  # the first is run up to its sixteenth token
    assert report["arms"]["handoff"]["greedy_match"] is None
    assert sum("move longer contexts, recompute less, or" in reason for reason in report["reasons"]) == 2  # of each length
    text = (copied / "evaluation.md").read_text()
    for part in ("sums.jsonl", "60 tokens", "Back and forth", report["weights_digest"], report["verdict"], *report["reasons"]):
        assert part in text
    assert str(tmp_path) not in text
    assert "evaluation-match.png" in text
    assert (copied / "evaluation-match.png").read_bytes().startswith(b"\x89PNG")


def test_documents_that_the_map_was_fitted_on_are_left_out(bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Also of further texts and of the contexts of probes; what is measured is what the rest alone gives."""
    source, target = map(str, tiny_pair)
    fitted, fresh = (list(islice(documents(TextOptions(name)), 5)) for name in ("demo:text", "demo:heldout"))
    reports = []
    for name, texts in (("mixed", [*fitted[:2], *fresh[:3], fitted[2], *fresh[3:]]), ("fresh", fresh)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        text = TextOptions(str(tmp_path / f"{name}.jsonl"))
        copied = Path(shutil.copytree(bundle, tmp_path / name))
        reports.append(
            evaluate(
                copied, source=source, target=target, text=text, texts={"more": text},
                options=replace(SMALL, diagnose=0, seconds=0, transcripts=0), loading=FLOAT32, progress=False,
            ).report
        )  # fmt: skip
    mixed, alone = reports
    assert mixed["overlap"] == {"checked": True, "left_out": 3}
    assert alone["overlap"] == {"checked": True, "left_out": 0}
    assert mixed["texts"]["more"]["left_out"] == 3
    for part in ("arms", "recall"):
        assert mixed[part] == alone[part]
    unasked = {"recall": None, "log_probability": None}
    assert mixed["texts"]["more"]["arms"] == {arm: row | unasked for arm, row in alone["arms"].items()}
    assert (
        "Neither fit nor selection saw any of them; 3 that they did see were left out."
        in (tmp_path / "mixed" / "evaluation.md").read_text()
    )
    assert "; 3 documents that they did see were left out." in (tmp_path / "mixed" / "README.md").read_text()


def test_the_text_that_was_captured_is_refused(bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "captured.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in islice(documents(TextOptions("demo:text")), 2)))
    source, target = map(str, tiny_pair)
    with pytest.raises(TextError, match=r"found 0 different documents .* beside 2 that the mapper was fitted on"):
        evaluate(bundle, source=source, target=target, text=TextOptions(str(text)), options=SMALL, progress=False)


def test_a_bundle_without_a_record_gets_no_claim(bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    recipe = {name: value for name, value in opened.recipe.items() if name != "documents"}
    weights = ((layer.kind, layer.layer_index, *opened.layer(layer.kind, layer.layer_index)) for layer in opened.spec.layers)
    write_bundle(tmp_path / "old", opened.spec, weights, recipe=recipe, solve=opened.solve)
    source, target = map(str, tiny_pair)
    options = replace(SMALL, diagnose=0, seconds=0, probes=0, greedy=0, transcripts=0)
    found = evaluate(
        tmp_path / "old", source=source, target=target, text=TextOptions("demo:text"), options=options, loading=FLOAT32,
        progress=False,
    )  # fmt: skip
    assert found.report["overlap"] == {"checked": False, "left_out": 0}
    for name in ("evaluation.md", "README.md"):
        text = (tmp_path / "old" / name).read_text()
        assert "is not known" in text
        assert "Neither fit nor selection" not in text


@pytest.mark.parametrize(
    ("changes", "needed"), [({}, 60), ({"greedy": 30}, 70), ({"probes": 4}, 136), ({"time_tokens": 80}, 80)]
)
def test_more_tokens_than_positions_are_refused(
    bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path, changes: dict[str, int], needed: int
) -> None:
    """Scored tokens, the greedy continuation and the probes' questions all come after the prefix."""
    folder = Path(shutil.copytree(tiny_pair[0], tmp_path / "short"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 59}))
    options = replace(SMALL, **{"probes": 0, "greedy": 0, **changes})  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=rf"found {needed} tokens, needed at most the 59 positions"):
        evaluate(bundle, source=str(folder), target=str(tiny_pair[1]), options=options, loading=FLOAT32, progress=False)


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


def test_too_little_text_is_said_before_weights_are_loaded(bundle: Path, tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(TextError, match="found 0 different documents of 4020 tokens"):
        evaluate(bundle, source="no/such", target=str(tiny_pair[1]), options=replace(SMALL, prefix=4000), progress=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix": 1},
        {"prefix": ()},
        {"recompute": 1.5},
        {"documents": 1},
        {"probe_kinds": ("riddles",)},
        {"probes": 3},
        {"turns": -1},
        {"seconds": float("nan")},
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="--" + next(iter(changes)).replace("_", "-")):
        replace(SMALL, **changes)


def test_share_of_gap_is_one_for_native_and_zero_for_the_source() -> None:
    source, native = torch.tensor([2.0, 3.0]), torch.tensor([1.5, 2.5])
    assert share_of_gap(source, native, native) == 1
    assert share_of_gap(source, native, source) == 0
    assert share_of_gap(source, native, source + 0.5) == -1
    assert share_of_gap(source, source, native) == 0


def test_the_interval_of_a_share_pairs_documents() -> None:
    torch.manual_seed(0)
    level = 3 * torch.rand(60, dtype=torch.float64)  # documents differ far more than arms do
    source, native = level + 0.5, level
    arm = level + 0.25 + 0.02 * torch.randn(60, dtype=torch.float64)
    low, high = share_interval(source, native, arm, resamples=2000, seed=0)
    assert 0.48 < low < 0.5 < high < 0.52
    wide = share_interval(source[:6], native[:6], arm[:6], resamples=2000, seed=0)
    assert wide[1] - wide[0] > high - low


def test_clustered_intervals_are_wider_when_a_cluster_answers_alike() -> None:
    # Twenty documents of ten questions each, all right or all wrong: two hundred answers, but twenty draws.
    right = [float(document % 2) for document in range(20) for _ in range(10)]
    clusters = [document for document in range(20) for _ in range(10)]
    low, high = cluster_interval(right, clusters, resamples=4000, seed=1)
    plain = cluster_interval(right, list(range(200)), resamples=4000, seed=1)
    deviation = (0.25 / 20) ** 0.5  # of a mean of twenty coin flips
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.15)
    assert plain[1] - plain[0] == pytest.approx(2 * 1.96 * (0.25 / 200) ** 0.5, rel=0.15)


def test_crossover_is_where_transfer_wins_for_good() -> None:
    assert crossover([(64, 3.0, 2.0), (128, 2.0, 3.0), (256, 2.0, 6.0)]) == 128
    assert crossover([(64, 1.0, 2.0), (128, 4.0, 3.0), (256, 2.0, 6.0)]) == 256
    assert crossover([(64, 1.0, 2.0), (128, 4.0, 3.0)]) is None
    assert lengths_up_to(383) == [64, 128, 256, 383]
    assert lengths_up_to(39) == [39]
    assert lengths_up_to(200, 39, 150) == [39, 64, 128, 150, 200]


def test_times_are_told_in_digits() -> None:
    assert [shown(value) for value in (0.12345, 20.31, 99.96, 1390.4)] == ["0.123 ms", "20.3 ms", "100 ms", "1390 ms"]


def test_runs_are_repeated_as_often_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that every run moves by the time it takes: counts follow from it, and nothing sleeps."""
    now, calls = [0.0], [0]
    monkeypatch.setattr("kvfit.fit.evaluate.clock.time.perf_counter", lambda: now[0])

    def run(seconds: float, first: float | None = None) -> Callable[[], None]:
        calls[0] = 0

        def taken() -> None:
            now[0] += first if first is not None and not calls[0] else seconds
            calls[0] += 1

        return taken

    quick = timed(run(0.001), set(), 100.0)
    assert quick["repeats"] == 30
    assert calls[0] == 1 + 10 + 30  # the first run says how long one takes
    assert quick["median"] == pytest.approx(1.0)
    middling = timed(run(1.0), set(), 11.0)
    assert middling["repeats"] == 8
    assert calls[0] == 11  # no more seconds than there are
    assert timed(run(60.0), set(), 1.0)["repeats"] == 1
    assert calls[0] == 2
    assert timed(run(1.0, first=5.0), set(), 30.0)["median"] == pytest.approx(1000.0)  # warming up is not counted


def test_a_cache_can_be_used_again(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    target = load(tiny_pair[1])
    ids = heldout(target.tokenizer, 2, 30)
    from kvfit.model.cache import forward

    cache = new_cache(target.model)
    forward(target.model, ids[:, :20], cache)
    kept = Rewindable(cache)
    first = greedy(target.model, kept.fresh(target.model), ids[:, 20:22], 5)
    assert torch.equal(greedy(target.model, kept.fresh(target.model), ids[:, 20:22], 5), first)
    alone = greedy(target.model, kept.fresh(target.model), ids[:, 20:21], 5)
    assert torch.equal(alone, greedy(target.model, kept.fresh(target.model), ids[:, 20:21], 5))


def test_numbers_that_json_lacks_become_null() -> None:
    found = evaluation._finite({"a": [float("nan"), 1.5], "b": {"c": float("inf"), "d": None}, "e": (2, "x")})
    assert found == {"a": [None, 1.5], "b": {"c": None, "d": None}, "e": [2, "x"]}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="everything can be written by root")
def test_a_bundle_that_cannot_be_written_is_refused_before_anything_runs(bundle: Path) -> None:
    bundle.chmod(0o555)
    try:
        with pytest.raises(BundleError, match="found a folder that cannot be written"):
            evaluate(bundle, options=SMALL, progress=False)
    finally:
        bundle.chmod(0o755)
