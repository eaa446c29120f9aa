"""Mappers made by hand, and a transfer written out token by token to compare with."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfit.model import cache as caches
from kvfit.model.digests import config_digest, weight_fingerprint
from kvfit.model.rope_probe import probe
from kvfit.runtime.mapper import Mapper
from kvfit.spec import FORMAT_VERSION, KINDS, LayerMap, MapperSpec, ModelSpec, RopeSpec, RopeTable

Pairs = list[tuple[Tensor, Tensor]]


def model_spec(n_layers: int, n_heads: int, head_dim: int, rope: RopeSpec | None = None, **more: Any) -> ModelSpec:
    """A model that exists only as a spec; rotation with two tables, the second interleaved, partial and scaled."""
    if rope is None:
        half = head_dim // 2
        first = RopeTable(tuple(torch.tensor([100.0 ** (-i / half) for i in range(half)]).tolist()), 2 * half, "half", 1.0)
        part = max(1, half // 2)
        second = RopeTable(
            tuple(torch.tensor([10.0 ** (-i / part) for i in range(part)]).tolist()), 2 * part, "interleaved", 1.25
        )
        rope = RopeSpec((first, second), tuple((0, 1, None)[i % 3] for i in range(n_layers)))
    values: dict[str, Any] = {
        "ref": "made/up", "revision": None, "family": "made", "n_layers": n_layers, "n_heads": n_heads, "head_dim": head_dim,
        "n_query_heads": n_heads, "windows": (None,) * n_layers, "rope": rope, "tokenizer_fingerprint": "t",
        "config_digest": "c", "weight_fingerprint": "w", "dtype": "float32", "quantisation": None,
    }  # fmt: skip
    return ModelSpec(**{**values, **more})


def spec_of(model: Any, ref: str = "made/up") -> ModelSpec:
    """The spec of a loaded model."""
    config, seen = model.config.get_text_config(decoder=True), probe(model)
    return model_spec(
        seen.n_layers,
        seen.n_heads,
        seen.head_dim,
        seen.rope,
        geometry=seen.geometry,
        ref=ref,
        family=model.config.model_type,
        n_query_heads=config.num_attention_heads,
        windows=caches.layer_windows(model, seen.n_layers),
        config_digest=config_digest(model.config),
        weight_fingerprint=weight_fingerprint(model),
    )


def mapper_spec(
    source: ModelSpec,
    target: ModelSpec,
    sets: Sequence[Sequence[int]],
    *,
    support: Any = "full",
    inputs: Any = "same",
    keys_rotated: bool = False,
    lexical_lags: Sequence[int] = (),
    rank: int | None = None,
) -> MapperSpec:
    """Target layer t reads source layers ``sets[t]``; layer 0 is exact where there are lags."""
    first = 1 if lexical_lags else 0
    layers = [LayerMap(kind, t, tuple(chosen), 0.0, 0.0, 0.0) for t, chosen in enumerate(sets) if t >= first for kind in KINDS]
    return MapperSpec(
        FORMAT_VERSION, "0.1.0", source, target, keys_rotated, support, inputs, "none", "float32", tuple(layers),
        lexical_lags=tuple(lexical_lags), rank=rank,
    )  # fmt: skip


def random_mapper(spec: MapperSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Mapper:
    """Random weights that keep the size of their inputs, and random biases."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in spec.layers:
        shape = spec.weight_shape(layer.kind, layer.layer_index)
        weight = torch.randn(shape, generator=generator) / shape[-2] ** 0.5
        bias = torch.randn(spec.target.width_of(layer.kind, layer.layer_index), generator=generator)
        weights[layer.kind, layer.layer_index] = (weight.to(dtype), bias.to(dtype))
    basis = None
    if spec.rank is not None:
        basis = (torch.randn(spec.basis_shape, generator=generator) / spec.basis_shape[0] ** 0.5).to(dtype)
    return Mapper(spec, weights, basis=basis, verdict="pass")


def identity_mapper(model: Any) -> Mapper:
    """A model to itself: weight one, bias zero."""
    side = spec_of(model)
    spec = mapper_spec(side, side, [[i] for i in range(side.n_layers)])
    widths = {(layer.kind, layer.layer_index): side.width_of(layer.kind, layer.layer_index) for layer in spec.layers}
    return Mapper(spec, {key: (torch.eye(width), torch.zeros(width)) for key, width in widths.items()})


