"""Capture: the store's moments against the models run one sequence at a time, by hand, in float64."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError, OptionError, StoreError, TextError, UnsupportedModelError
from kvfit.fit.capture import models
from kvfit.fit.capture.activations import Activations
from kvfit.fit.capture.capture import Options, capture, lexical_lags
from kvfit.fit.capture.sequences import sequences
from kvfit.fit.capture.text import TextOptions, documents, mix
from kvfit.fit.solve.solve import Options as SolveOptions
from kvfit.fit.solve.solve import solve
from kvfit.fit.stats.digests import digest, of_recipe, parse
from kvfit.fit.stats.merge import merge
from kvfit.fit.stats.record import read_record
from kvfit.fit.stats.store import Store
from kvfit.hub.card import render_card
from kvfit.model.identity import describe_model

TEXT = TextOptions("demo:text")
SMALL = Options(num_sequences=12, seq_len=64, token_stride=3, skip_tokens=1, holdout=0.25, stats_dtype="float64")
Loader = Callable[[Path | str], Any]
FLOAT32 = (models.Options(dtype="float32", device="cpu"),) * 2


@pytest.fixture(scope="module")
def store(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("capture") / "pair.zarr"
    captured = capture(
        str(tiny_pair[0]), str(tiny_pair[1]), out, text=TEXT, options=SMALL, loading=FLOAT32, batch_size=5, progress=False
    )
    assert captured.tokens == 12 * 21
    return out


def file_digests(folder: Path) -> dict[str, str]:
    """Every file by its path in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def activations(model: Any, ids: list[int]) -> dict[str, list[torch.Tensor]]:
    """Keys before the rotary function and values, from hooks on the model's own projections, (T, F) per layer in float64."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.self_attn.k_norm.register_forward_hook(lambda _m, _i, out: keys.append(out[0].flatten(1).double())))
        hooks.append(layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out[0].double())))
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {"keys": keys, "values": values}


def test_moments_equal_a_float64_oracle(store: Path, tiny_pair: tuple[Path, Path], load: Loader) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    found = Store.open(store)
    rows: dict[str, list[tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]]] = {"fit": [], "holdout": []}
    for index, sequence in zip(range(12), sequences(TEXT, source.tokenizer, seq_len=64), strict=False):
        rows[SMALL.split(index)].append((activations(source.model, sequence.ids), activations(target.model, sequence.ids)))
    assert [len(rows[split]) for split in ("fit", "holdout")] == [9, 3]
    for split in ("fit", "holdout"):
        assert found.count(split) == 21 * len(rows[split])
        for kind in ("keys", "values"):
            for a, t in ((0, 3), (2, 0), (1, 1)):
                x = torch.cat([one[kind][a][1::3] for one, _ in rows[split]])
                y = torch.cat([other[kind][t][1::3] for _, other in rows[split]])
                x2 = torch.cat([one[kind][2][1::3] for one, _ in rows[split]])
                assert_close(found.source_mean(split, (kind, a)), x.mean(0))
                assert_close(found.target_mean(split, (kind, t)), y.mean(0))
                x, y, x2 = x - x.mean(0), y - y.mean(0), x2 - x2.mean(0)
                assert_close(found.source_scatter(split, (kind, a), (kind, 2)), x.T @ x2)
                assert_close(found.cross_scatter(split, (kind, a), (kind, t)), x.T @ y)
                assert_close(found.target_scatter(split, (kind, t)), y.square().sum(0))


def test_lexical_inputs_equal_a_float64_oracle(store: Path, tiny_pair: tuple[Path, Path], load: Loader) -> None:
    """The target's first layer, of the token `lag` places before each kept one in the sequence itself, not among the kept."""
    source, target = (load(folder) for folder in tiny_pair)
    found = Store.open(store)
    assert found.lexical_lags == (0, 1, 2)
    assert found.recipe["options"]["lexical"] == [0, 1, 2]
    rows: list[list[torch.Tensor]] = [[], [], [], []]
    for index, sequence in zip(range(12), sequences(TEXT, source.tokenizer, seq_len=64), strict=False):
        if SMALL.split(index) == "fit":
            first = activations(target.model, sequence.ids)
            both = torch.cat([first["keys"][0], first["values"][0]], 1)
            for lag in (0, 1, 2):
                rows[lag].append(both[[max(position - lag, 0) for position in range(1, 64, 3)]])
            rows[3].append(activations(source.model, sequence.ids)["keys"][2][1::3])
    *lagged, keys = (torch.cat(part) for part in rows)
    centred = [part - part.mean(0) for part in lagged]
    for lag, x in enumerate(lagged):
        assert_close(found.source_mean("fit", ("lexical", lag)), x.mean(0))
        assert_close(found.source_scatter("fit", ("lexical", lag), ("lexical", 2)), centred[lag].T @ centred[2])
        assert_close(found.source_scatter("fit", ("lexical", lag), ("keys", 2)), centred[lag].T @ (keys - keys.mean(0)))
        # The target's own first layer is an output, too, and lag 0 is the same numbers.
        if lag == 0:
            y = lagged[0][:, : found.target.width]
            assert_close(found.cross_scatter("fit", ("lexical", 0), ("keys", 0)), centred[0].T @ (y - y.mean(0)))
    assert float((lagged[0] - lagged[1]).norm() / lagged[0].norm()) > 0.1  # so that the lags can be told apart


