"""`probe`: find the geometry and the rotary description of a loaded model by watching it run.

Two passes over a few tokens, at positions from 0 and from 1,031, show which layers own keys and values, their geometry, and
the inputs and outputs of each layer's rotary function. The candidate tables come from the model's own rotary modules. A layer
is assigned the table, pairing and direction that reproduce its rotation; if none of them does, the model is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from kvfit.errors import KvfitError
from kvfit.model.axes import refuse_several_axes
from kvfit.model.decoder import number, owning_layers, setting, some_tokens, text_config, unwrapped
from kvfit.model.rope import angles, rotate
from kvfit.model.sharing import refuse_private_sharing
from kvfit.model.tables import longest_position, rotary_tables
from kvfit.model.trace import LayerTrace, refusal, trace
from kvfit.spec import Pairing, RopeSpec, RopeTable

_N_TOKENS = 8
_FAR_POSITION = 1031


@dataclass(frozen=True)
class Probe:
    """What the passes showed: the geometry as in `ModelSpec`, the rotary description, and the dtype of the keys."""

    n_layers: int
    n_heads: int
    head_dim: int
    dtype: str
    rope: RopeSpec
    geometry: tuple[tuple[int, ...], ...] | None = None


@dataclass
class _Layer:
    """For each pass: positions (T,), candidates for the keys that the layer's rotary function was given, and its cached keys.

    The candidates are None if the layer does not rotate. `heads` is the layer's entry in `ModelSpec.geometry`.
    """

    heads: tuple[int, ...]
    passes: list[tuple[Tensor, tuple[Tensor, ...] | None, Tensor]]


def probe(model: Any) -> Probe:
    """Geometry and rotary description of a loaded model.

    Args:
        model: a causal language model of transformers, neither compiled nor wrapped.

    Raises:
        UnsupportedModelError: the model cannot be described or verified; names family, layer and reason.
    """
    refuse_by_name(model)
    candidates = rotary_tables(model)
    # A few families rotate the other way, which is the same table with negative frequencies.
    both_ways = [*candidates, *((tuple(-value for value in frequencies), scaling) for frequencies, scaling in candidates)]
    longest = longest_position(model)
    far = _FAR_POSITION if longest is None else max(0, min(_FAR_POSITION, longest + 1 - _N_TOKENS))
    layers: dict[int, _Layer] = {}
    for first in (0, far) if candidates else (0,):
        _watch(model, first, layers)
    if rotary_tables(model) != candidates:
        raise refusal(model, None, "its inverse frequencies change with the length of the input")
    _check_owners(model, layers)
    refuse_private_sharing(model)
    dtype = layers[0].passes[0][2].dtype
    geometry = tuple(layers[index].heads for index in range(len(layers)))
    n_heads, head_dim, _ = geometry[0]
    tables: list[RopeTable] = []
    assignment: list[int | None] = []
    for layer_index in range(len(layers)):
        table = _assign(model, layer_index, layers[layer_index], both_ways)
        if table is not None and table not in tables:
            tables.append(table)
        assignment.append(None if table is None else tables.index(table))
    if any(table is not None for table in assignment):
        refuse_several_axes(model, far)
    rope = RopeSpec(tuple(tables), tuple(assignment))
    alike = set(geometry) == {(n_heads, head_dim, head_dim)}
    return Probe(len(layers), n_heads, head_dim, dtype_name(dtype), rope, None if alike else geometry)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def tolerance(dtype: torch.dtype) -> float:
    """The largest error of a rotated feature, relative to the length of its plane, that rounding can cause.

    A product, a cosine and a sum are each rounded once, with a relative error of ``eps / 2``; the inverse rotation mixes both
    features: ``3 * sqrt(2) * sqrt(2) * eps / 2 = 3 eps``. The lower bound allows for cosines of large angles, which differ
    between devices.
    """
    return max(3 * torch.finfo(dtype).eps, 1e-5)


def plane_error(found: Tensor, wanted: Tensor, table: RopeTable) -> float:
    """The largest difference of rotated features, relative to the length of their plane; infinite if unrotated features differ.

    It is relative to the plane, because in families whose key biases are hundreds of times the spread, an error relative to
    the whole key would always look small.

    Args:
        found: (B, H, T, width), float32.
        wanted: the same shape.
        table: says which features are planes.
    """
    width = table.rotated_width
    if not torch.equal(found[..., width:], wanted[..., width:]) or not bool(torch.isfinite(wanted).all()):
        return float("inf")

    def planes(keys: Tensor) -> Tensor:  # (B, H, T, R/2, 2)
        turned = keys[..., :width].double()
        if table.pairing == "half":
            return torch.stack((turned[..., : width // 2], turned[..., width // 2 :]), -1)
        return torch.stack((turned[..., 0::2], turned[..., 1::2]), -1)

    difference, length = planes(found) - planes(wanted), planes(wanted).norm(dim=-1, keepdim=True)
    return float((difference.abs() / length.clamp(min=1e-30)).max())


def refuse_by_name(model: Any) -> None:
    """Refuse a model that cannot be described, as far as its settings and the names of its modules show before it runs.

    Raises:
        UnsupportedModelError: the model cannot be described; names family, layer and reason.
    """
    if unwrapped(model) is not model or getattr(model, "_compiled_call_impl", None) is not None:
        raise refusal(model, None, "the model is compiled and cannot be watched: pass the model before torch.compile")
    if any(hasattr(module, "lora_A") or hasattr(module, "base_layer") for module in model.modules()):
        raise refusal(model, None, "the model carries an adapter: merge it first (merge_and_unload) and save the result")
    config = text_config(model)
    number(model, "num_attention_heads")  # which a spec records once
    if setting(model.config, "is_encoder_decoder") or setting(config, "add_cross_attention"):
        raise refusal(model, None, "cross attention keeps keys and values of an encoder")
    for layer_index in sorted(setting(config, "cross_attention_layers") or ()):
        raise refusal(model, layer_index, "cross attention keeps keys and values of an encoder")
    if setting(config, "kv_lora_rank"):
        raise refusal(model, None, "latent attention caches a compressed latent, not keys and values per head")
    for layer_index, kind in enumerate(setting(config, "layer_types") or ()):
        if kind == "chunked_attention":
            reason = "chunked attention: which keys a token sees depends on where its chunk begins, which no window describes"
            raise refusal(model, layer_index, reason)
        if kind not in ("full_attention", "sliding_attention"):
            raise refusal(model, layer_index, f"{kind} owns no keys and values per token that a map could make")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise refusal(model, None, f"{kind} rotary frequencies depend on the longest position of each call")


def _watch(model: Any, first: int, layers: dict[int, _Layer]) -> None:
    """Run one pass at positions `first` to first + 7, and add what every layer did to `layers`."""
    input_ids = some_tokens(model, _N_TOKENS)[None]
    positions = torch.arange(first, first + _N_TOKENS, device=input_ids.device)
    order: list[int] = []

    def on_layer(event: LayerTrace) -> None:
        order.append(event.layer_index)
        keys, values = event.keys, event.values
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
            raise refusal(model, event.layer_index, f"found keys and values of shapes {shapes}, needed one number of heads")
        try:
            given = event.given_keys()
        except ValueError as reason:
            raise refusal(model, event.layer_index, str(reason)) from None
        kept = None if given is None else tuple(tensor.cpu() for tensor in given)
        layer = layers.setdefault(event.layer_index, _Layer((keys.shape[1], keys.shape[3], values.shape[3]), []))
        layer.passes.append((positions.cpu(), kept, keys.detach().cpu()))

    try:
        trace(model, input_ids, on_layer, position_ids=positions[None] if first else None)
    except KvfitError:
        raise
    except Exception as error:  # the model's own code failed, which is why it cannot be verified
        raise refusal(model, None, f"a pass over {_N_TOKENS} tokens failed: {type(error).__name__}: {error}") from error
    if len(set(order)) != len(order):
        twice = next(index for index in order if order.count(index) > 1)
        raise refusal(model, twice, "the layer cached keys twice in one pass")


def _check_owners(model: Any, layers: dict[int, _Layer]) -> None:
    """Refuse a model unless every decoder layer has keys and values of its own, apart from last ones that reuse others'."""
    expected = owning_layers(model)
    for layer_index in range(max(expected, len(layers))):
        if layer_index not in layers:
            raise refusal(model, layer_index, "the layer owns no keys and values")
    if len(layers) > expected:
        raise refusal(model, expected, "the layer owns keys and values, its configuration says that it reads an earlier one's")


