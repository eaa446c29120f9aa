"""Which source layers are chosen, from scores and from planted stores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Planted, plant

from kvfit.bundle.bundle import Bundle
from kvfit.fit.solve import ridge
from kvfit.fit.solve.reader import Reader
from kvfit.fit.solve.select import Probe, greedy, probe, rank, ranking_scores, take
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.stats.store import Store
from kvfit.spec import KINDS


def test_rank_breaks_ties_towards_the_earlier_layer() -> None:
    scores = torch.tensor([[0.2, 0.9, 0.2, -3.0], [0.0, 0.0, 0.0, 0.0]])
    assert rank(scores) == [[1, 0, 2, 3], [0, 1, 2, 3]]
    assert take(rank(scores), 2) == [(0, 1), (0, 1)]
    assert take(rank(scores), 9) == [(0, 1, 2, 3)] * 2


def probes(seed: int) -> dict[Any, Probe]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    return {
        kind: Probe(
            {s: random(3, 5, 2) for s in ("fit", "holdout")}, {s: random(3, 5) for s in ("fit", "holdout")}, "full", 1e-3
        )
        for kind in KINDS
    }


def test_scores_that_rank() -> None:
    found = probes(0)
    apart = ranking_scores(found, "holdout", False)
    assert all(torch.equal(apart[kind], found[kind].layers["holdout"]) for kind in KINDS)
    shared = ranking_scores(found, "holdout", True)
    assert torch.equal(shared["keys"], (found["keys"].layers["holdout"] + found["values"].layers["holdout"]) / 2)
    paper = ranking_scores(found, "heo2026", True)
    for t in range(3):
        for i in range(5):
            heads = [float(found[kind].heads["fit"][t, i, h]) for kind in KINDS for h in range(2)]
            assert float(paper["values"][t, i]) == pytest.approx(sum(heads) / 4, rel=1e-6)


def test_greedy_takes_steps_together_and_asks_for_each_set_once_per_step() -> None:
    worth = {0: {0: 5.0, 1: 4.9, 2: 1.0}, 1: {0: 5.0, 1: 4.9, 2: 1.0}, 2: {0: 0.0, 1: 1.0, 2: 3.0}}
    asked: Counter[tuple[int, ...]] = Counter()

    def score(chosen: tuple[int, ...], members: list[int]) -> list[float]:
        asked[chosen] += 1
        # Layers 0 and 1 are worth nothing to each other.
        return [sum(worth[t][i] for i in chosen) - (4.8 if {0, 1} <= set(chosen) else 0) for t in members]

    assert greedy(3, 3, 2, score, progress=False) == [[0, 2], [0, 2], [2, 1]]
    assert set(asked.values()) == {1}
    assert greedy(3, 1, 9, score, progress=False) == [[0, 2, 1]]


def redundant() -> Planted:
    """Target layer 0 needs source layers 0 and 2; layer 1 is layer 0 again, so it ranks before layer 2 and adds nothing."""
    pair = plant([(0, 0, 0, 2)], n_source_layers=4, noise=0.2, n_tokens=(500, 400))
    for split in ("fit", "holdout"):
        for kind in KINDS:
            generator = torch.Generator().manual_seed(3)
            first = pair.source[split][kind][0]
            pair.source[split][kind][1] = first + 0.05 * first.std() * torch.randn(first.shape, generator=generator)
    return pair


def test_greedy_beats_independent_on_a_redundant_pair(tmp_path: Path) -> None:
    store = redundant().store(tmp_path / "s.zarr", inputs="same")
    r2 = {}
    for select, wanted in (("independent", (0, 1)), ("greedy", (0, 2))):
        out = tmp_path / select
        report = solve(store, out, options=Options(top_k=2, select=select), progress=False).report
        assert {Bundle.open(out).spec.layer(kind, 0).source_layers for kind in KINDS} == {wanted}
        r2[select] = report["r2"]["keys"]["chosen"]["holdout"]
    assert r2["greedy"] > r2["independent"] + 0.05


def test_shared_layers_are_shared(tmp_path: Path) -> None:
    pair = plant([(0, 1), (2,), (1, 3)], noise=1.0)
    for split in ("fit", "holdout"):  # keys of a target layer come from elsewhere than its values
        pair.target[split]["keys"].reverse()
    store = pair.store(tmp_path / "s.zarr", inputs="same")
    for top_k in (1, 2, "auto"):
        for select in ("independent", "greedy"):
            found = {}
            for shared in (True, False):
                out = tmp_path / f"{top_k}-{select}-{shared}"
                solve(store, out, options=Options(top_k=top_k, select=select, shared_layers=shared), progress=False)
                spec = Bundle.open(out).spec
                found[shared] = [[spec.layer(kind, t).source_layers for kind in KINDS] for t in range(3)]
            assert all(keys == values for keys, values in found[True])
            assert any(keys != values for keys, values in found[False])


def test_one_factorisation_per_source_layer_set_and_penalty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = plant([(0, 1), (2,), (1, 3)]).store(tmp_path / "s.zarr", inputs="same")
    sizes: list[int] = []
    original = ridge.factorise

    def counted(scatter: torch.Tensor, *arguments: Any, **named: Any) -> ridge.Factor:
        sizes.append(len(scatter))
        return original(scatter, *arguments, **named)

    monkeypatch.setattr(ridge, "factorise", counted)
    probe(Reader(Store.open(store)), "keys", progress=False)
    assert sizes == [6] * 4
    sizes.clear()
    solve(store, tmp_path / "all", options=Options(penalty=0.1), progress=False)
    assert Counter(sizes) == {6: 8, 24: 2}  # probes of both kinds, and one system per kind for all three target layers
    sizes.clear()
    report = solve(store, tmp_path / "two", options=Options(top_k=2), progress=False).report
    per_penalty = len({(d["kind"], tuple(d["source_layers"])) for d in report["layers"]})
    chosen = len({(d["kind"], tuple(d["source_layers"]), d["penalty"]) for d in report["layers"]})
    assert Counter(sizes) == {6: 8, 12: 6 * per_penalty + chosen}
