"""Stores whose truth is known: activations made by hand, put through the real accumulator, and kept for the oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvfit.bundle.bundle import Bundle
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Accumulator, Split
from kvfit.spec import KINDS, Inputs, Kind, ModelSpec, RopeSpec

Activations = dict[Kind, list[Tensor]]


Heads = tuple[int, ...]  # number and size, or number, key size and value size


def model(ref: str, n_layers: int, n_heads: int, head_dim: int, geometry: tuple[Heads, ...] | None = None) -> ModelSpec:
    """A model that does not rotate."""
    return ModelSpec(
        ref=ref, revision=None, family="planted", n_layers=n_layers, n_heads=n_heads, head_dim=head_dim, n_query_heads=n_heads,
        windows=(None,) * n_layers, rope=RopeSpec((), (None,) * n_layers), tokenizer_fingerprint="t", config_digest="c",
        weight_fingerprint=ref, dtype="float32", quantisation=None, geometry=geometry,
    )  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """Activations of both models on both splits, (N, F) per kind and layer, and the lexical inputs of some lags."""

    source_spec: ModelSpec
    target_spec: ModelSpec
    source: dict[Split, Activations]
    target: dict[Split, Activations]
    lags: tuple[int, ...] = ()

    def lexical(self, split: Split) -> list[Tensor]:
        """Target layer 0, keys then values, of the row that each lag is earlier; the first row stands in before it."""
        first = torch.cat([self.target[split][kind][0] for kind in KINDS], 1)
        return [first[(torch.arange(len(first)) - lag).clamp(min=0)] for lag in self.lags]

    def store(self, path: Path, *, inputs: Inputs = "both", order: Sequence[int] | None = None, parts: int = 3) -> Path:
        """The store of these activations, added in `parts` batches per split, in `order`."""
        with Accumulator.create(
            path, Layout(self.source_spec, self.target_spec, inputs, "float64", self.lags), recipe={"planted": 1}
        ) as accumulator:
            batches: list[tuple[Split, Tensor]] = [
                (split, rows) for split in self.source for rows in torch.arange(len(self.source[split]["keys"][0])).chunk(parts)
            ]
            for number in order if order is not None else range(len(batches)):
                split, rows = batches[number]
                taken = [
                    {kind: [layer[rows] for layer in side[split][kind]] for kind in KINDS}
                    for side in (self.source, self.target)
                ]
                lexical = {"lexical": [lag[rows] for lag in self.lexical(split)]} if self.lags else {}
                accumulator.add(split, taken[0] | lexical, taken[1], None)
            accumulator.finish(None)
        return path

    def inputs(self, split: Split, kinds: Sequence[Kind], layers: Sequence[int], head: int | None = None) -> np.ndarray:
        """Input columns in the order of the bundle format, float64; `head` is a source head."""
        size = self.source_spec.head_dim
        columns = slice(None) if head is None else slice(head * size, (head + 1) * size)
        return np.concatenate([self.source[split][kind][i][:, columns].double().numpy() for kind in kinds for i in layers], 1)

    def outputs(self, split: Split, kind: Kind, layer_index: int, head: int | None = None) -> np.ndarray:
        """Output columns, float64; `head` is a target head."""
        size = self.target_spec.head_dim
        columns = slice(None) if head is None else slice(head * size, (head + 1) * size)
        return self.target[split][kind][layer_index][:, columns].double().numpy()

    def predict(self, bundle: Bundle, split: Split, kind: Kind, layer_index: int) -> np.ndarray:
        """What a bundle's weights say, row by row in float64, (N, H * D)."""
        weight, bias = (tensor.double().numpy() for tensor in bundle.layer(kind, layer_index, bias_dtype=torch.float32))
        spec = bundle.spec
        kinds = (kind,) if spec.inputs == "same" else KINDS
        layers = spec.layer(kind, layer_index).source_layers
        if spec.support == "full":
            basis = bundle.basis()
            lexical = [lag.double().numpy() for lag in self.lexical(split)] if spec.lexical_lags else []
            inputs = np.concatenate([self.inputs(split, kinds, layers), *lexical], 1)
            return (inputs if basis is None else inputs @ basis.double().numpy()) @ weight + bias
        heads = [head * spec.source.n_heads // spec.target.n_heads for head in range(spec.target.n_heads)]
        return np.concatenate([self.inputs(split, kinds, layers, at) @ weight[head] for head, at in enumerate(heads)], 1) + bias

    def scaled(self, factor: float) -> Planted:
        """The same with all source activations times `factor`."""
        return replace(
            self, source={s: {k: [layer * factor for layer in side[k]] for k in KINDS} for s, side in self.source.items()}
        )

    def shuffled(self, seed: int = 5) -> Planted:
        """The same with the target's rows in another order: no source explains them."""
        torch.manual_seed(seed)
        target = {}
        for split, side in self.target.items():
            order = torch.randperm(len(side["keys"][0]))
            target[split] = {kind: [layer[order] for layer in side[kind]] for kind in KINDS}
        return replace(self, target=target)


def plant(
    sources: Sequence[Sequence[int]],
    *,
    n_source_layers: int = 4,
    source_heads: Heads | Sequence[Heads] = (2, 3),
    target_heads: Heads | Sequence[Heads] = (2, 3),
    n_tokens: tuple[int, int] = (400, 300),
    noise: float = 0.3,
    mean: float = 20.0,
    seed: int = 0,
) -> Planted:
    """Target layer t is a random affine map of the source layers ``sources[t]`` plus noise; the other layers are independent.

    Source activations are correlated within a layer, sit at means of `mean` times the spread, and differ in scale;
    values are fifty times smaller than keys.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    specs = tuple(
        model(ref, n_layers, *heads) if isinstance(heads[0], int) else model(ref, n_layers, *heads[0][:2], tuple(heads))
        for ref, n_layers, heads in (
            ("planted-source", n_source_layers, source_heads), ("planted-target", len(sources), target_heads),
        )
    )  # fmt: skip
    rows = sum(n_tokens)
    both: list[Activations] = [{kind: [] for kind in KINDS} for _ in specs]
    for kind in KINDS:
        widths = [specs[0].width_of(kind, i) for i in range(n_source_layers)]
        inputs = [random(rows, f) @ (torch.eye(f, dtype=torch.float64) + 0.4 * random(f, f)) for f in widths]
        for layer_index, chosen in enumerate(sources):
            g = specs[1].width_of(kind, layer_index)
            parts = [inputs[i] @ random(widths[i], g) / (widths[i] * len(chosen)) ** 0.5 for i in chosen]
            output = sum(parts, torch.zeros(rows, g, dtype=torch.float64)) + noise * random(rows, g)
            both[1][kind].append((output * random(g).exp() + mean * random(g)).float())
        unit = 1.0 if kind == "keys" else 0.02
        both[0][kind] = [(unit * (x * (1 + 0.5 * i) + mean * random(widths[i]))).float() for i, x in enumerate(inputs)]
    splits: tuple[tuple[Split, slice], ...] = (("fit", slice(0, n_tokens[0])), ("holdout", slice(n_tokens[0], None)))
    sides = [{split: {kind: [layer[at] for layer in side[kind]] for kind in KINDS} for split, at in splits} for side in both]
    return Planted(*specs, *sides)


def r2(truth: np.ndarray, prediction: np.ndarray) -> float:
    """Pooled over outputs, from the rows."""
    return float(1 - ((truth - prediction) ** 2).sum() / ((truth - truth.mean(0)) ** 2).sum())