def _assign(
    model: Any, layer_index: int, layer: _Layer, candidates: Sequence[tuple[tuple[float, ...], float]]
) -> RopeTable | None:
    """The table and pairing that reproduce a layer's rotation in both passes; None for a layer that does not rotate."""
    rotates = {given is not None for _, given, _ in layer.passes}
    if rotates == {False}:
        return None
    if rotates == {True, False}:
        raise refusal(model, layer_index, "it rotates at some positions and not at others")
    best: tuple[float, RopeTable] | None = None
    for frequencies, scaling in candidates:
        for pairing in get_args(Pairing):
            table = RopeTable(frequencies, 2 * len(frequencies), pairing, scaling)
            error = max(_error(table, *one) for one in layer.passes)
            if best is None or error < best[0]:
                best = (error, table)
    allowed = tolerance(layer.passes[0][2].dtype)
    if best is None:
        raise refusal(model, layer_index, "it rotates, but no module of the model holds inverse frequencies (inv_freq)")
    if best[0] > allowed:
        _refuse_shifted_positions(model, layer_index, layer, candidates)
    if best[0] > allowed:
        raise refusal(
            model,
            layer_index,
            f"no rotary table of the model with either pairing gives the keys that it rotated (error {best[0]:.2g}, "
            f"allowed {allowed:.2g})",
        )
    return best[1]


def _refuse_shifted_positions(
    model: Any, layer_index: int, layer: _Layer, candidates: Sequence[tuple[tuple[float, ...], float]]
) -> None:
    """Refuse a model that, without explicit positions, does not number its tokens from 0."""
    positions, given, keys = layer.passes[0]
    for first in (1, 2):
        for frequencies, scaling in candidates:
            for pairing in get_args(Pairing):
                table = RopeTable(frequencies, 2 * len(frequencies), pairing, scaling)
                if _error(table, positions + first, given, keys) <= tolerance(keys.dtype):
                    reason = f"its positions start at {first} when it is given none, needed 0 as explicit positions do"
                    raise refusal(model, layer_index, reason)


def _error(table: RopeTable, positions: Tensor, given: tuple[Tensor, ...] | None, keys: Tensor) -> float:
    errors = [float("inf")]
    for tensor in given or ():
        if table.rotated_width <= tensor.shape[-1]:
            wanted = keys[..., : tensor.shape[-1]].float()
            errors.append(plane_error(rotate(tensor.float(), table, angles(table, positions)), wanted, table))
    return min(errors)
