"""Merging: laws over any split of the text, at mean 0 and 1e6, and refusals by field."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_pair import SOURCE, TARGET, Batch, batches, capture, model, scratch, worst_error

from kvfit.errors import MismatchError, OptionError, StoreError
from kvfit.fit.stats import digests
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.merge import merge
from kvfit.fit.stats.store import Accumulator, Store
from kvfit.spec import KINDS

SIZES = [20, 33, 8, 45, 12, 60, 5, 27, 31]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as path:
        yield path


def shards(folder: Path, given: list[Batch], cuts: list[int], **options: object) -> list[Path]:
    """One store per run of batches; each takes its shift from its own first batch."""
    paths = []
    for rank, (a, b) in enumerate(itertools.pairwise([0, *cuts, len(given)])):
        paths.append(folder / f"shard-{rank}.zarr")
        capture(paths[-1], given[a:b], recipe={"seed": 0, "part": {"rank": rank}}, **options)
    return paths


def numbers(store: Store) -> list[torch.Tensor]:
    found = []
    for split in ("fit", "holdout"):
        for kind in KINDS:
            blocks = [(kind, i) for i in range(3)]
            found += [store.source_scatter(split, a, b) for a in blocks for b in blocks]
            found += [store.cross_scatter(split, a, (kind, t)) for a in blocks for t in range(4)]
            found += [store.target_scatter(split, (kind, t)) for t in range(4)]
            found += [store.target_mean(split, (kind, t)) for t in range(4)] + [store.source_mean(split, a) for a in blocks]
    return found


def assert_same(one: Store, other: Store, tolerance: float = 1e-6) -> None:
    assert one.record.tokens == other.record.tokens
    assert one.recipe == other.recipe
    for x, y in zip(numbers(one), numbers(other), strict=True):
        assert (x - y).abs().max() <= tolerance * x.abs().max()


@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("stats_dtype", ["float32", "float64"])
@pytest.mark.parametrize("cuts", [[3], [1, 2], [0, 3, 3, 8], [9]])
def test_shards_merge_to_the_one_shot_answer(tmp_path: Path, mean: float, stats_dtype: str, cuts: list[int]) -> None:
    given = batches(SIZES, mean=mean)
    merged = merge(shards(tmp_path, given, cuts, stats_dtype=stats_dtype), tmp_path / "out.zarr")
    merged.verify()
    assert max(worst_error(merged, given, split) for split in ("fit", "holdout", "all")) < 1e-6


def test_lexical_blocks_merge_and_must_agree(tmp_path: Path) -> None:
    given = batches(SIZES, mean=100.0, n_lags=2)
    paths = shards(tmp_path, given, [2, 5], lexical_lags=(0, 2))
    merged = merge(paths, tmp_path / "out.zarr")
    merged.verify()
    assert merged.lexical_lags == (0, 2)
    assert max(worst_error(merged, given, split) for split in ("fit", "holdout", "all")) < 1e-6
    capture(tmp_path / "other.zarr", batches(SIZES), recipe={"seed": 0})
    with pytest.raises(MismatchError, match=r"lexical_lags"):
        merge([paths[0], tmp_path / "other.zarr"], tmp_path / "no.zarr")


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_weights_count_a_store_as_often(tmp_path: Path, mean: float) -> None:
    """With weights 1 and a half, means are those of the first store's rows twice, but for the rounding of half a token."""
    given = batches(SIZES, mean=mean)
    paths = shards(tmp_path, given, [4])
    half = merge(paths, tmp_path / "half.zarr", weights=[1, 0.5])
    whole = given[:4] * 2 + given[4:]
    for a in (("keys", 0), ("values", 2)):
        x = torch.cat([b[1][a[0]][a[1]].double() for b in whole if b[0] == "fit"])
        error = (half.source_mean("fit", a) - x.mean(0)).abs() / x.std(0)
        assert error.max() < 0.5 / half.count("fit") * 4
        # The scatter is half of that, as the count is.
        scale = half.count("fit") / len(x)
        wanted = (x - x.mean(0)).T @ (x - x.mean(0)) * scale
        error = (half.source_scatter("fit", a, a) - wanted).abs() / wanted.diagonal().max()
        assert error.max() < 2 / half.count("fit")
    recipes = [merge(order, tmp_path / f"{n}.zarr", weights=w).recipe
               for n, (order, w) in enumerate(((paths, [1, 3]), (paths[::-1], [3, 1])))]  # fmt: skip
    assert recipes[0] == recipes[1]
    assert sorted(entry["weight"] for entry in recipes[0]["weights"]) == [1.0, 3.0]


