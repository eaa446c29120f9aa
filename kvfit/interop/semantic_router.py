"""Convert between a `MapperSpec` and the manifest of a mapper in semantic-router's layout.

The layout cannot express everything that a `MapperSpec` can. Such a mapper is refused with the name of the field.
``docs/reference/semantic-router.md`` says which rules are public and which are kvfit's own. `kvfit.interop.router_folder` reads
and writes the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from kvfit.bundle.records import from_json, to_json
from kvfit.errors import MismatchError, SpecError
from kvfit.hub.refs import is_repository
from kvfit.spec import KINDS, Kind, MapperSpec, ModelSpec

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LETTERS: dict[Kind, str] = {"keys": "k", "values": "v"}

_LISTS = "source_layers_per_target"
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True)
class Compatibility:
    """Field ``compatibility``: the deployment that a mapper is for.

    Attributes:
        source_model: name of the source, ``org/name`` if kvfit wrote it.
        source_revision: commit of the source.
        target_model: name of the target, ``org/name`` if kvfit wrote it.
        target_revision: commit of the target.
        variant: ``full_head``: every output reads all heads of the chosen source layers.
        precision: dtype of the activations that the map was fitted on.
        source_tp: number of parts that each source layer is split into.
        target_tp: number of parts that each target layer is split into.
        head_order: ``contiguous``: heads in the models' own order, with the features of each together.
        num_kv_heads: H of both models.
        head_dim: D of both models.
    """

    source_model: str
    source_revision: str
    target_model: str
    target_revision: str
    variant: Literal["full_head"]
    precision: Literal["fp32", "bf16", "fp16"]
    source_tp: Literal[1]
    target_tp: Literal[1]
    head_order: Literal["contiguous"]
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("source_model", "target_model"):
            _check_name(name, getattr(self, name))
        for name in ("source_revision", "target_revision"):
            if not _COMMIT.fullmatch(getattr(self, name)):
                raise SpecError(name, repr(getattr(self, name))[:80], "a commit hash of 40 hexadecimal digits")
        for name in ("num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise SpecError(name, str(getattr(self, name))[:40], "at least 1")

    @property
    def width(self) -> int:
        """H * D, the features of one layer's keys (or values) per token, of either model."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class RouterManifest:
    """The fields of ``manifest.json`` that describe the map in the folder.

    Attributes:
        mapper_id: the mapper's name for a router.
        compatibility: the deployment that it is for.
        topk: number of source layers that each target layer reads.
        ridge_alpha: the penalty, for information only.
        centered_inputs: inputs and outputs were centred for the fit, and the means are in the bias: the map is ``x @ W + b``.
        rope_stripped_on_keys: whether the maps of keys work on un-rotated keys.
        evaluation_report: name of a report; None for none.
        schema_version: version of the layout.
        source_layers_per_target: per target layer, the source layers that its keys and values read, in the order of the rows
            of ``W``.
    """

    mapper_id: str
    compatibility: Compatibility
    topk: int
    ridge_alpha: float
    centered_inputs: Literal[True]
    rope_stripped_on_keys: bool
    evaluation_report: str | None
    schema_version: Literal[1]
    source_layers_per_target: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _check_name("mapper_id", self.mapper_id)
        if self.topk < 1:
            raise SpecError("topk", str(self.topk)[:40], "at least 1")
        if self.ridge_alpha < 0:
            raise SpecError("ridge_alpha", str(self.ridge_alpha), "0 or more")
        for index, layers in enumerate(self.source_layers_per_target):
            if len(layers) != self.topk or len(set(layers)) != self.topk or min(layers) < 0:
                raise SpecError(f"{_LISTS}.k.{index}", str(list(layers))[:80], f"{self.topk} different layers, as topk says")