def random_pairs(spec: ModelSpec, batch: int, n_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pairs:
    """A cache's content, drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads: int, size: int) -> Tensor:
        return torch.randn(batch, heads, n_tokens, size, generator=generator).to(dtype)

    return [tuple(drawn(*spec.shape(kind, layer_index)) for kind in KINDS) for layer_index in range(spec.n_layers)]


def turned(row: list[float], table: RopeTable | None, position: int, inverse: bool) -> list[float]:
    """One head's key of one token, rotated plane by plane as a complex number."""
    if table is None:
        return row
    out = list(row)
    half = table.rotated_width // 2
    for plane, frequency in enumerate(table.inverse_frequencies):
        a, b = (plane, plane + half) if table.pairing == "half" else (2 * plane, 2 * plane + 1)
        factor = table.attention_scaling * cmath.exp(1j * position * frequency)
        number = complex(row[a], row[b]) / factor if inverse else complex(row[a], row[b]) * factor
        out[a], out[b] = number.real, number.imag
    return out


def lexical_features(mapper: Mapper, first_layer: tuple[Tensor, Tensor], positions: Tensor, b: int, i: int) -> list[float]:
    """The lexical inputs of one token: keys, un-rotated, then values of the target's first layer, lag by lag."""
    row = positions if positions.dim() == 1 else positions[b]
    first = max(j for j in range(len(row)) if int(row[j]) == int(row.min()))  # behind the padding, all at the lowest position
    features: list[float] = []
    for lag in mapper.spec.lexical_lags:
        read = max(i - lag, first) if i >= first else i
        table = None if mapper.spec.keys_rotated else mapper.spec.target.rope.table(0)
        for half, turning in zip(first_layer, (table, None), strict=True):
            for h in range(half.shape[1]):
                features += turned(half[b, h, read].double().tolist(), turning, int(row[read]), True)
    return features


def reference_transfer(
    mapper: Mapper, pairs: Pairs, positions: Tensor, first_layer: tuple[Tensor, Tensor] | None = None
) -> Pairs:
    """The definition of a transfer, one token, head and feature at a time, in Python's own numbers."""
    spec = mapper.spec
    source, target = spec.source, spec.target
    batch, _, total, _ = pairs[0][0].shape
    out = [] if first_layer is None else [(first_layer[0].double(), first_layer[1].double())]
    for t in spec.mapped_layers:
        halves = []
        for kind in KINDS:
            weight, bias = (part.double() for part in mapper.maps.weights[kind, t])
            if mapper.maps.basis is not None:
                weight = mapper.maps.basis.double() @ weight
            n_heads, size = target.shape(kind, t)
            result = torch.zeros(batch, n_heads, total, size, dtype=torch.float64)
            for b in range(batch):
                for i in range(total):
                    position = int(positions[i] if positions.dim() == 1 else positions[b, i])
                    for head in range(n_heads):
                        features: list[float] = []
                        for read in KINDS if spec.inputs == "both" else (kind,):
                            for s in spec.layer(kind, t).source_layers:
                                for h in range(source.shape(read, s)[0]):
                                    if spec.support == "head" and h != head * source.n_heads // n_heads:
                                        continue
                                    row = pairs[s][KINDS.index(read)][b, h, i].double().tolist()
                                    table = source.rope.table(s) if read == "keys" and not spec.keys_rotated else None
                                    features += turned(row, table, position, True)
                        if first_layer is not None:
                            features += lexical_features(mapper, first_layer, positions, b, i)
                        columns = range(head * size, (head + 1) * size)
                        if spec.support == "head":
                            made = torch.tensor(features, dtype=torch.float64) @ weight[head] + bias[list(columns)]
                        else:
                            made = torch.tensor(features, dtype=torch.float64) @ weight[:, list(columns)] + bias[list(columns)]
                        table = target.rope.table(t) if kind == "keys" and not spec.keys_rotated else None
                        result[b, head, i] = torch.tensor(turned(made.tolist(), table, position, False), dtype=torch.float64)
            halves.append(result)
        out.append((halves[0], halves[1]))
    return out


def cache_of(pairs: Pairs) -> Any:
    """A transformers cache that holds copies of them."""
    cache = caches.full_cache()
    for layer_index, (keys, values) in enumerate(pairs):
        caches.append(cache, layer_index, keys.clone(), values.clone())
    return cache


def content(cache: Any) -> list[Tensor]:
    """Keys and values of every layer that holds any, copied."""
    return [half.clone() for layer in cache.layers if layer.keys is not None for half in (layer.keys, layer.values)]


def same(left: Any, right: Any) -> bool:
    """Whether two caches (or lists of tensors) are equal bit for bit."""
    a, b = (content(x) if hasattr(x, "layers") else list(x) for x in (left, right))
    return len(a) == len(b) and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def prefilled(model: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> Any:
    """The model's own cache of some tokens."""
    cache = caches.new_cache(model) if cache is None else cache
    caches.forward(model, ids, cache, attention_mask=mask, base=True)
    return cache
