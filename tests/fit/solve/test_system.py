"""What the reader makes of a store, against the rows; and what it reads and keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import Planted, plant

from kvfit.errors import SolveError
from kvfit.fit.solve.reader import Reader, least_bytes
from kvfit.fit.solve.regression import solutions
from kvfit.fit.solve.system import input_set, source_head
from kvfit.fit.stats.store import CACHE_BYTES, Split, Store
from kvfit.spec import KINDS, Inputs, Support

SPLITS: tuple[Split, Split] = ("fit", "holdout")


@pytest.fixture(scope="module")
def pair() -> Planted:
    return plant([(0, 1), (2,), (1, 3)], target_heads=(4, 3))


@pytest.fixture(scope="module")
def store(pair: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.store(tmp_path_factory.mktemp("planted") / "pair.zarr")


def centred(rows: np.ndarray) -> np.ndarray:
    return rows - rows.mean(0)


@pytest.mark.parametrize("support", ["full", "head"])
@pytest.mark.parametrize("inputs", ["same", "both"])
def test_panels_are_those_of_the_rows(pair: Planted, store: Path, support: Support, inputs: Inputs) -> None:
    reader = Reader(Store.open(store))
    read = input_set(reader.models, "values", (1, 3), support, inputs)
    kinds = ("values",) if inputs == "same" else KINDS
    for split in SPLITS:
        for head, system in enumerate(reader.systems(read, [("values", 2), ("values", 0)], split)):
            target = None if support == "full" else head
            x = pair.inputs(split, kinds, (1, 3), None if target is None else head // 2)  # 2 source heads, 4 target heads
            y = np.concatenate([pair.outputs(split, "values", t, target) for t in (2, 0)], 1)
            size = float(np.abs(centred(x).T @ centred(x)).max())
            np.testing.assert_allclose(system.scatter, centred(x).T @ centred(x), rtol=1e-6, atol=1e-6 * size)
            size = float(np.abs(centred(x).T @ centred(y)).max())
            np.testing.assert_allclose(system.cross, centred(x).T @ centred(y), rtol=1e-6, atol=1e-6 * size)
            np.testing.assert_allclose(system.target_square, (centred(y) ** 2).sum(0), rtol=1e-6)
            np.testing.assert_allclose(system.source_mean, x.mean(0), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(system.target_mean, y.mean(0), rtol=1e-6, atol=1e-6)
            assert system.count == len(x)


def test_each_group_of_inputs_has_its_own_length(store: Path) -> None:
    models = Reader(Store.open(store)).models
    assert input_set(models, "values", (1, 3)).groups == (12,)
    assert input_set(models, "values", (1, 3), "full", "both").groups == (12, 12)
    assert input_set(models, "values", (1, 3), "head", "both").groups == (6, 6)
    assert input_set(models, "keys", (1,), "full", "both", lexical=(0, 1)).groups == (6, 6, 12, 12, 12, 12)
    assert input_set(models, "keys", (1,), "full", "same", lexical=(0,)).n_inputs == 6 + 24


@pytest.mark.parametrize(
    ("n_source", "n_target", "wanted"),
    [(4, 4, [0, 1, 2, 3]), (2, 4, [0, 0, 1, 1]), (4, 2, [0, 2]), (3, 4, [0, 0, 1, 2]), (1, 3, [0, 0, 0])],
)
def test_matched_heads_follow_from_the_counts(n_source: int, n_target: int, wanted: list[int]) -> None:
    assert [source_head(head, n_source, n_target) for head in range(n_target)] == wanted


TARGETS = [("keys", 0), ("keys", 1), ("keys", 2)]


@pytest.mark.parametrize("support", ["full", "head"])
def test_any_budget_that_suffices_gives_the_same_solution(store: Path, support: Support) -> None:
    found = []
    for extra in (0, 1000, 10**9):
        reader = Reader(Store.open(store))
        read = input_set(reader.models, "keys", range(4), support, "both")
        reader.memory_budget = least_bytes(read, "float64") + extra
        parts = list(solutions(reader, read, TARGETS, 0.01))
        found.append([part.weight(i) for part in parts for i in range(len(part.targets))])
        assert [target for part in parts for target in part.targets] == TARGETS
        assert len(parts) == (1 if extra == 10**9 else 3)
    for weights in found[:2]:
        for a, b in zip(weights, found[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_too_small_a_budget_is_refused_with_the_number_that_is_needed(store: Path) -> None:
    reader = Reader(Store.open(store))
    read = input_set(reader.models, "keys", range(4))
    # The scatters of both splits and the factor, five matrices of inputs by one block's outputs, and the blocks being read.
    assert least_bytes(read, "float64") == 3 * 8 * 24**2 + 5 * 8 * 24 * 12 + CACHE_BYTES + 6 * 8 * 12 * 6
    reader.memory_budget = least_bytes(read, "float64")
    reader.batches(read, TARGETS)
    reader.memory_budget -= 1
    with pytest.raises(SolveError, match=r"found 0.06 GiB, needed 0.06 GiB to factor 24 inputs \(4 source layers\): raise it"):
        reader.batches(read, TARGETS)


class Recorded(Store):
    """A store that says which blocks were asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[tuple[Any, ...]] = []

    def source_scatter(self, split: Split, a: Any, b: Any) -> torch.Tensor:
        self.asked.append((split, a, b))
        return super().source_scatter(split, a, b)

    def cross_scatter(self, split: Split, a: Any, b: Any) -> torch.Tensor:
        self.asked.append((split, a, b, "target"))
        return super().cross_scatter(split, a, b)


