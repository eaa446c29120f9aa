"""Frozen values that describe a model, its rotary embedding and a mapper.

Nothing here touches a model or a file. `kvfit.bundle.records` writes these values as JSON and reads them back.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

from kvfit.errors import SpecError

FORMAT_VERSION = 2

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, Kind] = ("keys", "values")
Support = Literal["full", "head"]
Inputs = Literal["same", "both"]
Pairing = Literal["half", "interleaved"]

# A record that was written before a field existed lacks it. A value of None is not written either.
_MAY_BE_ABSENT = {"may_be_absent": True}


@dataclass(frozen=True)
class RopeTable:
    """One rotary table: at position p, plane i rotates by the angle ``p * inverse_frequencies[i]``.

    Attributes:
        inverse_frequencies: R/2 angles in radians per position, each exactly representable as a float32.
        rotated_width: R, the number of leading features of a head that rotate; the others stay as they are.
        pairing: which features form a plane: i and i + R/2 (``half``), or 2i and 2i + 1 (``interleaved``).
        attention_scaling: the factor on cosine and sine (YaRN, longrope), otherwise 1.0.
    """

    inverse_frequencies: tuple[float, ...]
    rotated_width: int
    pairing: Pairing
    attention_scaling: float

    def __post_init__(self) -> None:
        if self.rotated_width != 2 * len(self.inverse_frequencies):
            raise SpecError(
                "rotated_width",
                f"{self.rotated_width} with {len(self.inverse_frequencies)} inverse frequencies",
                "twice their number",
            )
        if not all(math.isfinite(value) for value in self.inverse_frequencies):
            raise SpecError("inverse_frequencies", "a value that is not finite", "finite numbers")
        if not (math.isfinite(self.attention_scaling) and self.attention_scaling > 0):
            raise SpecError("attention_scaling", str(self.attention_scaling), "a finite number above 0")


@dataclass(frozen=True)
class RopeSpec:
    """The rotary tables of a model, and which layer uses which table.

    Attributes:
        tables: the distinct tables.
        assignment: for each KV layer, an index into `tables`, or None where the layer does not rotate.
    """

    tables: tuple[RopeTable, ...]
    assignment: tuple[int | None, ...]

    def __post_init__(self) -> None:
        for layer_index, table in enumerate(self.assignment):
            if table is not None and not 0 <= table < len(self.tables):
                raise SpecError(f"assignment[{layer_index}]", str(table), f"None or 0..{len(self.tables) - 1}")

    def table(self, layer_index: int) -> RopeTable | None:
        """The table of a KV layer; None where the layer does not rotate."""
        index = self.assignment[layer_index]
        return None if index is None else self.tables[index]


@dataclass(frozen=True)
class Content:
    """Digests of everything that a loaded model's forward pass reads.

    Attributes:
        bits: one digest of 16 hexadecimal digits for the input embedding, for each decoder layer, and for everything else
            (final norm, head, other parts, rotary tables). It covers the exact bits of every tensor that a checkpoint holds.
        rounded: the same digests of the values rounded to bfloat16, for a model that is loaded in another dtype.
        n_ids: the number of the tokenizer's token ids; further rows of the embedding and the head are padding and not covered.
        derived: a digest of what the modules compute from the configuration (norm epsilons, scalings, buffers that no file
            holds).
        transformers: the version that `derived` was computed with; `derived` is compared under this version only.
    """

    bits: tuple[str, ...]
    rounded: tuple[str, ...]
    n_ids: int
    derived: str
    transformers: str


@dataclass(frozen=True)
class ModelSpec:
    """The description that identifies one model: its origin, its KV geometry, and the fingerprints of its content.

    Attributes:
        ref: ``org/name`` on the Hub, ``demo:source``, or the name (never the path) of a local folder.
        revision: the commit hash; None where there is none.
        family: transformers' ``model_type``.
        n_layers: the number of layers with keys and values of their own, in decoder order.
        n_heads: H, the number of key/value heads in a layer; in the first layer if they differ.
        head_dim: D, the number of features in a head; in a key of the first layer if they differ.
        n_query_heads: the number of query heads in a layer; query head q reads KV head ``q // (n_query_heads // n_heads)``.
        windows: for each KV layer, its sliding window in tokens, or None for full attention.
        rope: the rotary description.
        tokenizer_fingerprint: a digest of the token-to-id map.
        config_digest: a digest of the configuration values that change what the model computes.
        weight_fingerprint: a digest of fixed slices of the embedding and of every decoder layer's weights, in bfloat16.
        dtype: the dtype in which the activations were captured.
        quantisation: the name of the quantisation method; None where the model is not quantised.
        content: digests of all weights; None for a map that was fitted before kvfit recorded them.
        tokenization_digest, encoding_digest: digests of the ids that fixed texts are encoded to; None for older maps too.
        geometry: for each layer its heads, key size and value size, if these differ anywhere; else None.
    """

    ref: str
    revision: str | None
    family: str
    n_layers: int
    n_heads: int
    head_dim: int
    n_query_heads: int
    windows: tuple[int | None, ...]
    rope: RopeSpec
    tokenizer_fingerprint: str
    config_digest: str
    weight_fingerprint: str
    dtype: str
    quantisation: str | None
    content: Content | None = field(default=None, metadata=_MAY_BE_ABSENT)
    tokenization_digest: str | None = field(default=None, metadata=_MAY_BE_ABSENT)
    encoding_digest: str | None = field(default=None, metadata=_MAY_BE_ABSENT)
    geometry: tuple[tuple[int, ...], ...] | None = field(default=None, metadata=_MAY_BE_ABSENT)

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "head_dim", "n_query_heads"):
            if getattr(self, name) < 1:
                raise SpecError(name, str(getattr(self, name)), "at least 1")
        of_layers = {"windows": self.windows, "rope.assignment": self.rope.assignment, "geometry": self.geometry}
        for name, per_layer in of_layers.items():
            if per_layer is not None and len(per_layer) != self.n_layers:
                raise SpecError(name, f"{len(per_layer)} entries", f"{self.n_layers}, one per layer")
        alike = ((self.n_heads, self.head_dim, self.head_dim),) * self.n_layers
        geometry = self.geometry or alike
        for layer_index, heads in enumerate(geometry):
            if len(heads) != 3 or min(heads) < 1 or (layer_index == 0 and heads[:2] != alike[0][:2]):
                raise SpecError(f"geometry[{layer_index}]", str(list(heads)), "3 numbers, in layer 0 n_heads, head_dim, ...")
        if self.geometry == alike:  # one model has one record
            raise SpecError("geometry", "the same heads in all layers", "no such field")
        for index, table in enumerate(self.rope.tables):
            sizes = [size for (_, size, _), used in zip(geometry, self.rope.assignment, strict=True) if used == index]
            most = min(sizes, default=self.head_dim)
            if table.rotated_width > most:
                raise SpecError(f"rope.tables[{index}].rotated_width", str(table.rotated_width), f"at most {most}")

    def shape(self, kind: Kind, layer_index: int) -> tuple[int, int]:
        """(H, D) of one layer's keys or values."""
        alike = (self.n_heads, self.head_dim, self.head_dim)
        heads, *sizes = self.geometry[layer_index] if self.geometry else alike
        return heads, sizes[KINDS.index(kind)]

    def width_of(self, kind: Kind, layer_index: int) -> int:
        """H * D, the features of one layer's keys or values per token."""
        return math.prod(self.shape(kind, layer_index))

    @property
    def width(self) -> int:
        """Features of the widest layer's keys or values per token."""
        return max(self.width_of(kind, i) for kind in KINDS for i in range(self.n_layers if self.geometry else 1))

    @property
    def first_width(self) -> int:
        """Features of the first layer's keys and values together per token: what a map reads of it at each lag."""
        return sum(self.width_of(kind, 0) for kind in KINDS)