def test_a_mix_of_texts_is_recorded_text_by_text(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The store says which documents are whose, and the generated text is one of them."""
    texts = mix(["demo:text=3", "demo:facts=1"], TextOptions())
    options = replace(SMALL, num_sequences=16, lexical=())
    arguments = {"text": texts, "loading": FLOAT32, "batch_size": 3, "progress": False}
    refs = [str(folder) for folder in tiny_pair]
    whole = capture(*refs, tmp_path / "whole.zarr", options=options, **arguments)
    assert whole.sequences == 16
    store = Store.open(whole.store)
    cursor = store.record.cursor
    assert [text["sequences"] for text in cursor["texts"]] == [12, 4]
    assert cursor["captured_by_text"] == [12, 4]
    wanted = [digest(text) for text in islice(documents(texts[0]), cursor["texts"][0]["documents"])]
    generated = replace(texts[1], least_chars=8 * options.seq_len)
    wanted += [digest(text) for text in islice(documents(generated), 4)]
    captured = parse(cursor["captured"])
    assert captured[12:] == wanted[-4:]
    assert set(captured) <= set(wanted)
    names = [(text["dataset"], text["share"]) for text in store.recipe["text"]["merged"]]
    assert names == [("demo:text", 3.0), ("demo:facts", 1.0)]


def test_lexical_inputs_only_where_the_first_layer_allows_them(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    target = load(tiny_pair[1]).model
    assert lexical_lags("auto", target) == (0, 1, 2)
    assert lexical_lags((1,), target) == (1,)
    # A first layer that looks at the token before: its keys are no function of the token alone.
    projection = target.model.layers[0].self_attn.k_proj
    hook = projection.register_forward_hook(lambda _module, _given, out: out + out.roll(1, dims=1))
    try:
        assert lexical_lags("auto", target) == ()
        assert lexical_lags((), target) == ()
        with pytest.raises(UnsupportedModelError, match="depend on more than the token"):
            lexical_lags((0,), target)
    finally:
        hook.remove()


@pytest.mark.parametrize("lexical", [(1, 0), (0, 0), (-1,), (0, 64)])
def test_lags_that_cannot_be_are_refused(lexical: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="--lexical: found"):
        Options(seq_len=64, lexical=lexical)


def test_what_is_left_out_is_not_counted_and_warned_of(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A document with a token whose embedding is infinite: its batch is in no sum, so its tokens are none of the map's."""
    monkeypatch.setattr("kvfit.fit.stats.record.QUARANTINE_SHARE", 0.5)
    texts = list(islice(documents(TEXT), 6))
    tokenizer = models.load_tokenizer(str(tiny_pair[0]))
    rows = [tokenizer(text)["input_ids"][:64] for text in texts]
    rare = next(token for token in rows[3] if all(token not in row for row in rows[:3] + rows[4:]))
    broken = Path(shutil.copytree(tiny_pair[0], tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][rare] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    captured = capture(
        str(broken), str(tiny_pair[1]), tmp_path / "pair.zarr", text=TextOptions(str(tmp_path / "few.jsonl")),
        options=replace(SMALL, num_sequences=6), loading=FLOAT32, batch_size=1, progress=False,
    )  # fmt: skip
    store = Store.open(tmp_path / "pair.zarr")
    assert (captured.sequences, captured.tokens) == (6, 5 * 21)
    assert captured.tokens == store.count("all")
    assert "1 of 6 batches are not in the statistics, because they hold values that are not finite" in caplog.text
    assert "first in the source's keys of layer" in caplog.text


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # The models run in float32 in other batch sizes than the oracle's, which rounds differently; the sums add nothing to that.
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6


def test_the_oracle_can_tell(store: Path, tiny_pair: tuple[Path, Path], load: Loader) -> None:
    """Negative control: rotated keys instead of un-rotated ones are far from what the store holds."""
    source = load(tiny_pair[0])
    found = Store.open(store)
    total = torch.zeros(32, dtype=torch.float64)
    count = 0
    for index, sequence in zip(range(12), sequences(TEXT, source.tokenizer, seq_len=64), strict=False):
        if SMALL.split(index) == "fit":
            with torch.no_grad():
                out = source.model(torch.tensor([sequence.ids]), use_cache=True)
            cache = out.cache if "cache" in out else out.past_key_values
            keys = cache.layers[0].keys[0].transpose(0, 1).flatten(1).double()[1::3]
            total += keys.sum(0)
            count += len(keys)
    assert count == found.count("fit")
    mean = total / count
    assert float((found.source_mean("fit", ("keys", 0)) - mean).norm() / mean.norm()) > 0.05


def test_batch_size_does_not_matter(store: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    capture(
        str(tiny_pair[0]),
        str(tiny_pair[1]),
        tmp_path / "b.zarr",
        text=TEXT,
        options=SMALL,
        loading=FLOAT32,
        batch_size=1,
        progress=False,
    )
    one, other = Store.open(store), Store.open(tmp_path / "b.zarr")
    for split in ("fit", "holdout"):
        a, b = one.cross_scatter(split, ("keys", 1), ("keys", 2)), other.cross_scatter(split, ("keys", 1), ("keys", 2))
        assert float((a - b).norm() / a.norm()) < 2e-6


@pytest.mark.parametrize("words", [["demo:text"], ["demo:text=3", "demo:facts=1"]])
def test_an_interrupted_capture_ends_with_the_same_bits(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Stopped at every forward pass in turn, resumed each time; commits fall inside batches of both splits too."""
    options = Options(num_sequences=16, seq_len=48, token_stride=1, holdout=0.4)
    arguments = {
        "text": mix(words, TextOptions()),
        "options": options,
        "loading": FLOAT32,
        "batch_size": 3,
        "memory_budget": 1100 << 10,
        "progress": False,
    }
    # A buffer of a few dozen tokens, so that every addition commits the one before.
    monkeypatch.setattr("kvfit.fit.stats.budget.LARGEST_BUFFER", 100)
    monkeypatch.setattr("kvfit.fit.stats.updater.WRITING_THREADS", 2)  # the least budget grows with them
    capture(str(tiny_pair[0]), str(tiny_pair[1]), tmp_path / "whole.zarr", **arguments)
    plain = Activations.__call__
    out, stops, finished = tmp_path / "torn.zarr", 0, False
    while not finished:
        calls = 0

        def tripped(self: Any, ids: torch.Tensor) -> Any:
            nonlocal calls
            calls += 1
            if calls > 5:
                raise KeyboardInterrupt
            return plain(self, ids)

        monkeypatch.setattr(Activations, "__call__", tripped)
        try:
            capture(str(tiny_pair[0]), str(tiny_pair[1]), out, resume=True, **arguments)  # also where there is nothing yet
            finished = True
        except KeyboardInterrupt:
            stops += 1
        assert stops < 20
    assert stops >= 2
    assert read_record(tmp_path / "whole.zarr").cursor == read_record(out).cursor
    one, other = Store.open(tmp_path / "whole.zarr"), Store.open(out)
    for split in ("fit", "holdout"):
        assert one.count(split) == other.count(split)
        for i in range(3):
            assert torch.equal(
                one.source_scatter(split, ("values", 0), ("values", i)),
                other.source_scatter(split, ("values", 0), ("values", i)),
            )
            assert torch.equal(
                one.cross_scatter(split, ("keys", i), ("keys", 1)), other.cross_scatter(split, ("keys", i), ("keys", 1))
            )


def test_the_store_says_which_documents_are_in_it_and_the_bundle_keeps_it(store: Path, tmp_path: Path) -> None:
    cursor = Store.open(store).record.cursor
    wanted = [digest(text) for text in islice(documents(TEXT), 12)]
    assert parse(cursor["captured"]) == wanted
    assert cursor["passed"] == ""
    solved = solve(store, tmp_path / "bundle", options=SolveOptions(top_k=1, penalty=0.1), progress=False)
    recipe = Bundle.open(solved.bundle).recipe
    assert of_recipe(recipe) == set(wanted)
    assert {name: value for name, value in recipe.items() if name != "documents"} == Store.open(store).recipe


def few(path: Path, count: int) -> TextOptions:
    """A file of some documents, the second one twice."""
    texts = list(islice(documents(TEXT), count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts[:2], texts[1], *texts[2:]]))
    return TextOptions(str(path))


def test_a_capture_that_ends_before_a_commit_leaves_nothing(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """So that the advice can be followed: with fewer sequences, under the same name."""
    text = few(tmp_path / "few.jsonl", 8)
    lines = (tmp_path / "few.jsonl").read_text()
    with open(tmp_path / "few.jsonl", "a") as stream:  # what comes after the last sequence counts as well
        stream.write('{"text": "short"}\n' * 3 + lines)
    arguments = {"text": text, "loading": FLOAT32, "progress": False}
    refs = [str(folder) for folder in tiny_pair]
    found = rf"found 8 sequences .*\(3 documents were shorter, {1 + len(lines.splitlines())} repeated\), needed 12: "
    with pytest.raises(TextError, match=found + "lower --num-sequences .*or give more"):
        capture(*refs, tmp_path / "s.zarr", options=SMALL, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["few.jsonl"]
    captured = capture(*refs, tmp_path / "s.zarr", options=replace(SMALL, num_sequences=8), **arguments)
    assert (captured.sequences, captured.repeated) == (8, 1)
    assert "1 repeated documents skipped" in str(captured)


def test_a_capture_that_ends_after_a_commit_goes_on_with_more_text(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfit.fit.stats.budget.LARGEST_BUFFER", 50)
    text = few(tmp_path / "few.jsonl", 8)
    arguments = {"text": text, "options": SMALL, "loading": FLOAT32, "batch_size": 2, "progress": False}
    refs = [str(folder) for folder in tiny_pair]
    with pytest.raises(TextError, match=r"found 8 sequences .*: add text to it and pass --resume; or lower .* another --out"):
        capture(*refs, tmp_path / "s.zarr", **arguments)
    few(tmp_path / "few.jsonl", 12)
    assert capture(*refs, tmp_path / "s.zarr", resume=True, **arguments).sequences == 12
    capture(*refs, tmp_path / "whole.zarr", **arguments)
    assert read_record(tmp_path / "whole.zarr").cursor == read_record(tmp_path / "s.zarr").cursor


def test_a_repetition_is_seen_where_another_process_took_the_first_copy(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume: the second of two processes, ended twice by too little text, against ended once."""
    monkeypatch.setattr("kvfit.fit.stats.budget.LARGEST_BUFFER", 50)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    texts = list(islice(documents(TEXT), 14))
    path = tmp_path / "text.jsonl"

    def ended(name: str, numbers: list[int]) -> dict[str, Any]:
        path.write_text("".join(json.dumps({"text": texts[number]}) + "\n" for number in numbers))
        with pytest.raises(TextError, match="add text to it and pass --resume"):
            capture(
                *map(str, tiny_pair), tmp_path / name, text=TextOptions(str(path)), options=replace(SMALL, num_sequences=40),
                loading=FLOAT32, batch_size=2, resume=True, progress=False,
            )  # fmt: skip
        cursor: dict[str, Any] = read_record(tmp_path / f"{name}.rank1").cursor
        return cursor

    # Batches of two: 0 1 for the first process, 2 3 for the second, and so on, without the copies of what either took.
    order = [0, 1, 2, 3, 0, 4, 5, 2, 6, 7]
    more = [*order, 4, 1, 8, 9, 6, 10, 11, 12, 13]
    first = ended("torn", order)
    assert parse(first["captured"]) == [digest(texts[number]) for number in (2, 3)]
    torn = ended("torn", more)
    assert torn == ended("whole", more)
    assert parse(torn["captured"]) == [digest(texts[number]) for number in (2, 3, 6, 7)]
    assert parse(torn["passed"]) == [digest(texts[number]) for number in (0, 1, 4, 5)]


def test_more_tokens_than_positions_are_refused_before_weights_are_loaded(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_pair[1], tmp_path / "short"))
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 63}))
    with pytest.raises(MismatchError, match=r"--seq-len: found 64 tokens, needed at most the 63 positions of \S+short"):
        capture(str(tiny_pair[0]), str(folder), tmp_path / "s.zarr", text=TEXT, options=SMALL, progress=False)


