"""Refuse caches, positions and ids that do not fit a mapper's spec, before anything is computed or changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model import cache as caches
from kvfit.runtime.features import Pairs
from kvfit.spec import KINDS, MapperSpec, ModelSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_source(source: ModelSpec, pairs: Pairs, positions: Tensor | None = None) -> None:
    """Refuse a source cache or positions that do not fit the source.

    Args:
        source: the source's spec.
        pairs: keys and values per source layer, (B, H, T, D).
        positions: (T,) or (B, T); None to check the cache only.


    Raises:
        MismatchError: something does not fit; names the layer, kind and shape.
    """
    if len(pairs) != source.n_layers:
        raise MismatchError(f"source cache: found {len(pairs)} layers, needed {source.n_layers} as {source.ref} has")
    batch, _, total, _ = pairs[0][0].shape
    for layer_index, pair in enumerate(pairs):
        _check_pair(pair, layer_index, source, (batch, total), pairs[0][0].dtype)
    if positions is None:
        return
    if tuple(positions.shape) not in {(total,), (batch, total)}:
        raise MismatchError(
            f"positions: found shape {tuple(positions.shape)}, needed ({total},) or ({batch}, {total}) as the cache has"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise MismatchError(f"positions: found {positions.dtype}, needed whole numbers")


def _check_pair(
    pair: tuple[Tensor, Tensor], layer_index: int, model: ModelSpec, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    for kind, tensor in zip(KINDS, pair, strict=True):
        heads, size = model.shape(kind, layer_index)
        shape, where = (sizes[0], heads, sizes[1], size), f"source cache, {kind} of layer {layer_index}"
        if tuple(tensor.shape) != shape:
            raise MismatchError(f"{where}: found shape {tuple(tensor.shape)}, needed {shape}")
        if tensor.dtype != dtype or dtype not in DTYPES:
            raise MismatchError(
                f"{where}: found {tensor.dtype}, needed one of {', '.join(map(str, DTYPES))}, the same for all layers"
            )


def check_target(
    target: ModelSpec, cache: Any, batch: int, total: int, *, layers: Sequence[int] | None = None, name: str = "into"
) -> int:
    """Refuse a cache that does not belong to the target or has no room for `total` tokens.

    Args:
        target: the target's spec.
        cache: the cache.
        batch: number of sequences that it must have.
        total: number of tokens that it must have room for.
        layers: the target layers that will be written; all by default.
        name: what errors call the cache.

    Returns:
        The number of tokens that it holds.

    Raises:
        MismatchError: the cache does not fit; names the layer and what differs.
    """
    states = caches.layer_states(cache)
    n_filled = sum(state.length > 0 for state in states)
    if len(states) > target.n_layers or (layers is None and 0 < n_filled < target.n_layers):
        n_found = f"{len(states)} layers" if len(states) > target.n_layers else f"{n_filled} layers with tokens"
        raise MismatchError(
            f"{name}: found {n_found}, needed {target.n_layers} as {target.ref} has: pass a cache of the target's own, "
            "not the source's"
        )
    lengths = set()
    for layer_index in range(target.n_layers) if layers is None else layers:
        state = states[layer_index] if layer_index < len(states) else None
        lengths.add(0 if state is None else state.length)
        if state is None:
            continue
        where = f"{name}, layer {layer_index}"
        if state.keys is not None:
            found, needed = (*state.keys.shape[:2], state.keys.shape[3]), (batch, *target.shape("keys", layer_index))
            if found != needed:
                raise MismatchError(f"{where}: found batch, heads and head size {found}, needed {needed}")
        if state.capacity is not None and total > state.capacity:
            raise MismatchError(f"{where}: found room for {state.capacity} tokens, needed {total}")
    if len(lengths) > 1:
        raise MismatchError(f"{name}: found layers of {sorted(lengths)} tokens, needed one length")
    return lengths.pop() if lengths else 0


def check_layers(target: ModelSpec, layers: Iterable[int] | None) -> list[int]:
    """The target layers that the caller asks for, ascending; None asks for all.

    Raises:
        MismatchError: the target does not have one of them.
    """
    chosen = list(range(target.n_layers)) if layers is None else sorted(set(layers))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < target.n_layers:
        raise MismatchError(f"layers: found {chosen}, needed target layers of 0 to {target.n_layers - 1}")
    return chosen


def check_first_layer(target: ModelSpec, pair: Any, batch: int, total: int) -> tuple[Tensor, Tensor]:
    """The keys and values of the target's first layer that the caller passed, (B, H, T, D), checked.

    Raises:
        MismatchError: they do not fit; names the half and its shape.
    """
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(half, Tensor) for half in pair):
        raise MismatchError(f"first_layer: found {type(pair).__name__}, needed a pair of tensors (keys, values)")
    for kind, half in zip(KINDS, pair, strict=True):
        heads, size = target.shape(kind, 0)
        needed = (batch, heads, total, size)
        if tuple(half.shape) != needed or half.dtype not in DTYPES:
            raise MismatchError(f"first_layer, {kind}: found shape {tuple(half.shape)} of {half.dtype}, needed {needed}")
    return pair[0], pair[1]


def check_ids(input_ids: Any, batch: int, total: int) -> Tensor:
    """The ids of the source cache's tokens, (B, T), checked.

    Raises:
        MismatchError: they have another shape or dtype; names it.
    """
    if not isinstance(input_ids, Tensor) or tuple(input_ids.shape) != (batch, total):
        found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise MismatchError(f"input_ids: found {found}, needed ({batch}, {total}) ids of the tokens in the source cache")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise MismatchError(f"input_ids: found {input_ids.dtype}, needed token ids as torch.int64")
    return input_ids


def check_source_ids(source_ids: Any, source_cache: Any, input_ids: Tensor, mask: Tensor) -> None:
    """Refuse a source's cache that was filled with other ids than the conversation begins with.

    Args:
        source_ids: the ids that it was filled with, as the caller says.
        source_cache: the cache.
        input_ids: (B, S), the conversation.
        mask: (B, S), 0 on padding, which may be any id.

    Raises:
        MismatchError: names their shape, or the first token that differs.
    """
    batch, _, total, _ = caches.read_cache(source_cache)[0][0].shape
    if not isinstance(source_ids, Tensor) or tuple(source_ids.shape) != (batch, total):
        found = tuple(source_ids.shape) if isinstance(source_ids, Tensor) else type(source_ids).__name__
        raise MismatchError(
            f"source_ids: found {found}, needed ({batch}, {total}) ids, one for each token in source_cache: what generate "
            "returns has one more than its cache, so pass [:, :-1] of it"
        )
    if batch != len(input_ids) or total > input_ids.shape[1]:
        return  # a cache that does not fit the conversation is refused for that
    differs = (source_ids.to(input_ids.device) != input_ids[:, :total]) & (mask[:, :total] != 0)
    if bool(differs.any()):
        row, token = differs.nonzero()[0].tolist()
        raise MismatchError(
            f"source_ids: found id {int(source_ids[row, token])} at row {row}, token {token}, needed "
            f"{int(input_ids[row, token])} as input_ids has: let the source read this conversation, and hand over that cache"
        )


def check_vocabulary(spec: MapperSpec, input_ids: Tensor, mask: Tensor) -> None:
    """Refuse ids that the tokenizer of the fit cannot give, where its specs say how many it can.

    Such a token was added later. The map has never seen one, and its row of the embedding is no part of a model's identity.

    Args:
        spec: the mapper's.
        input_ids: (B, S), the conversation.
        mask: (B, S), 0 on padding, which may be any id.

    Raises:
        MismatchError: names the first such token.
    """
    counts = [model.content.n_ids for model in (spec.source, spec.target) if model.content is not None]
    if not counts:
        return
    unknown = (input_ids >= min(counts)) & (mask != 0)
    if bool(unknown.any()):
        row, token = unknown.nonzero()[0].tolist()
        raise MismatchError(
            f"input_ids: found id {int(input_ids[row, token])} at row {row}, token {token}, needed ids below {min(counts)}, "
            "which are all that the tokenizer had when the map was fitted: fit a mapper with the tokens that were added since"
        )


def common_tokens(target: ModelSpec, target_cache: Any, target_ids: Any, input_ids: Tensor) -> int:
    """How many first tokens the target's cache and a conversation, without its last token, have in common.

    Args:
        target: the target's spec.
        target_cache: a cache of the target.
        target_ids: (B, n), the ids that it was made from.
        input_ids: (B, S), the conversation.

    Raises:
        MismatchError: the cache is not the target's, or the ids are not of all of its tokens.
    """
    batch, length = input_ids.shape
    held = check_target(target, target_cache, batch, length - 1, name="target_cache")
    shape = tuple(target_ids.shape) if isinstance(target_ids, Tensor) else None
    if target_ids is None or shape is None or len(shape) != 2 or shape[0] != batch or shape[1] < held:
        found = type(target_ids).__name__ if shape is None else shape
        raise MismatchError(f"target_ids: found {found}, needed ({batch}, n) ids of all {held} tokens in target_cache")
    most = min(held, length - 1)
    differs = (target_ids[:, :most].to(input_ids.device) != input_ids[:, :most]).any(0)
    return int(differs.int().argmax()) if bool(differs.any()) else most
