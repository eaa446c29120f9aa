"""The store's format and read side: exactness against a float64 oracle, exact bytes, and refusals by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_pair import SOURCE, TARGET, Oracle, batches, capture, model, scratch, worst_error

from kvfit.errors import KvfitError, MismatchError, StoreError
from kvfit.fit.stats import moments
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Accumulator, Store
from kvfit.spec import KINDS

SIZES = [9, 30, 1, 17, 64, 40, 3, 25, 12, 200, 31]
BAR = 1e-6


def captured(path: Path, **options: object) -> Store:
    capture(path, batches(SIZES), **options)
    return Store.open(path)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as path:
        yield path


@pytest.fixture(scope="module")
def finished() -> Iterator[Path]:
    with scratch() as path:
        capture(path / "pair.zarr", batches(SIZES), inputs="both")
        yield path / "pair.zarr"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy.zarr"))


@pytest.mark.parametrize(
    ("mean", "dtype"),
    [(0.0, torch.float32), (1e4, torch.float32), (0.0, torch.bfloat16), (4.0, torch.bfloat16), (1e4, torch.bfloat16)],
)
@pytest.mark.parametrize(("stats_dtype", "n_buffer"), [("float32", 64), ("float32", 1000), ("float64", 150)])
def test_equals_a_float64_oracle(tmp_path: Path, mean: float, dtype: torch.dtype, stats_dtype: str, n_buffer: int) -> None:
    """Also where a buffer holds several batches of both splits."""
    rows = batches(SIZES, mean=mean, dtype=dtype)
    capture(tmp_path / "s.zarr", rows, stats_dtype=stats_dtype, n_buffer=n_buffer)
    store = Store.open(tmp_path / "s.zarr")
    assert max(worst_error(store, rows, split) for split in ("fit", "holdout", "all")) < BAR


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 90), min_size=2, max_size=12).filter(lambda sizes: sizes[0] > 1 and sum(sizes[2::3]) > 1),
    n_buffer=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_any_batch_and_buffer_size(tmp_path: Path, sizes: list[int], n_buffer: int, seed: int) -> None:
    path = tmp_path / "any.zarr"
    shutil.rmtree(path, ignore_errors=True)
    rows = batches(sizes, seed=seed, mean=1e4)
    capture(path, rows, n_buffer=max(n_buffer, max(sizes) // 4 + 1))
    assert worst_error(Store.open(path), rows, "all") < BAR


def test_float64_activations_keep_what_float32_would_lose(tmp_path: Path) -> None:
    rows = batches(SIZES, mean=1e9, dtype=torch.float64)
    capture(tmp_path / "s.zarr", rows)
    assert worst_error(Store.open(tmp_path / "s.zarr"), rows, "fit") < BAR


def test_autocast_of_the_caller_does_not_reach_the_sums(tmp_path: Path) -> None:
    rows = batches(SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16  # it is on
        capture(tmp_path / "s.zarr", rows)
    assert worst_error(Store.open(tmp_path / "s.zarr"), rows, "fit") < BAR


def test_without_the_shift_the_bar_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison above does fail when the shift does nothing."""
    rows = batches(SIZES, mean=1e4)
    monkeypatch.setattr(moments, "shift_of", lambda x: torch.zeros(x.shape[1]))
    capture(tmp_path / "s.zarr", rows)
    assert worst_error(Store.open(tmp_path / "s.zarr"), rows, "fit") > 1000 * BAR


def test_keys_by_values_blocks(finished: Path) -> None:
    store = Store.open(finished)
    assert worst_error(store, batches(SIZES), "fit", both=True) < BAR
    a, b = ("values", 0), ("keys", 2)
    assert torch.equal(store.source_scatter("fit", a, b), store.source_scatter("fit", b, a).T)


@pytest.mark.parametrize("inputs", ["same", "both"])
def test_lexical_blocks(tmp_path: Path, inputs: str) -> None:
    """Three lags of 24 features each beside the source's 16, in several flushes."""
    rows = batches(SIZES, mean=4.0, n_lags=3)
    capture(tmp_path / "s.zarr", rows, inputs=inputs, lexical_lags=(0, 1, 3), n_buffer=64)
    store = Store.open(tmp_path / "s.zarr")
    store.verify()
    assert store.lexical_lags == (0, 1, 3)
    assert max(worst_error(store, rows, split, both=inputs == "both") for split in ("fit", "holdout", "all")) < BAR
    a, b = ("lexical", 2), ("values", 1)
    assert store.source_scatter("fit", a, b).shape == (24, 16)
    assert torch.equal(store.source_scatter("fit", a, b), store.source_scatter("fit", b, a).T)
    with pytest.raises(StoreError, match=r"has no lexical block 3, its lags are 0, 1, 3"):
        store.source_mean("fit", ("lexical", 3))
    with pytest.raises(StoreError, match="has no target block"):
        store.target_mean("fit", ("lexical", 0))
    with Accumulator.create(tmp_path / "t.zarr", Layout(SOURCE, TARGET, lexical_lags=(0, 1, 3)), recipe={}) as accumulator:
        _, source, target = batches([4])[0]
        with pytest.raises(MismatchError, match="source gave lexical of 0 lags, the store needs 3"):
            accumulator.add("fit", source, target, None)