def test_a_budget_for_nothing_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    refs = [str(folder) for folder in tiny_pair]
    with pytest.raises(MismatchError, match=r"--memory-budget: found 1 bytes, needed at least \d+KiB") as caught:
        capture(*refs, tmp_path / "s.zarr", text=TEXT, options=SMALL, memory_budget=1, loading=FLOAT32, progress=False)
    assert list(tmp_path.iterdir()) == []
    least = int(re.search(r"(\d+)KiB", str(caught.value))[1]) << 10  # type: ignore[index]
    capture(*refs, tmp_path / "s.zarr", text=TEXT, options=SMALL, memory_budget=least, loading=FLOAT32, progress=False)


def test_the_parts_of_several_processes_are_not_begun_anew_by_one(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "s.zarr.rank0").mkdir()
    with pytest.raises(StoreError, match="found the part of one process of several"):
        capture(*map(str, tiny_pair), tmp_path / "s.zarr", text=TEXT, options=SMALL, resume=True, progress=False)


def test_resuming_with_another_recipe_names_the_field(tiny_pair: tuple[Path, Path], store: Path) -> None:
    other = Options(**{**SMALL.__dict__, "token_stride": 2})
    with pytest.raises(StoreError, match=r"token_stride"):
        capture(
            str(tiny_pair[0]), str(tiny_pair[1]), store, text=TEXT, options=other, loading=FLOAT32, resume=True, progress=False
        )