def router_manifest(spec: MapperSpec, mapper_id: str) -> RouterManifest:
    """The manifest of a mapper.

    Raises:
        MismatchError: the layout cannot hold something of the mapper; names the field.
    """
    _check_models(spec)
    _check_maps(spec)
    source, target = spec.source, spec.target
    try:
        compatibility = Compatibility(
            source_model=source.ref,
            source_revision=str(source.revision),
            target_model=target.ref,
            target_revision=str(target.revision),
            variant="full_head",
            precision=PRECISIONS[source.dtype],  # type: ignore[arg-type]
            source_tp=1,
            target_tp=1,
            head_order="contiguous",
            num_kv_heads=source.n_heads,
            head_dim=source.head_dim,
        )
        return RouterManifest(
            mapper_id=mapper_id,
            compatibility=compatibility,
            topk=len(spec.layers[0].source_layers),
            ridge_alpha=max(layer.penalty for layer in spec.layers),
            centered_inputs=True,
            rope_stripped_on_keys=not spec.keys_rotated,
            evaluation_report=None,
            schema_version=1,
            source_layers_per_target=tuple(spec.layer("keys", index).source_layers for index in range(target.n_layers)),
        )
    except SpecError as error:
        raise MismatchError(str(error)) from None


def make_mapper_id(spec: MapperSpec, bundle_version: int) -> str:
    """The mapper id that semantic-router's own tools would give; it begins with the models' names."""
    models = (spec.source, spec.target)
    pair = "-".join(re.sub(r"[^a-z0-9.]+", "-", model.ref.rpartition("/")[2].lower()).strip("-") for model in models)
    commits = f"s{spec.source.revision}-t{spec.target.revision}"
    precision = PRECISIONS.get(spec.source.dtype)
    return f"{pair}-full_head-{precision}-tp1-h{spec.source.n_heads}-{commits}-b{bundle_version}"


def router_manifest_to_json(manifest: RouterManifest) -> dict[str, Any]:
    """The fields in the form of ``manifest.json``."""
    content: dict[str, Any] = to_json(manifest)
    lists = {str(index): layers for index, layers in enumerate(content[_LISTS])}
    return content | {_LISTS: dict.fromkeys(LETTERS.values(), lists)}


def read_router_manifest(content: dict[str, Any]) -> RouterManifest:
    """Read the fields of ``manifest.json``.

    Raises:
        SpecError: a key is unknown or missing, or a value has another type or is not supported; names the field.
    """
    # These are the defaults of the layout's own reader.
    content = {"evaluation_report": None, "schema_version": 1} | content
    return from_json(RouterManifest, content | {_LISTS: _read_lists(content.get(_LISTS))})


def first_difference(found: RouterManifest, needed: RouterManifest) -> tuple[str, object, object] | None:
    """The first field in which two manifests describe different maps, with both values; None if they agree."""
    pairs = [(name, getattr(found, name), getattr(needed, name)) for name in vars(needed) if name != "compatibility"]
    ours, theirs = found.compatibility, needed.compatibility
    pairs += [(f"compatibility.{name}", getattr(ours, name), getattr(theirs, name)) for name in vars(theirs)]
    # A router may rename a map or add a report, which does not change the map.
    free = ("mapper_id", "evaluation_report")
    return next((pair for pair in pairs if pair[1] != pair[2] and pair[0] not in free), None)


def _read_lists(lists: Any) -> list[Any]:
    """The list of source layers per target layer, which must be the same for keys and values."""
    if not isinstance(lists, dict) or set(lists) != set(LETTERS.values()):
        found = (
            f"keys {', '.join(lists)}"[:80] if isinstance(lists, dict) else "nothing" if lists is None else type(lists).__name__
        )
        raise SpecError(_LISTS, found, "an object of k and v")
    for letter, layers in lists.items():
        if not isinstance(layers, dict) or not layers or set(layers) != set(map(str, range(len(layers)))):
            raise SpecError(f"{_LISTS}.{letter}", "other keys", "the target layers 0, 1, 2, ...")
    if len(lists["k"]) != len(lists["v"]):
        raise SpecError(f"{_LISTS}.v", f"{len(lists['v'])} target layers", f"{len(lists['k'])} as for k")
    for index, keys in lists["k"].items():
        if keys != lists["v"][index]:
            raise SpecError(f"{_LISTS}.v.{index}", str(lists["v"][index])[:80], f"{str(keys)[:80]} as for k")
    return [lists["k"][str(index)] for index in range(len(lists["k"]))]


def _check_name(field: str, name: str) -> None:
    if not (name.isprintable() and 0 < len(name) <= 256):
        raise SpecError(field, repr(name)[:80], "1 to 256 printable characters")


