"""Statistics of models whose heads differ by layer: every number of a store against float64 sums over the rows."""

from pathlib import Path

import pytest
import torch
from random_pair import batches, capture, model, scratch, worst_error

from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.merge import merge
from kvfit.fit.stats.store import Accumulator, Store

SOURCE = model(3, 2, 4, ((2, 4, 4), (1, 12, 6), (3, 2, 2)))
TARGET = model(2, 1, 6, ((1, 6, 4), (2, 5, 5)))
SIZES = [40, 17, 30, 25, 33, 20]
OPTIONS = {"source": SOURCE, "target": TARGET}


@pytest.mark.parametrize("inputs", ["same", "both"])
@pytest.mark.parametrize("lags", [(), (0, 2)])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_every_block_has_its_own_width_and_the_right_numbers(inputs: str, lags: tuple[int, ...], mean: float) -> None:
    given = batches(SIZES, mean=mean, source=SOURCE, target=TARGET, n_lags=len(lags))
    with scratch() as folder:
        capture(folder / "s.zarr", given, inputs=inputs, lexical_lags=lags, stats_dtype="float64", **OPTIONS)
        store = Store.open(folder / "s.zarr")
        store.verify()
        assert (store.source, store.target) == (SOURCE, TARGET)
        for split in ("fit", "holdout", "all"):
            assert worst_error(store, given, split, both=inputs == "both") < 1e-6
        assert store.source_scatter("fit", ("keys", 0), ("keys", 2)).shape == (8, 6)
        assert store.cross_scatter("fit", ("values", 1), ("values", 0)).shape == (6, 4)
        assert store.target_scatter("fit", ("values", 1)).shape == (10,)


def test_the_columns_that_no_layer_needs_are_zeros_on_disk() -> None:
    """The arrays are as wide as the widest layer; what is beyond a narrower one must not be anybody's numbers."""
    given = batches(SIZES, mean=3.0, source=SOURCE, target=TARGET)
    with scratch() as folder:
        capture(folder / "s.zarr", given, n_buffer=50, **OPTIONS)
        store = Store.open(folder / "s.zarr")
        layout = Layout(SOURCE, TARGET)
        for array in layout.blocks:
            left, right = SOURCE, SOURCE if array.role == "source" else TARGET
            for number, chunk in enumerate(array.chunks):
                numbers = torch.from_numpy(store.chunk("fit", array, number).copy())
                for pair in range(chunk.first, chunk.last):
                    i, j = array.pairs[pair]
                    rows, columns = left.width_of(array.groups[0], i), right.width_of(array.groups[1], j)
                    block = numbers[pair - chunk.first]
                    assert not block[rows:].any()
                    assert not block[:, columns:].any()
                    assert block[:rows, :columns].all()


def test_shards_merge(tmp_path: Path) -> None:
    given = batches(SIZES, mean=50.0, source=SOURCE, target=TARGET)
    capture(tmp_path / "a.zarr", given[:3], stats_dtype="float64", **OPTIONS)
    capture(tmp_path / "b.zarr", given[3:], stats_dtype="float64", **OPTIONS)
    merge([tmp_path / "a.zarr", tmp_path / "b.zarr"], tmp_path / "both.zarr")
    assert worst_error(Store.open(tmp_path / "both.zarr"), given, "all") < 1e-6


def test_an_interrupted_capture_ends_with_the_same_bits(tmp_path: Path) -> None:
    given = batches(SIZES, mean=5.0, source=SOURCE, target=TARGET)
    capture(tmp_path / "whole.zarr", given, n_buffer=50, **OPTIONS)
    capture(tmp_path / "parts.zarr", given[:4], n_buffer=50, finish=False, **OPTIONS)
    with Accumulator.resume(tmp_path / "parts.zarr", recipe={"seed": 0}) as accumulator:
        for number, (split, source, target) in enumerate(given):
            if number >= (accumulator.cursor or 0):
                accumulator.add(split, source, target, number + 1)
        accumulator.finish(len(given))
    whole, parts = (Store.open(tmp_path / f"{name}.zarr") for name in ("whole", "parts"))
    for a, b in ((("keys", 1), ("keys", 2)), (("values", 0), ("values", 1))):
        assert torch.equal(whole.source_scatter("all", a, b), parts.source_scatter("all", a, b))
        assert torch.equal(whole.source_mean("all", a), parts.source_mean("all", a))


def test_other_heads_are_another_layout(tmp_path: Path) -> None:
    capture(tmp_path / "s.zarr", batches(SIZES, source=SOURCE, target=TARGET), finish=False, **OPTIONS)
    with pytest.raises(ValueError, match="geometry"):
        Accumulator.resume(tmp_path / "s.zarr", Layout(model(3, 2, 4), TARGET), recipe={"seed": 0})
