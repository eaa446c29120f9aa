"""A small pair, captured and solved once per test session, and what tests do with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import Options, capture
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate.arms import Pair
from kvfit.fit.solve.options import Options as SolveOptions
from kvfit.fit.solve.solve import solve
from kvfit.runtime.mapper import Mapper

_fitted: dict[tuple[Path, Path], Path] = {}
# A map of its own per layer, in float32: what tests change and write anew layer by layer. Lexical inputs are as by default.
PLAIN = SolveOptions(rank="none", dtype="float32")
FLOAT32 = (models.Options(dtype="float32", device="cpu"),) * 2


def fit_tiny(tiny_pair: tuple[Path, Path], folder: Path) -> Path:
    """A bundle's folder of the two random models, fitted once per session and copied."""
    if tiny_pair in _fitted:
        return Path(shutil.copytree(_fitted[tiny_pair], folder / "bundle"))
    options = Options(num_sequences=60, seq_len=64, token_stride=1, holdout=0.25)
    refs = str(tiny_pair[0]), str(tiny_pair[1])
    capture(*refs, folder / "pair.zarr", text=TextOptions("demo:text"), options=options, loading=FLOAT32, progress=False)
    _fitted[tiny_pair] = solve(folder / "pair.zarr", folder / "first", options=PLAIN, progress=False).bundle
    return fit_tiny(tiny_pair, folder)


def paired(bundle: Path, source: Any, target: Any, **options: Any) -> Pair:
    """Loaded models and the bundle's mapper."""
    return Pair(source.model, target.model, Mapper.from_bundle(Bundle.open(bundle)), **options)


def heldout(tokenizer: Any, count: int, length: int) -> torch.Tensor:
    """(count, length) ids of the first held-out documents."""
    texts = list(documents(TextOptions("demo:heldout")))[:count]
    return torch.tensor([tokenizer(text)["input_ids"][:length] for text in texts])


def changed(bundle: Path, out: Path, weights: Any, **solve_changes: Any) -> Path:
    """A bundle like another one, with weights made by ``weights(kind, layer_index, weight, bias)``."""
    opened = Bundle.open(bundle)
    made = []
    for layer in opened.spec.layers:
        weight, bias = opened.layer(layer.kind, layer.layer_index)
        made.append(
            (
                layer.kind,
                layer.layer_index,
                *(part.contiguous() for part in weights(layer.kind, layer.layer_index, weight, bias)),
            )
        )
    write_bundle(out, opened.spec, made, recipe=opened.recipe, solve={**opened.solve, **solve_changes})
    return out
