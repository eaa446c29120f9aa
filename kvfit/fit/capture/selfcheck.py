"""Verify on a real batch that a model does what its spec's rotary description says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfit.model.decoder import input_device
from kvfit.model.rope import angles, rotate, unrotate
from kvfit.model.rope_probe import Probe, plane_error, tolerance
from kvfit.model.trace import LayerTrace, refusal, trace
from kvfit.spec import KINDS, ModelSpec


@torch.no_grad()
def self_check(model: Any, spec: ModelSpec | Probe, input_ids: Tensor) -> None:
    """Compare the rotary description of `spec` with what each layer of the model does on one batch.

    For every layer, the un-rotated keys must equal what the model gave its rotary function, rotating them again must give the
    cached keys, and features and layers that do not rotate must be bit-identical. Every layer must cache each token once.

    Args:
        model: the loaded model that `spec` describes.
        spec: from `describe_model` or `probe`, or read from a bundle.
        input_ids: (B, T), unpadded, on any device. A longer batch verifies more positions.

    Raises:
        UnsupportedModelError: they differ; names family, layer and reason.
    """
    batch, n_tokens = input_ids.shape
    seen: list[int] = []

    def on_layer(event: LayerTrace) -> None:
        layer_index = event.layer_index
        seen.append(layer_index)
        if layer_index >= spec.n_layers:
            raise refusal(model, layer_index, f"found a layer beyond the {spec.n_layers} of the spec")
        alike = (spec.n_heads, spec.head_dim, spec.head_dim)
        n_heads, *sizes = alike if spec.geometry is None else spec.geometry[layer_index]
        for kind, tensor, size in zip(KINDS, (event.keys, event.values), sizes, strict=True):
            needed = (batch, n_heads, n_tokens, size)
            if tuple(tensor.shape) != needed:
                raise refusal(model, layer_index, f"found {kind} of shape {tuple(tensor.shape)}, needed {needed}")
        reason = _fault(event, spec)
        if reason is not None:
            raise refusal(model, layer_index, reason)

    trace(model, input_ids.to(input_device(model)), on_layer)
    for layer_index in range(spec.n_layers):
        if seen.count(layer_index) != 1:
            raise refusal(model, layer_index, f"the layer cached keys {seen.count(layer_index)} times in one pass, needed once")


def _fault(event: LayerTrace, spec: ModelSpec | Probe) -> str | None:
    """What differs in one layer; None if nothing does."""
    table = spec.rope.table(event.layer_index)
    try:
        given = event.given_keys()
    except ValueError as reason:
        return str(reason)
    if table is None:
        return None if given is None else "the model rotates the keys of this layer, the spec says that it does not"
    if given is None:
        return "the model does not rotate the keys of this layer, the spec says that it does"
    keys = event.keys.float()
    positions = torch.arange(keys.shape[2], device=keys.device)
    cos_sin = angles(table, positions)
    stripped = unrotate(keys, table, cos_sin)
    allowed = tolerance(event.keys.dtype)
    errors = [
        plane_error(stripped[..., : tensor.shape[-1]], tensor.float(), table)
        for tensor in given
        if tensor.shape[-1] >= table.rotated_width
    ]
    if not errors or min(errors) > allowed:
        found = f"{min(errors):.2g}" if errors else "another width"
        return f"un-rotated keys are not what the model gave its rotary function (error {found}, allowed {allowed:.2g})"
    error = plane_error(rotate(stripped, table, cos_sin), keys, table)
    if error > allowed:
        return f"un-rotating and rotating does not give the cached keys back (error {error:.2g}, allowed {allowed:.2g})"
    return None
