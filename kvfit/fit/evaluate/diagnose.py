"""Diagnose a map per target layer and head, on text that neither fit nor selection saw.

Each measure compares mapped keys and values with the target's own, over the tokens that a handoff maps. E is their difference
per token. Keys are un-rotated except in attention.

    r2              1 - sum E^2 / sum (own - mean own)^2 of the map as it is used, including the gain
    explained       the same after rescaling every output about its mean for the best fit, which no gain can change
    relative_error  |E| / |own|
    cosine          cosine of mapped and own, mean over tokens
    concentration   keys: D * sum_j s_j^2 |E v_j|^2 / (sum_j s_j^2 * |E|^2), with v_j, s_j of the target's own queries (rotated)
                    values: mean of |e_i|^2 weighted by a_i^2, over its plain mean, with a the target's own attention
                    1 means that errors are independent of attention; above 1, that they are where attention reads
    attention_cosine  cosine of what the target's own queries read from mapped and from own keys and values

Source: Heo et al., arXiv:2608.03893, for the concentrations and the cosine of the attention output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.attention import Reading, Reads, watched
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.model.rope import angles, unrotate
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS, Kind, RopeTable

# Tokens per batch that are used to find out which layer a map's output belongs to. They are kept in memory.
ORDER_TOKENS = 256


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        layers: per target layer, JSON values as in `evaluation.json`.
        order: per kind, (L, L) correlations of the output for layer i with layer j's own values, about the mean of every
            output; -1 where the layers' heads differ in number or size.
        explained: per kind, the explained variance, mean over layers.
        explained_rotated: the same for keys if the map is applied to rotated keys; None if the target's keys do not rotate.
    """

    layers: list[dict[str, Any]]
    order: dict[Kind, Tensor]
    explained: dict[Kind, float]
    explained_rotated: float | None

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        order = {kind: found.tolist() for kind, found in self.order.items()}
        return {"layers": self.layers, "order": order, "explained": self.explained, "explained_rotated": self.explained_rotated}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Diagnosis:
        """The diagnosis from the JSON values of `to_json`."""
        order = {kind: torch.tensor(value["order"][kind], dtype=torch.float64) for kind in KINDS}
        return cls(value["layers"], order, value["explained"], value["explained_rotated"])