def test_weights_make_no_tokens(tmp_path: Path) -> None:
    """Verdicts ask how many tokens a map was fitted on; a weight of a hundred is no hundred times the text."""
    given = batches(SIZES)
    paths = shards(tmp_path, given, [4])
    plain = merge(paths, tmp_path / "plain.zarr")
    for name, weights in (("all", [100.0, 100.0]), ("few", [0.01, 0.01]), ("two", [2.0, 1.0]), ("half", [1.0, 0.5])):
        merged = merge(paths, tmp_path / f"{name}.zarr", weights=weights)
        merged.verify()
        for split in ("fit", "holdout"):
            own = [Store.open(path).count(split) for path in paths]
            assert merged.count(split) == (plain.count(split) if name in ("all", "few") else own[0] + round(own[1] / 2))
    two, half = (numbers(Store.open(tmp_path / f"{name}.zarr")) for name in ("two", "half"))
    assert all(torch.equal(x, y) for x, y in zip(two, half, strict=True))
    with pytest.raises(
        OptionError, match=r"--weights: found 0\.001 of the largest for .*shard-1.*count as none, needed a larger"
    ):
        merge(paths, tmp_path / "none.zarr", weights=[1000, 1])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_cannot_be_are_refused(tmp_path: Path, weights: list[float]) -> None:
    paths = shards(tmp_path, batches([5, 5]), [1])
    with pytest.raises(OptionError, match=r"--weights: found .*, needed 2 numbers above 0"):
        merge(paths, tmp_path / "out.zarr", weights=weights)
    assert not (tmp_path / "out.zarr").exists()