def test_a_store_without_them_says_so(finished: Path) -> None:
    store = Store.open(finished)
    assert store.lexical_lags == ()
    with pytest.raises(StoreError, match="its lags are none; capture with --lexical"):
        store.source_scatter("fit", ("keys", 0), ("lexical", 0))


def as_version_1(path: Path) -> None:
    """Rewrite a record as kvfit wrote it before there were lexical inputs."""
    record = json.loads((path / "commit.json").read_bytes())["record"]
    del record["lexical_lags"]
    record["format_version"] = 1
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "commit.json").write_text(json.dumps({"digest": digest, "record": record}))


def test_stores_of_version_1_open_and_resume(tmp_path: Path) -> None:
    rows = batches(SIZES)
    for name in ("new", "old"):
        capture(tmp_path / name, rows[:-1], finish=False)
    as_version_1(tmp_path / "old")
    for name in ("new", "old"):
        with Accumulator.resume(tmp_path / name, Layout(SOURCE, TARGET), recipe={"seed": 0}) as accumulator:
            for number, (split, source, target) in enumerate(rows):
                if number >= accumulator.cursor:
                    accumulator.add(split, source, target, number + 1)
            accumulator.finish(len(rows))
    new, old = (Store.open(tmp_path / name) for name in ("new", "old"))
    assert old.record == new.record
    as_version_1(tmp_path / "old")
    again = Store.open(tmp_path / "old")
    again.verify()
    assert (again.lexical_lags, again.record) == ((), new.record)


def test_the_same_blocks_are_not_in_a_store_of_inputs_same(tmp_path: Path) -> None:
    store = captured(tmp_path / "s.zarr")
    with pytest.raises(StoreError, match="keys by values blocks"):
        store.cross_scatter("fit", ("keys", 0), ("values", 0))


@pytest.mark.parametrize("block", [("keys", 3), ("keys", -1), ("queries", 0)])
def test_unknown_blocks_are_refused(finished: Path, block: tuple[str, int]) -> None:
    with pytest.raises(StoreError, match="source block"):
        Store.open(finished).source_mean("fit", block)
    with pytest.raises(StoreError, match="split 'test'"):
        Store.open(finished).count("test")


def test_an_empty_split_is_zero_and_counted_so(tmp_path: Path) -> None:
    rows = batches([20, 30], holdout_every=9)
    capture(tmp_path / "s.zarr", rows)
    store = Store.open(tmp_path / "s.zarr")
    assert (store.count("fit"), store.count("holdout"), store.count("all")) == (50, 0, 50)
    assert not store.source_scatter("holdout", ("keys", 0), ("keys", 1)).any()
    assert torch.equal(
        store.source_scatter("all", ("keys", 0), ("keys", 1)), store.source_scatter("fit", ("keys", 0), ("keys", 1))
    )
    assert not list((tmp_path / "s.zarr" / "holdout").rglob("c.*"))


def test_layers_of_different_shape_and_a_dead_feature(tmp_path: Path) -> None:
    rows = batches([40, 40, 40])
    for _, source, _ in rows:
        source["keys"][1][:, 5] = -7.25
    capture(tmp_path / "s.zarr", rows)
    store = Store.open(tmp_path / "s.zarr")
    scatter = store.source_scatter("all", ("keys", 1), ("keys", 1))
    assert not scatter[5].any()
    assert not scatter[:, 5].any()
    assert store.source_mean("all", ("keys", 1))[5] == -7.25
    assert store.source_scatter("fit", ("keys", 0), ("keys", 2)).shape == (16, 16)
    assert store.cross_scatter("fit", ("keys", 0), ("keys", 3)).shape == (16, 12)
    assert torch.equal(scatter, scatter.T)