def _check_maps(spec: MapperSpec) -> None:
    """Refuse maps other than one matrix per kind and target layer, over equally many source layers, the same for both kinds."""
    if spec.lexical_lags:
        raise _not_expressible(
            "lexical_lags", list(spec.lexical_lags), "none: the layout maps every target layer from the source alone"
        )
    if spec.rank is not None:
        raise _not_expressible("rank", spec.rank, "none: the layout has no place for a shared basis; solve without --rank")
    if spec.support != "full":
        raise _not_expressible(
            "support", spec.support, "full: the layout has one matrix over all heads; solve with --support full"
        )
    if spec.inputs != "same":
        raise _not_expressible("inputs", spec.inputs, "same: the layout has no keys from values; solve with --inputs same")
    topk = len(spec.layers[0].source_layers)
    for index in range(spec.target.n_layers):
        keys, values = (spec.layer(kind, index).source_layers for kind in KINDS)
        where = f"layers[{2 * index}].source_layers"
        if len(keys) != topk:
            raise _not_expressible(
                where, f"{len(keys)} layers", f"{topk} as in layer 0: the layout has one topk; solve with --top-k N"
            )
        if keys != values:
            where = f"layers[{2 * index + 1}].source_layers"
            needed = f"{list(keys)} as for the keys: the layout's reader wants one list for both; solve with --shared-layers"
            raise _not_expressible(where, list(values), needed)


def _check_models(spec: MapperSpec) -> None:
    """Refuse models that differ in what the layout has one field for, or that need a field which the layout does not have."""
    source, target = spec.source, spec.target
    for name in ("n_heads", "head_dim", "dtype"):
        if getattr(source, name) != getattr(target, name):
            needed = f"{getattr(source, name)} as in the source: the layout has one for both models"
            raise _not_expressible(f"target.{name}", getattr(target, name), needed)
    if source.dtype not in PRECISIONS:
        raise _not_expressible("source.dtype", source.dtype, f"one of {', '.join(PRECISIONS)}")
    for role, model in (("source", source), ("target", target)):
        if model.geometry is not None:
            raise _not_expressible(f"{role}.geometry", "heads that differ by layer", "the same in all: the layout has one size")
        if not is_repository(model.ref):
            raise _not_expressible(
                f"{role}.ref", repr(model.ref), "org/name on the Hub: the layout names a model by that and a commit"
            )
        if model.revision is None or not _COMMIT.fullmatch(model.revision):
            needed = "a commit hash of 40 hexadecimal digits: the layout has no other fingerprint of a model"
            raise _not_expressible(f"{role}.revision", model.revision, needed)
        if model.quantisation is not None:
            raise _not_expressible(f"{role}.quantisation", model.quantisation, "none: the layout has no place for it")
        for layer_index, window in enumerate(model.windows):
            if window is not None:
                raise _not_expressible(
                    f"{role}.windows[{layer_index}]", window, "full attention: the layout has no place for windows"
                )
        if not spec.keys_rotated and not _rotates_plainly(model):
            needed = "one plain table for all layers: the layout has no place for a table and its reader knows no other"
            raise _not_expressible(f"{role}.rope", "partial, interleaved, scaled or mixed rotation", needed)


def _rotates_plainly(model: ModelSpec) -> bool:
    """Whether every layer rotates features i and i + D/2 of position p by ``p * theta ** (-2 i / D)``, for one theta."""
    if set(model.rope.assignment) != {0} or len(model.rope.tables) != 1:
        return False
    table = model.rope.tables[0]
    frequencies, half = table.inverse_frequencies, model.head_dim // 2
    if table.pairing != "half" or table.rotated_width != model.head_dim or table.attention_scaling != 1.0:
        return False
    if min(frequencies) <= 0:
        return False
    ratio = frequencies[-1] ** (1 / max(half - 1, 1))  # theta ** (-2 / D)
    # The tolerance allows for models that compute the table in float32; any scaling changes some frequency far more.
    return all(abs(found / ratio**plane - 1) < 1e-5 for plane, found in enumerate(frequencies))


def _not_expressible(field: str, found: object, needed: str) -> MismatchError:
    return MismatchError(f"field {field}: found {str(found)[:100]}, needed {needed}")