class _Moments:
    """Sums over tokens of mapped and own values (N, H, D) in float64, from which the measures are computed."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, mapped: Tensor, own: Tensor) -> None:
        mapped, own = mapped.double(), own.double()
        self.count += len(own)
        cosine = F.cosine_similarity(mapped, own, dim=-1)
        for name, value in (
            ("p", mapped),
            ("t", own),
            ("pp", mapped**2),
            ("tt", own**2),
            ("pt", mapped * own),
            ("ee", (mapped - own) ** 2),
            ("cosine", cosine),
        ):
            total = value.sum(0)
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def centred(self, a: str, b: str) -> Tensor:
        """(H, D), sums of products of deviations."""
        return self.sums[a + b] - self.sums[a] * self.sums[b] / self.count

    def measures(self) -> dict[str, Tensor]:
        """The measures, (1 + H,) each: over all heads, then for each head."""
        own, mapped = self.centred("t", "t"), self.centred("p", "p")
        fitted = self.centred("p", "t") ** 2 / mapped.clamp(min=1e-300)
        error = _all_and_heads(self.sums["ee"])
        cosine = self.sums["cosine"] / self.count
        return {
            "r2": 1 - error / _all_and_heads(own),
            "explained": _all_and_heads(fitted) / _all_and_heads(own),
            "relative_error": (error / _all_and_heads(self.sums["tt"])).sqrt(),
            "cosine": torch.cat([cosine.mean(0, keepdim=True), cosine]),
        }


def _all_and_heads(values: Tensor) -> Tensor:
    by_head = values.sum(1)
    return torch.cat([by_head.sum(0, keepdim=True), by_head])


@torch.no_grad()
def diagnose(pair: arms.Pair, ids: Tensor, prefix: int, *, batch_size: int = 8) -> Diagnosis:
    """Measure a map per layer and head.

    Args:
        pair: models and mapper. Tokens that the target runs itself (`exact_head`, `exact_tail`) are not counted.
        ids: (N, prefix + C) token ids. The queries are those of the last prefix token and later ones.
        prefix: number of tokens of context.
        batch_size: documents per forward pass.
    """
    spec = pair.mapper.spec
    n_layers, covered = spec.target.n_layers, prefix - 1
    head = min(pair.exact_head, covered)
    counted = slice(head, max(head, covered - pair.exact_tail))
    moments: dict[tuple[str, int], _Moments] = {}
    order = {kind: _Order() for kind in KINDS}
    reads: dict[int, Reads] = {}
    rotated = None
    if any(spec.target.rope.tables):
        rotated = Mapper(replace(spec, keys_rotated=True), pair.mapper.maps.weights, basis=pair.mapper.maps.basis)
    for part in torch.split(ids, batch_size):
        prefix_ids = part[:, :covered]
        sources = arms.source_pairs(pair, prefix_ids)
        own = arms.target_pairs(pair, prefix_ids)
        mapped = arms.mapped_pairs(pair, prefix_ids, sources)
        naive = None
        if rotated is not None:
            naive = rotated.transfer_layers(sources, input_ids=prefix_ids, target_model=pair.target)
        for layer_index in range(n_layers):
            table = spec.target.rope.table(layer_index)
            for kind, ours, theirs in zip(KINDS, mapped[layer_index], own[layer_index], strict=True):
                found = [_tokens(tensor, table if kind == "keys" else None, counted) for tensor in (ours, theirs)]
                moments.setdefault((kind, layer_index), _Moments()).add(*(tensor.to(found[1].device) for tensor in found))
                order[kind].hold(*found)
            if naive is not None:
                plain = [_tokens(pairs[layer_index][0], None, counted) for pairs in (naive, own)]
                moments.setdefault(("rotated", layer_index), _Moments()).add(plain[0].to(plain[1].device), plain[1])
        for kind in KINDS:
            order[kind].add()
        in_use = [
            tuple(_exact(ours, theirs, counted) for ours, theirs in zip(*pairs, strict=True))
            for pairs in zip(mapped, own, strict=True)
        ]
        _read(pair, own, in_use, part[:, covered:-1], counted, reads)
    measured = {key: found.measures() for key, found in moments.items()}
    read = {layer_index: found.measures() for layer_index, found in reads.items()}
    return Diagnosis(
        layers=[_layer(layer_index, measured, read.get(layer_index)) for layer_index in range(n_layers)],
        order={kind: found.correlations() for kind, found in order.items()},
        explained={kind: _mean([float(measured[kind, i]["explained"][0]) for i in range(n_layers)]) for kind in KINDS},
        explained_rotated=None
        if rotated is None
        else _mean([float(measured["rotated", i]["explained"][0]) for i in range(n_layers)]),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _tokens(tensor: Tensor, table: RopeTable | None, counted: slice) -> Tensor:
    """(B, H, T, D) -> (B * n, H, D) of the counted tokens, un-rotated if a table is given."""
    if table is not None:
        tensor = unrotate(tensor.float(), table, angles(table, torch.arange(tensor.shape[2], device=tensor.device)))
    return tensor[:, :, counted].transpose(1, 2).flatten(0, 1)


def _exact(mapped: Tensor, own: Tensor, counted: slice) -> Tensor:
    """Mapped keys or values, with the target's own for the tokens that it runs itself."""
    out = own.clone()
    out[:, :, counted] = mapped[:, :, counted].to(own)
    return out


def _read(
    pair: arms.Pair,
    own: arms.Pairs,
    in_use: list[tuple[Tensor, ...]],
    new_ids: Tensor,
    counted: slice,
    reads: dict[int, Reads],
) -> None:
    """Run the new tokens on the target's own cache, and compute in every layer what they would read from the mapped one."""

    def on_reading(reading: Reading) -> None:
        if reading.layer_index >= len(in_use):  # reads an earlier layer's, which is looked at there
            return
        if reading.layer_index not in reads:
            reads[reading.layer_index] = Reads(reading.keys.shape[1], reading.keys.shape[3], reading.keys.device)
        reads[reading.layer_index].add(reading, in_use[reading.layer_index], counted)  # type: ignore[arg-type]

    with watched(pair.target, on_reading):
        caches.forward(pair.target, new_ids.to(input_device(pair.target)), arms.filled(pair.target, own), base=True)