def test_zarr_reads_the_same_numbers(finished: Path) -> None:
    store, group = Store.open(finished), zarr.open_group(str(finished), mode="r")
    generation = group[f"fit/{store.record.live.fit}"]
    assert group.attrs["format"] == "kvfit-store"
    for array in store.record.layout.blocks:
        stored = generation[array.name]
        assert stored.shape == array.shape
        assert stored.nchunks_initialized == len(array.chunks)
        role = store.source_scatter if array.role == "source" else store.cross_scatter
        for pair, (i, j) in enumerate(array.pairs):
            sides = zip(array.vectors, (i, j), strict=True)
            left, right = (generation[f"{name}_sum"][:][place, number] for (name, place), number in sides)
            centred = stored[pair].astype("f8") - np.outer(left, right) / store.count("fit")
            found = role("fit", (array.groups[0], i), (array.groups[1], j)).numpy()
            np.testing.assert_allclose(found, centred, rtol=0, atol=1e-5 * np.abs(centred).max())


def test_exact_bytes_of_a_chunk_and_its_digest(finished: Path) -> None:
    rows = Oracle.of(batches(SIZES), "fit")
    store = Store.open(finished)
    path = f"fit/{store.record.live.fit}/source_sum"
    data = (finished / path / "c.0.0.0").read_bytes()
    assert hashlib.sha256(data).hexdigest() == store.record.digests[path][0]
    shift = np.frombuffer((finished / "shift/source/c.0.0.0").read_bytes(), "<f4").reshape(2, 3, 16)
    sums = np.frombuffer(data, "<f8").reshape(2, 3, 16)
    for number, kind in enumerate(KINDS):
        for layer_index in range(3):
            expected = (rows.source[kind, layer_index].numpy() - shift[number, layer_index]).sum(0)
            np.testing.assert_allclose(sums[number, layer_index], expected, rtol=1e-6, atol=1e-4)
    first = batches(SIZES)[0][1]["values"][2].double()
    assert (np.abs(shift[1, 2] - first.mean(0).numpy()) <= first.std(0).numpy() / 16).all()


def test_files_of_a_finished_store_are_those_of_the_format(finished: Path) -> None:
    record = Store.open(finished).record
    chunks = {p.relative_to(finished).as_posix() for p in finished.rglob("*") if p.is_file() and p.name != "zarr.json"}
    named = {f"{path}/{chunk.key}" for path, array in record.live_arrays().items() for chunk in array.chunks}
    assert chunks == named | {"commit.json", "lock"}


def test_bytes_read_and_cache(finished: Path) -> None:
    store = Store.open(finished)
    store.source_scatter("fit", ("keys", 0), ("keys", 1))
    before = store.bytes_read
    store.source_scatter("fit", ("keys", 1), ("keys", 2))
    assert store.bytes_read == before > 0
    store.verify()
    assert store.bytes_read > before


# -- damage -----------------------------------------------------------------------------------------------------------


def one_chunk(path: Path) -> tuple[Path, str]:
    store = Store.open(path)
    name = f"fit/{store.record.live.fit}/cross/keys-keys"
    return path / name / "c.0.0.0", name


def read_it(path: Path) -> None:
    Store.open(path).cross_scatter("fit", ("keys", 0), ("keys", 0))


def test_a_deleted_chunk_is_refused_by_name(copy: Path) -> None:
    chunk, name = one_chunk(copy)
    chunk.unlink()
    assert not zarr.open_group(str(copy), mode="r")[name][:].any()  # what a plain reader would take for the truth
    with pytest.raises(StoreError, match=rf"chunk c\.0\.0\.0 of {name} is missing"):
        read_it(copy)


def test_a_truncated_chunk_is_refused_by_name(copy: Path) -> None:
    chunk, name = one_chunk(copy)
    chunk.write_bytes(chunk.read_bytes()[:-4])
    with pytest.raises(StoreError, match=rf"{name} has \d+ bytes, needs \d+"):
        read_it(copy)


def test_a_flipped_bit_is_refused_by_name(copy: Path) -> None:
    chunk, name = one_chunk(copy)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(StoreError, match=rf"{name} does not match its digest"):
        read_it(copy)
    with pytest.raises(StoreError, match=name):
        Store.open(copy).verify()


def test_every_chunk_is_watched(copy: Path) -> None:
    chunks = list(copy.rglob("c.*"))
    assert len(chunks) == 22  # two shifts, and seven arrays of blocks and three of sums for each of two splits
    for chunk in chunks:
        data = chunk.read_bytes()
        chunk.write_bytes(bytes([data[0] ^ 128]) + data[1:])
        with pytest.raises(StoreError, match=chunk.parent.name):
            Store.open(copy).verify()
        chunk.write_bytes(data)
    Store.open(copy).verify()


def rewrite(path: Path, **changes: object) -> None:
    """Change the record and give it a digest that is right."""
    record = {**json.loads((path / "commit.json").read_bytes())["record"], **changes}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "commit.json").write_text(json.dumps({"digest": digest, "record": record}))