def test_text_shorter_than_a_sequence_leaves_nothing_behind(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text(json.dumps({"text": "too short"}) + "\n")
    with pytest.raises(TextError, match=r"found no document of 64 tokens, needed some"):
        capture(
            str(tiny_pair[0]),
            str(tiny_pair[1]),
            tmp_path / "s.zarr",
            text=TextOptions(str(path)),
            options=SMALL,
            progress=False,
        )
    assert sorted(tmp_path.iterdir()) == [path]


def test_other_tokenizers_are_refused_before_weights_are_loaded(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    other = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "other"
    PreTrainedTokenizerFast(tokenizer_object=other, unk_token="[UNK]").save_pretrained(folder)
    (folder / "config.json").write_text((tiny_pair[1] / "config.json").read_text())
    with pytest.raises(MismatchError, match=r"tokens with different ids, first .* needed the same token-to-id map"):
        capture(str(tiny_pair[0]), str(folder), tmp_path / "o.zarr", text=TEXT, options=SMALL, progress=False)
    assert not (tmp_path / "o.zarr").exists()


def test_an_existing_store_is_not_touched(tiny_pair: tuple[Path, Path], store: Path) -> None:
    with pytest.raises(StoreError, match=r"found something there already"):
        capture(str(tiny_pair[0]), str(tiny_pair[1]), store, text=TEXT, options=SMALL, progress=False)


def test_no_local_path_reaches_the_record(store: Path, tiny_pair: tuple[Path, Path]) -> None:
    found = Store.open(store)
    assert found.source.ref == tiny_pair[0].name
    assert str(tiny_pair[0].parent) not in json.dumps(found.recipe)


def test_splits_are_spread_evenly_and_exactly() -> None:
    for holdout in (0.1, 0.25, 0.5):
        options = Options(holdout=holdout, seed=3)
        chosen = [options.split(index) == "holdout" for index in range(400)]
        assert abs(sum(chosen) - 400 * holdout) <= 1
        assert all(abs(sum(chosen[start : start + 40]) - 40 * holdout) <= 1 for start in range(0, 400, 40))
    assert not any(Options(holdout=0).split(index) == "holdout" for index in range(100))


@pytest.mark.parametrize(
    "wrong", [{"token_stride": 0}, {"seq_len": 1}, {"holdout": 1.0}, {"skip_tokens": 1024}, {"num_sequences": 1}]
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="needed"):
        Options(**wrong)


def test_a_model_larger_than_its_device_gives_the_same_bits(store: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Layers that accelerate keeps on disk until they run, as `--device-map auto` does with what fits nowhere else."""
    outside = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    maps = [outside | {f"model.layers.{i}": "cpu" if i < kept else "disk" for i in range(n)} for kept, n in ((1, 3), (2, 4))]
    spread = tuple(models.Options(dtype="float32", device_map=placed) for placed in maps)
    loaded = models.load(str(tiny_pair[1]), options=spread[1])
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cpu", "meta"}
    refs = [str(folder) for folder in tiny_pair]
    capture(*refs, tmp_path / "spread", text=TEXT, options=SMALL, loading=spread, batch_size=5, progress=False)
    assert file_digests(tmp_path / "spread") == file_digests(store)


def test_a_model_that_is_offloaded_whole_runs_where_accelerate_runs_it(tiny_pair: tuple[Path, Path], load: Loader) -> None:
    from accelerate import cpu_offload

    plain, offloaded = load(tiny_pair[0]), models.load(str(tiny_pair[0]), options=FLOAT32[0])
    cpu_offload(offloaded.model, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in offloaded.model.parameters()} == {"meta"}
    specs = [describe_model(one.model, one.tokenizer, ref=one.ref, revision=None) for one in (plain, offloaded)]
    assert specs[0] == specs[1]
    ids = torch.arange(40)[None] + 300
    features = [Activations(one.model, specs[0], range(0, 40, 3))(ids) for one in (plain, offloaded)]
    for kind in ("keys", "values"):
        assert all(torch.equal(*pair) for pair in zip(features[0][kind], features[1][kind], strict=True))


def test_captures_of_different_text_merge_into_one_of_all_of_it(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Captured where and when each text was at hand; against one capture of both, document for document in the same split."""
    read = list(islice(documents(TEXT), 20))
    options = replace(SMALL, num_sequences=10, holdout=0.5)  # every other one, wherever a text begins
    for name, part in (("a", read[:10]), ("b", read[10:]), ("all", read)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        counted = replace(options, num_sequences=len(part))
        capture(
            *map(str, tiny_pair), tmp_path / name, text=TextOptions(str(tmp_path / f"{name}.jsonl")), options=counted,
            loading=FLOAT32, batch_size=4 if name == "b" else 5, progress=False,
        )  # fmt: skip
    merged = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "merged")
    whole = Store.open(tmp_path / "all")
    for split in ("fit", "holdout"):
        assert merged.count(split) == whole.count(split) == 10 * len(options.kept)
        for left, right in ((("keys", 0), ("keys", 2)), (("values", 1), ("values", 1))):
            found, wanted = merged.source_scatter(split, left, right), whole.source_scatter(split, left, right)
            assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    recipe = merged.recipe
    assert [text["dataset"] for text in recipe["text"]["merged"]] == ["a.jsonl", "b.jsonl"]
    assert recipe["options"] == whole.recipe["options"]
    assert recipe["batch_size"] == {"merged": [4, 5]}
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "again").recipe == recipe
    # A shard of the same name on another machine, with the same options: other documents.
    (tmp_path / "elsewhere").mkdir()
    more = "".join(json.dumps({"text": text}) + "\n" for text in islice(documents(TEXT), 20, 30))
    (tmp_path / "elsewhere" / "a.jsonl").write_text(more)
    capture(
        *map(str, tiny_pair), tmp_path / "c", text=TextOptions(str(tmp_path / "elsewhere" / "a.jsonl")), options=options,
        loading=FLOAT32, batch_size=5, progress=False,
    )  # fmt: skip
    shards = merge([tmp_path / "c", tmp_path / "a"], tmp_path / "shards")
    assert shards.count("all") == 20 * len(options.kept)
    assert shards.recipe == merge([tmp_path / "a", tmp_path / "c"], tmp_path / "shards-again").recipe
    assert (shards.recipe["text"]["dataset"], shards.recipe["options"]["num_sequences"]) == ("a.jsonl", 20)
    with pytest.raises(MismatchError, match="hold the same text: found 20 documents"):
        merge([tmp_path / "merged", tmp_path / "all"], tmp_path / "twice")
    bundle = Bundle.open(solve(tmp_path / "merged", tmp_path / "bundle", progress=False).bundle)
    assert "| text | a.jsonl, b.jsonl |" in render_card(bundle)


def test_an_interrupt_after_the_only_commit_deletes_nothing(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is in its place before the run knows it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfit.fit.stats.writer.StoreWriter.drop_dead", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(*map(str, tiny_pair), tmp_path / "out", text=TEXT, options=SMALL, loading=FLOAT32, progress=False)
    monkeypatch.undo()
    assert Store.open(tmp_path / "out").count("all") == 12 * len(SMALL.kept)


def test_two_processes_of_torchrun_end_in_one_store(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one process: the same tokens in each split, the same moments to rounding; the parts are gone."""
    words = [*map(str, tiny_pair), "--dataset", "demo:text", "--num-sequences", "22", "--seq-len", "48", "--holdout", "0.3"]
    words += ["--batch-size", "4", "--stats-dtype", "float64", "--token-stride", "2", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start, out in (([sys.executable], "one.zarr"), (launcher, "two.zarr")):
        done = subprocess.run(
            [*start, "-m", "kvfit", "capture", *words, "--out", str(tmp_path / out)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("22 sequences") == 1  # said once, by the first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.zarr", "two.zarr"]
    one, two = Store.open(tmp_path / "one.zarr"), Store.open(tmp_path / "two.zarr")
    assert two.recipe["part"] == {"merged": [{"of": 2, "rank": 0}, {"of": 2, "rank": 1}]}
    assert two.record.cursor["captured"] == "".join(sorted(parse(one.record.cursor["captured"])))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "two.zarr.rank1").mkdir()  # killed while it tidied up
    options = Options(num_sequences=22, seq_len=48, token_stride=2, holdout=0.3, stats_dtype="float64")
    arguments = {"text": TEXT, "loading": FLOAT32, "batch_size": 4, "resume": True, "progress": False}
    again = capture(*map(str, tiny_pair), tmp_path / "two.zarr", options=options, **arguments)
    assert (again.sequences, again.tokens) == (22, two.count("all"))
    assert not (tmp_path / "two.zarr.rank1").exists()
    with pytest.raises(StoreError, match=r"recipe\.options\.seed = 0, this run has 1"):
        capture(*map(str, tiny_pair), tmp_path / "two.zarr", options=replace(options, seed=1), **arguments)
    for split in ("fit", "holdout"):
        assert one.count(split) == two.count(split) > 0
        for i, j in ((0, 0), (0, 2)):
            a, b = one.source_scatter(split, ("keys", i), ("keys", j)), two.source_scatter(split, ("keys", i), ("keys", j))
            assert float((a - b).norm() / a.norm()) < 1e-5
        a, b = one.cross_scatter(split, ("values", 1), ("values", 3)), two.cross_scatter(split, ("values", 1), ("values", 3))
        assert float((a - b).norm() / a.norm()) < 1e-5