class _Order:
    """Correlations of the outputs for one layer with the own values of another, over all features together.

    If layers have heads of unlike number or size, each is compared with those of its own shape. No map gives another shape, so
    the correlation with a layer of another shape is -1, which is never the best.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[int, ...], list[int]] = {}  # by shape (H, D)
        self._held: list[tuple[Tensor, Tensor]] = []
        self._sums: dict[tuple[int, ...], _Products] = {}

    def hold(self, mapped: Tensor, own: Tensor) -> None:
        """Hold tokens (N, H, D) of the next layer."""
        stride = max(1, len(own) // ORDER_TOKENS)
        self._held.append((mapped[::stride].double().cpu(), own[::stride].double().cpu()))

    def add(self) -> None:
        """Add the held tokens of one batch to the sums."""
        shapes = [tuple(own.shape[1:]) for _, own in self._held]
        for shape in set(shapes):
            self._layers[shape] = [layer_index for layer_index, other in enumerate(shapes) if other == shape]
            mapped, own = (
                torch.stack([self._held[layer_index][side].flatten(1) for layer_index in self._layers[shape]])
                for side in (0, 1)
            )  # (L, n, F)
            self._sums.setdefault(shape, _Products()).add(mapped, own)
        self._held.clear()

    def correlations(self) -> Tensor:
        """(L, L), the correlations."""
        n_layers = sum(map(len, self._layers.values()))
        found = torch.full((n_layers, n_layers), -1.0, dtype=torch.float64)
        for shape, layers in self._layers.items():
            rows = torch.tensor(layers)
            found[rows[:, None], rows] = self._sums[shape].correlations()
        return found


class _Products:
    """Sums over tokens for layers of one shape."""

    def __init__(self) -> None:
        self.count = 0
        self.cross = self.mapped = self.own = self.mapped_sum = self.own_sum = torch.zeros(())

    def add(self, mapped: Tensor, own: Tensor) -> None:
        """Add tokens (L, n, F)."""
        self.count += mapped.shape[1]
        self.cross = self.cross + mapped.flatten(1) @ own.flatten(1).T
        self.mapped, self.own = self.mapped + mapped.square().sum(1), self.own + own.square().sum(1)
        self.mapped_sum, self.own_sum = self.mapped_sum + mapped.sum(1), self.own_sum + own.sum(1)

    def correlations(self) -> Tensor:
        """(L, L), the correlations."""
        cross = self.cross - self.mapped_sum @ self.own_sum.T / self.count
        spread = [
            (squares - sums.square() / self.count).sum(1).clamp(min=1e-300).sqrt()
            for squares, sums in ((self.mapped, self.mapped_sum), (self.own, self.own_sum))
        ]
        return cross / (spread[0][:, None] * spread[1])


def _layer(
    layer_index: int, measured: dict[tuple[str, int], dict[str, Tensor]], read: dict[str, Tensor] | None
) -> dict[str, Any]:
    """One layer as JSON values. The measures of attention are None if it could not be watched."""
    out: dict[str, Any] = {"layer_index": layer_index}
    for kind in KINDS:
        found = dict(measured[kind, layer_index])
        if read is not None:
            found["concentration"] = read[kind]
        out[kind] = {name: _number(values[0]) for name, values in found.items()}
        out[kind]["heads"] = {name: [_number(value) for value in values[1:]] for name, values in found.items()}
    out["attention_cosine"] = None if read is None else _number(read["attention"][0])
    out["attention_cosine_heads"] = None if read is None else [_number(value) for value in read["attention"][1:]]
    return out


def _number(value: Tensor) -> float | None:
    """A finite number or None, because a constant output has no R2, and JSON has no infinity."""
    return float(value) if bool(torch.isfinite(value)) else None