def test_the_records_of_another_writer_are_read(copy: Path) -> None:
    """The digest rule of the format page, from its words alone."""
    rewrite(copy, cursor={"name": "Zoë"})
    assert Store.open(copy).record.cursor == {"name": "Zoë"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3, "kvfit_version": "9.9"}, "format version 3; this kvfit reads 2; update to kvfit 9.9"),
        ({"finished": False}, "is incomplete: 432 tokens committed"),
        ({"surplus": 1}, "surplus"),
        ({"inputs": "all"}, "inputs"),
        ({"tokens": {"fit": 0, "holdout": 0}}, "live.fit"),
        ({"tokens": {"fit": 1.5, "holdout": 0}}, "tokens.fit"),
        ({"live": {"shift": True, "fit": "c", "holdout": "a"}}, "live.fit"),
        ({"digests": {}}, "digests"),
        ({"recipe": []}, "recipe"),
    ],
)
def test_records_that_cannot_be_are_refused_by_field(copy: Path, changes: dict[str, object], message: str) -> None:
    rewrite(copy, **changes)
    with pytest.raises(StoreError, match=message):
        Store.open(copy)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"record": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_torn_record_is_refused(copy: Path, content: bytes) -> None:
    (copy / "commit.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"commit\.json is damaged"):
        Store.open(copy)


def test_an_altered_record_is_refused(copy: Path) -> None:
    path = copy / "commit.json"
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(StoreError, match="does not match its digest"):
        Store.open(copy)


def test_what_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.zarr does not exist"):
        Store.open(tmp_path / "none.zarr")
    with pytest.raises(StoreError, match=r"has no commit\.json"):
        Store.open(tmp_path)
    assert issubclass(StoreError, (KvfitError, ValueError))


# -- chunks -----------------------------------------------------------------------------------------------------------


def test_chunks_are_4_to_64_megabytes_where_shapes_are_that_large() -> None:
    large = Layout(model(40, 8, 128), model(64, 8, 128), "same", "float32")
    for array in large.blocks:
        assert 4e6 <= array.chunk_bytes <= 64e6
    assert 2 * large.split_bytes == pytest.approx(2 * 2 * 4 * 2**20 * (40 * 41 / 2 + 40 * 64), rel=0.01)
    wide = Layout(model(2, 64, 128), model(2, 64, 128), "same", "float64")
    assert all(array.chunk_shape[1] < array.rows and array.chunk_bytes <= 64e6 for array in wide.blocks)
    narrow = Layout(model(12, 4, 64), model(12, 4, 64), "same", "float32")
    assert all(4e6 <= array.chunk_bytes < 4.3e6 for array in narrow.blocks)


@pytest.mark.parametrize("inputs", ["same", "both"])
@pytest.mark.parametrize(
    "geometry", [(SOURCE, TARGET), (model(20, 4, 64), model(9, 8, 32)), (model(2, 70, 64), model(3, 64, 64))]
)
def test_chunks_tile_every_array(inputs: str, geometry: tuple) -> None:
    for array in Layout(*geometry, inputs, "float32").blocks:
        assert len(array.pairs) == array.n_pairs
        assert [array.pair_index(*pair) for pair in array.pairs] == list(range(array.n_pairs))
        covered = np.zeros((array.n_pairs, array.rows), int)
        for number, chunk in enumerate(array.chunks):
            covered[chunk.first : chunk.last, chunk.top : chunk.bottom] += 1
            assert all(number in array.chunk_numbers(pair) for pair in range(chunk.first, chunk.last))
        assert (covered == 1).all()
        assert len({chunk.key for chunk in array.chunks}) == len(array.chunks)


def test_bands_of_rows_and_chunks_of_many_blocks_give_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths that only wide or many layers take, by making the limits small."""
    rows = batches(SIZES)
    results = []
    for name, smallest, largest, unit in (
        ("one", 4_000_000, 64_000_000, 2**23),
        ("bands", 1, 300, 1),
        ("few", 2500, 10**6, 2000),
    ):
        monkeypatch.setattr("kvfit.fit.stats.layout.SMALLEST_CHUNK", smallest)
        monkeypatch.setattr("kvfit.fit.stats.layout.LARGEST_CHUNK", largest)
        monkeypatch.setattr("kvfit.fit.stats.updater.UNIT_NUMBERS", unit)
        path = tmp_path / name
        capture(path, rows, inputs="both")
        store = Store.open(path)
        results.append(len(list(path.rglob("c.*"))))
        assert worst_error(store, rows, "fit", both=True) < BAR
        assert worst_error(store, rows, "holdout", both=True) < BAR
    assert results[0] < results[2] < results[1]