@dataclass(frozen=True)
class LayerMap:
    """How the keys or the values of one target layer are predicted.

    Attributes:
        kind: ``keys`` or ``values``.
        layer_index: the target layer.
        source_layers: the source layers that the map reads, ascending.
        penalty: the ridge penalty, relative to the mean variance of the inputs.
        r2_fit: R2 on the fit split before the gain, over all outputs together.
        r2_holdout: R2 on the holdout split, likewise.
    """

    kind: Kind
    layer_index: int
    source_layers: tuple[int, ...]
    penalty: float
    r2_fit: float
    r2_holdout: float


@dataclass(frozen=True)
class MapperSpec:
    """The description of a mapper: both models, the options of the fit, and one `LayerMap` per target layer and kind.

    Attributes:
        format_version: the version of the bundle format.
        kvfit_version: the version of kvfit that wrote the bundle.
        keys_rotated: False when the map works on un-rotated keys (kvfit always fits so).
        support: ``full``: a layer's outputs read all heads of the chosen source layers; the weight is (F, G) with F the sum of
            H_source * D_source over them and G = H_target * D_target. ``head``: target head h reads only source head
            ``h * H_source // H_target``; the weight is (H_target, k * D_source, D_target); not with a `geometry`.
        inputs: ``same``: keys from keys and values from values; ``both``: each from keys followed by values, so F doubles.
        gain: the gain that was folded into weights and biases: ``variance``, ``head`` or ``none``.
        dtype: the dtype of the stored weights.
        layers: the maps of the first mapped target layer's keys and values, then the next layer's, and so on. The first mapped
            layer is layer 0, or layer 1 where there are lexical inputs.
        lexical_lags: the lags of the lexical inputs, ascending; empty for a map without them. The keys and values of the
            target's first layer depend on the token alone, so the target computes them for every token without attention. With
            lexical inputs, target layer 0 is therefore exact, and every map also reads its un-rotated keys and its values for
            the token itself (lag 0) and for earlier tokens (lag 1, 2, ...). They follow the source's inputs lag by lag, keys
            first, `first_width` of them per lag. Where a lag reaches back beyond the sequence, its first token is read.
        rank: r of the shared basis; None where every layer has a map of its own. With a basis, one matrix (F, r) projects the
            inputs of all target layers, and a layer's weight is (r, G).
    """

    format_version: int
    kvfit_version: str
    source: ModelSpec
    target: ModelSpec
    keys_rotated: bool
    support: Support
    inputs: Inputs
    gain: Literal["variance", "head", "none"]
    dtype: Literal["float32", "bfloat16", "float16"]
    layers: tuple[LayerMap, ...]
    lexical_lags: tuple[int, ...] = ()
    rank: int | None = None

    def __post_init__(self) -> None:
        lags = self.lexical_lags
        if any(lag < 0 for lag in lags) or any(a >= b for a, b in itertools.pairwise(lags)):
            raise SpecError("lexical_lags", str(list(lags)), "ascending whole numbers from 0 on")
        if lags and self.support == "head":
            raise SpecError("lexical_lags", f"{list(lags)} with support head", "support full")
        if self.support == "head" and (self.source.geometry or self.target.geometry):
            raise SpecError("support", "head with a model whose heads differ by layer", "full")
        expected = [(kind, index) for index in self.mapped_layers for kind in KINDS]
        found = [(layer.kind, layer.layer_index) for layer in self.layers]
        if found != expected:
            raise SpecError(
                "layers", f"{len(found)} entries in another order", f"keys and values of {len(self.mapped_layers)} layers"
            )
        for index, layer in enumerate(self.layers):
            chosen = layer.source_layers
            ascending = all(a < b for a, b in itertools.pairwise(chosen))
            if not chosen or not ascending or chosen[0] < 0 or chosen[-1] >= self.source.n_layers:
                raise SpecError(
                    f"layers[{index}].source_layers", str(list(chosen)), f"ascending layers of 0..{self.source.n_layers - 1}"
                )
        if self.rank is not None:
            if self.support != "full" or self.inputs != "both":
                raise SpecError("rank", f"{self.rank} with support {self.support} and inputs {self.inputs}", "full and both")
            if len({layer.source_layers for layer in self.layers}) > 1:
                raise SpecError("layers", "different source layers under a shared basis", "the same for all")
            if not 1 <= self.rank <= self.basis_shape[0]:
                raise SpecError("rank", str(self.rank), f"1 to the {self.basis_shape[0]} inputs")

    @property
    def mapped_layers(self) -> range:
        """The target layers that are mapped. With lexical inputs, layer 0 is exact and not among them."""
        return range(1 if self.lexical_lags else 0, self.target.n_layers)

    def layer(self, kind: Kind, layer_index: int) -> LayerMap:
        """The map of the keys or the values of one mapped target layer."""
        return self.layers[2 * (layer_index - self.mapped_layers.start) + KINDS.index(kind)]

    def input_width(self, kind: Kind, layer_index: int) -> int:
        """F, the number of features that one target layer's map reads; per head where support is ``head``."""
        kinds, chosen = KINDS if self.inputs == "both" else (kind,), self.layer(kind, layer_index).source_layers
        shapes = [self.source.shape(read, i) for read in kinds for i in chosen]
        from_source = sum(size * (heads if self.support == "full" else 1) for heads, size in shapes)
        return from_source + len(self.lexical_lags) * self.target.first_width

    @property
    def basis_shape(self) -> tuple[int, int]:
        """(F, r) of the shared basis; r is 0 where there is none."""
        first = self.layers[0]
        return (self.input_width(first.kind, first.layer_index), self.rank or 0)

    def weight_shape(self, kind: Kind, layer_index: int) -> tuple[int, ...]:
        """The shape of one layer's weight: (F, G); (r, G) with a basis; (H_target, F, D_target) for support ``head``."""
        width = self.rank or self.input_width(kind, layer_index)
        if self.support == "full":
            return (width, self.target.width_of(kind, layer_index))
        return (self.target.n_heads, width, self.target.head_dim)