@pytest.mark.parametrize("support", ["full", "head"])
def test_each_needed_block_is_read_once_and_no_other(store: Path, support: Support) -> None:
    opened = Recorded.open(store)
    assert isinstance(opened, Recorded)
    reader = Reader(opened)
    for penalty in (0.1, 0.01):
        list(solutions(reader, input_set(reader.models, "keys", (1, 3), support), [("keys", 2)], penalty))
    blocks = [(("keys", 1), ("keys", 1)), (("keys", 1), ("keys", 3)), (("keys", 3), ("keys", 3))]
    scatters = [asked for asked in opened.asked if len(asked) == 3]
    assert sorted(scatters) == sorted((split, a, b) for split in SPLITS for a, b in blocks)
    crosses = {asked for asked in opened.asked if len(asked) == 4}
    assert crosses == {(split, ("keys", i), ("keys", 2), "target") for split in SPLITS for i in (1, 3)}


# Of the process's own memory: the peak that `resource` gives begins with that of the process that started it.
PEAK = """
import sys
from pathlib import Path
from kvfit.fit.solve.solve import Options, solve
import torch
torch.linalg.cholesky(torch.eye(64, dtype=torch.float64))
def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
before = memory("VmRSS")
solve(sys.argv[1], sys.argv[2], options=Options(penalty=0.01), memory_budget=int(sys.argv[3]), progress=False)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_stays_within_the_budget(tmp_path: Path) -> None:
    pair = plant([(0,)] * 4, n_source_layers=8, source_heads=(4, 64), target_heads=(4, 64), n_tokens=(300, 100))
    store = pair.store(tmp_path / "s.zarr", inputs="same")
    reader = Reader(Store.open(store))
    needed = least_bytes(input_set(reader.models, "keys", range(8)), "float64")

    # The allocator gives large blocks back at once only above a threshold that it raises as it goes, to 64 MB.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}

    def peak(budget: int) -> int:
        run = [sys.executable, "-c", PEAK, str(store), str(tmp_path / f"b{budget}"), str(budget)]
        return int(subprocess.run(run, check=True, capture_output=True, text=True, env=environment).stdout)

    tight, wide = peak(needed), peak(4 * needed)
    assert tight < needed + 48e6, f"{tight / 1e6:.0f} MB of {needed / 1e6:.0f} MB"
    assert wide > tight + 20e6, "the budget made no difference, so this test shows nothing"
