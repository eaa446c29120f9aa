"""Drift over turns against a conversation written out by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import fit_tiny, heldout, paired

from kvfit.errors import MismatchError
from kvfit.fit.evaluate.arms import Pair, mapped_pairs, source_pairs
from kvfit.fit.evaluate.turns import drift
from kvfit.model.cache import forward, new_cache
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS, LayerMap

Loader = Callable[[Path | str], Any]


def test_drift_equals_a_conversation_written_out(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    source, target = (load(folder) for folder in tiny_pair)
    pair = paired(fit_tiny(tiny_pair, tmp_path), source, target, exact_head=1)
    ids = heldout(target.tokenizer, 3, 50)
    found = drift(pair, ids, 3, batch_size=2, progress=False)  # turns of 8 tokens
    losses = torch.zeros(3, 3, dtype=torch.float64)
    for document in ids:
        sources = source_pairs(pair, document[None])
        cache = new_cache(target.model)
        for turn in range(3):
            start, stop = (2 * turn + 1) * 8, (2 * turn + 2) * 8
            if turn == 0:
                forward(target.model, document[None, :1], cache)  # the exact head
            held = cache.get_seq_length()
            # Only what is new is mapped, at its own positions.
            cut = [(k[:, :, : start - 1], v[:, :, : start - 1]) for k, v in sources]
            part = mapped_pairs(pair, document[None, : start - 1], cut)
            for layer_index, (keys, values) in enumerate(part):
                cache.update(keys[:, :, held:], values[:, :, held:], layer_index)
            logits = forward(target.model, document[None, start - 1 : stop - 1], cache)
            for row, model in enumerate((None, target.model, source.model)):
                if model is not None:
                    logits = forward(model, document[None], new_cache(model))[:, start - 1 : stop - 1]
                scores = logits[0].double().log_softmax(-1)
                losses[turn, row] -= scores[torch.arange(8), document[start:stop]].sum()
    losses /= 3 * 8
    for turn, row in enumerate(found):
        assert [row["nll"], row["native_nll"], row["source_nll"]] == pytest.approx(losses[turn].tolist(), abs=1e-4)
        assert row["drift"] == pytest.approx(row["nll"] - row["native_nll"])
        assert row["kl"] > 0
    assert [row["tokens_before"] for row in found] == [8, 24, 40]
    assert [row["mapped"] for row in found] == [6, 8, 8]


def test_an_exact_map_does_not_drift(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    target = load(tiny_pair[1])
    spec = paired(fit_tiny(tiny_pair, tmp_path), load(tiny_pair[0]), target).mapper.spec
    layers = tuple(LayerMap(kind, i, (i,), 0.0, 1.0, 1.0) for i in range(spec.target.n_layers) for kind in KINDS)
    weights = {(layer.kind, layer.layer_index): (torch.eye(32), torch.zeros(32)) for layer in layers}
    same = Mapper(replace(spec, source=spec.target, layers=layers, inputs="same", lexical_lags=()), weights)
    pair = Pair(target.model, target.model, same, exact_head=1)
    for row in drift(pair, heldout(target.tokenizer, 2, 48), 4, progress=False):
        assert row["drift"] == pytest.approx(0, abs=1e-4)
        assert row["kl"] == pytest.approx(0, abs=1e-5)


def test_turns_too_short_are_refused(tiny_pair: tuple[Path, Path], load: Loader, tmp_path: Path) -> None:
    pair = paired(fit_tiny(tiny_pair, tmp_path), *(load(folder) for folder in tiny_pair))
    ids = torch.zeros(1, 11, dtype=torch.long)
    for count in (0, 3):
        with pytest.raises(MismatchError, match=f"--turns: found {count} for 11 tokens"):
            drift(pair, ids, count, progress=False)