def drifting(mean_step: float) -> list[Batch]:
    """Batches whose mean moves on, so that every shard sits about another one."""
    given = batches(SIZES)
    for number, batch in enumerate(given):
        for side in batch[1:]:
            for tensor in (*side["keys"], *side["values"]):
                tensor += mean_step * (number // 3)
    return given


def test_shards_about_different_means_need_and_get_the_mean_term(tmp_path: Path) -> None:
    given = drifting(40.0)
    paths = shards(tmp_path, given, [3, 6])
    merged = merge(paths, tmp_path / "out.zarr")
    assert max(worst_error(merged, given, split) for split in ("fit", "holdout", "all")) < 1e-6
    within = sum(Store.open(path).target_scatter("fit", ("keys", 0)) for path in paths)
    assert (merged.target_scatter("fit", ("keys", 0)) > 2 * within).any()  # it is most of the scatter here


def test_the_order_of_the_paths_does_not_matter(tmp_path: Path) -> None:
    paths = shards(tmp_path, drifting(3.0), [2, 2, 6])
    results = [merge(order, tmp_path / f"out-{n}.zarr") for n, order in enumerate(itertools.permutations(paths)) if n % 5 == 0]
    assert len(results) == 5
    for other in results[1:]:
        assert_same(results[0], other)


def test_merging_in_steps_is_merging_at_once(tmp_path: Path) -> None:
    a, b, c = shards(tmp_path, drifting(3.0), [3, 6], inputs="both", stats_dtype="float64")
    at_once = merge([a, b, c], tmp_path / "abc.zarr")
    merge([a, b], tmp_path / "ab.zarr")
    merge([b, c], tmp_path / "bc.zarr")
    assert_same(at_once, merge([tmp_path / "ab.zarr", c], tmp_path / "ab-c.zarr"), 1e-12)
    assert_same(at_once, merge([a, tmp_path / "bc.zarr"], tmp_path / "a-bc.zarr"), 1e-12)
    assert at_once.recipe["part"] == {"merged": [{"rank": 0}, {"rank": 1}, {"rank": 2}]}


def test_empty_stores_are_the_neutral_element(tmp_path: Path) -> None:
    given = batches(SIZES)
    full, empty = shards(tmp_path, given, [len(SIZES)])
    merged = merge([empty, full], tmp_path / "out.zarr")
    for x, y in zip(numbers(merged), numbers(Store.open(full)), strict=True):
        assert (x - y).abs().max() <= 1e-6 * x.abs().max()
    nothing = merge([empty], tmp_path / "nothing.zarr")
    assert nothing.count("all") == 0
    assert not nothing.source_scatter("all", ("keys", 0), ("keys", 0)).any()


def test_batches_and_quarantine_add_up(tmp_path: Path) -> None:
    first = batches([3] * 120)
    first[7][1]["values"][2][0, 0] = float("nan")
    capture(tmp_path / "a.zarr", first)
    capture(tmp_path / "b.zarr", batches([3] * 10, seed=1))
    found = merge([tmp_path / "b.zarr", tmp_path / "a.zarr"], tmp_path / "out.zarr").quarantined()
    assert found == {"seen": 130, "quarantined": 1, "first": {"model": "source", "kind": "values", "layer_index": 2}}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"recipe": {"seed": 1}}, r"recipe\.seed = 0, .* has 1"),
        ({"recipe": {"seed": 0, "text": "x"}}, r"recipe\.text = '<nothing>'"),
        ({"stats_dtype": "float64"}, "stats_dtype = 'float32'"),
        ({"inputs": "both"}, "inputs = 'same'"),
        ({"source": model(3, 4, 4)}, r"source\.n_heads = 2, .* has 4"),
    ],
)
def test_stores_that_differ_are_refused_by_field(tmp_path: Path, options: dict[str, object], field: str) -> None:
    capture(tmp_path / "a.zarr", batches([9, 9, 9]))
    capture(
        tmp_path / "b.zarr", batches([9, 9, 9], **({"source": options["source"]} if "source" in options else {})), **options
    )
    with pytest.raises(MismatchError, match=field):
        merge([tmp_path / "a.zarr", tmp_path / "b.zarr"], tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def test_one_part_is_not_counted_twice(tmp_path: Path) -> None:
    a, b = shards(tmp_path, batches(SIZES), [4])
    os.symlink(a, tmp_path / "alias.zarr")
    for paths in ([a, b, a], [a, tmp_path / "alias.zarr"]):
        with pytest.raises(MismatchError, match="hold the same part"):
            merge(paths, tmp_path / "out.zarr")
    merge([a, b], tmp_path / "ab.zarr")
    with pytest.raises(MismatchError, match="hold the same part"):
        merge([tmp_path / "ab.zarr", b], tmp_path / "out.zarr")


def captured(path: Path, rank: int, texts: str | None) -> Path:
    """A store whose cursor says which documents are in it, one per letter."""
    cursor = {"sequences": 9, "captured": "".join(map(digests.digest, texts))} if texts is not None else 7
    with Accumulator.create(path, Layout(SOURCE, TARGET), recipe={"part": {"rank": rank}}) as accumulator:
        for split, source, target in batches(SIZES):
            accumulator.add(split, source, target, cursor)
        accumulator.finish(cursor)
    return path


def test_the_same_text_twice_is_refused(tmp_path: Path) -> None:
    a, b, c = (
        captured(tmp_path / name, rank, texts) for rank, (name, texts) in enumerate({"a": "abc", "b": "de", "c": "fec"}.items())
    )
    with pytest.raises(MismatchError, match=r"c and \S+b hold the same text: found 2 documents .* first its number 1,"):
        merge([a, b, c], tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()
    merged = merge([b, a], tmp_path / "ab.zarr")
    assert merged.record.cursor == {"sequences": 9, "captured": "".join(sorted(map(digests.digest, "abcde")))}
    with pytest.raises(MismatchError, match="found 2 documents"):
        merge([tmp_path / "ab.zarr", c], tmp_path / "out.zarr")


def test_documents_are_known_where_every_part_knows_its_own(tmp_path: Path) -> None:
    a, b = captured(tmp_path / "a", 0, "abc"), captured(tmp_path / "b", 1, None)
    assert digests.of_cursor(merge([a, b], tmp_path / "ab.zarr").record.cursor) is None


def test_nothing_is_left_of_a_merge_that_failed(tmp_path: Path) -> None:
    a, b = shards(tmp_path, batches(SIZES), [4])
    chunk = next(file for file in sorted(b.rglob("c.*")) if "cross" in file.as_posix())
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreError, match="cross/keys-keys does not match its digest"):
        merge([a, b], tmp_path / "out.zarr")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(StoreError, match="exists"):
        merge([a], b)
    with pytest.raises(MismatchError, match="no store to merge"):
        merge([], tmp_path / "out.zarr")
    capture(tmp_path / "open.zarr", batches(SIZES), finish=False)
    with pytest.raises(StoreError, match="is incomplete"):
        merge([a, tmp_path / "open.zarr"], tmp_path / "out.zarr")


def test_what_a_killed_merge_left_goes_with_the_next(tmp_path: Path) -> None:
    parts = shards(tmp_path, batches(SIZES), [4])
    child = os.fork()
    if child == 0:
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        merge(parts, tmp_path / "out.zarr")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = sorted(set(tmp_path.iterdir()) - set(parts))
    assert left
    assert not (tmp_path / "out.zarr").exists()
    merge(parts, tmp_path / "out.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.zarr", *(path.name for path in parts)]
    merge(parts, tmp_path / "plain.zarr")
    assert_same(Store.open(tmp_path / "out.zarr"), Store.open(tmp_path / "plain.zarr"), 0)
