"""Run a vLLM engine's own model on chosen tokens, or only as far as the first layer's attention.

vLLM resumes a prompt after a computed prefix and computes nothing within it. But its attention takes a batch of pieces, each
with its positions in a sequence and a table of blocks. So tokens anywhere in a mapped prefix can be run again in one pass of
the engine's own kernels: every run of neighbouring tokens is a piece of its own, and all pieces have the same blocks. Each
layer writes the new keys and values of all pieces before any piece attends. Each token therefore attends to the new keys and
values of the tokens that are run again and to the mapped ones of all others, as in `kvfit.runtime.rewrite`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvfit.errors import UnsupportedModelError
from kvfit.vllm.layout import watched_layout

Pair = tuple[Tensor, Tensor]


class Engine:
    """The model of one worker, its attention layers and their paged caches.

    Attributes:
        layers: the attention layers in decoder order.
        layout: how a block is laid out in every layer's cache.
        n_heads: H, key/value heads of a layer.
        head_dim: D.
        dtype: the cache's dtype.
        device: the cache's device.
        end_ids: the token ids that end an answer.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Find the model around the attention layers that vLLM has registered.

        Raises:
            UnsupportedModelError: a layer's cache does not hold plain keys and values, or layers differ in shape.
        """
        self._vllm_config = vllm_config
        (group,) = kv_cache_config.kv_cache_groups
        names = sorted(group.layer_names, key=extract_layer_index)
        self.layers = [vllm_config.compilation_config.static_forward_context[name] for name in names]
        first = self.layers[0]
        self.n_heads, self.head_dim = first.num_kv_heads, first.head_size
        self.device, self.dtype = first.kv_cache.device, first.kv_cache.dtype
        self._block_tokens = first.kv_cache.shape[2]
        block = group.kv_cache_spec.block_size
        if self._block_tokens != block:
            raise UnsupportedModelError(
                f"attention cache: found blocks of {self._block_tokens} tokens in the kernel and of {block} in the engine, "
                f"needed one size: start it with --block-size {self._block_tokens}"
            )
        for name, layer in zip(names, self.layers, strict=True):
            if layer.kv_cache.shape[1:] != first.kv_cache.shape[1:] or layer.kv_sharing_target_layer_name is not None:
                raise UnsupportedModelError(
                    f"{name}: found a cache of {tuple(layer.kv_cache.shape[1:])}, needed one of its own of "
                    f"{tuple(first.kv_cache.shape[1:])} as the first layer has"
                )
        self.layout = watched_layout(self._write, first.kv_cache, self.n_heads, self._block_tokens, self.head_dim)
        self._model = _model_around(first)
        self._builder = first.get_attn_backend().get_builder_cls()(group.kv_cache_spec, names, vllm_config, self.device)
        self._names = names
        ends = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
        self.end_ids = [ends] if isinstance(ends, int) else list(ends or [])

    def _write(self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        self.layers[0].impl.do_kv_cache_update(self.layers[0], keys, values, cache, slots)

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of the keys and values that some blocks hold in all layers, (L, 2, H, T, D)."""
        return torch.stack([self.layout.read(layer.kv_cache, block_ids) for layer in self.layers])

    def write(self, layer_index: int, block_ids: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Fill whole blocks of one layer with keys and values, (H, T, D)."""
        self.layout.write(self.layers[layer_index].kv_cache, block_ids, torch.stack([keys, values]))

    def run(self, token_ids: Sequence[int], tokens: Iterable[int], block_ids: Sequence[int]) -> None:
        """Run some tokens of a sequence again and replace their keys and values in its blocks.

        Args:
            token_ids: the sequence from its first token on.
            tokens: the indices of the tokens to run; each token attends to all tokens before it.
            block_ids: the sequence's blocks.
        """
        # Ascending, since a later token may attend to an earlier one that is run again too.
        limit = self._vllm_config.scheduler_config.max_num_batched_tokens
        most_runs = self._vllm_config.scheduler_config.max_num_seqs
        batch: list[range] = []
        for piece in _runs(sorted(set(tokens)), limit):
            if len(batch) == most_runs or sum(map(len, batch)) + len(piece) > limit:
                self._pass(token_ids, batch, block_ids)
                batch = []
            batch.append(piece)
        if batch:
            self._pass(token_ids, batch, block_ids)

    def first_layer(self, token_ids: Sequence[int]) -> Pair:
        """Keys (rotated) and values of the first layer for all tokens of a sequence, (1, H, T, D).

        They need no attention, so the pass ends before it.
        """
        limit = self._vllm_config.scheduler_config.max_num_batched_tokens
        found: list[Pair] = []
        for start in range(0, len(token_ids), limit):
            positions = torch.arange(start, min(start + limit, len(token_ids)), device=self.device)
            ids = torch.tensor(token_ids[start : start + limit], device=self.device)
            with _stopping_at(self.layers[0]) as seen, self._forward(None, None, len(ids)):
                try:
                    self._model(input_ids=ids, positions=positions)
                except _Reached:
                    found.append((seen[1], seen[2]))
        shape = (1, -1, self.n_heads, self.head_dim)
        keys, values = (torch.cat(half).view(shape).transpose(1, 2) for half in zip(*found, strict=True))
        return keys, values

    @torch.inference_mode()
    def read_on(self, token_ids: Sequence[int], memory: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        """Run a sequence's last tokens beside the paged cache and show what they attend to.

        Args:
            token_ids: the tokens to run; their places are at the end of `memory`.
            memory: (L, 2, H, T, D) keys and values of the whole sequence; the pass writes those of the tokens that it runs.
            take: is called with each layer's attention weights, (Hq, n, T) float32.

        Returns:
            (V,) logits of the next token.

        Raises:
            UnsupportedModelError: the attention is not a plain softmax of scaled products, but has capped scores, sinks or
                ALiBi.
        """
        total = memory.shape[3]
        positions = torch.arange(total - len(token_ids), total, device=self.device)
        hidden = torch.arange(total, device=self.device) > positions[:, None]  # (n, T)

        def attend(layer: Any, own: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            count = len(token_ids)
            for half, fresh in zip(own, (key, value), strict=True):
                half[:, -count:] = fresh.view(count, self.n_heads, self.head_dim).transpose(0, 1)
            grouped = query.view(count, self.n_heads, -1, self.head_dim).permute(1, 2, 0, 3).float()  # (H, Hq / H, n, D)
            scores = grouped @ own[0].float()[:, None].transpose(2, 3) * layer.impl.scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            take(weights.flatten(0, 1))
            attended: Tensor = weights @ own[1].float()[:, None]  # (H, Hq / H, n, D)
            return attended.permute(2, 0, 1, 3).reshape(count, -1).to(query.dtype)

        for layer in self.layers:
            found = {name: getattr(layer.impl, name, None) for name in ("logits_soft_cap", "alibi_slopes", "sinks")}
            special = [
                name
                for name, value in found.items()
                if value is not None and not (isinstance(value, int | float) and value == 0)
            ]
            if special:
                raise UnsupportedModelError(
                    f"attention: found {special[0]}, needed plain attention to see where the source looks"
                )
        ids = torch.tensor(token_ids, device=self.device)
        with _attending(self.layers, memory, attend), self._forward(None, None, len(token_ids)):
            states = self._model(input_ids=ids, positions=positions)
            logits: Tensor = self._model.compute_logits(states[-1:])[0]  # type: ignore[operator]  # a method that vLLM's models have
        return logits

    @torch.inference_mode()
    def _pass(self, token_ids: Sequence[int], pieces: list[range], block_ids: Sequence[int]) -> None:
        """One forward pass over runs of neighbouring tokens of one sequence."""
        pieces = sorted(pieces, key=len)  # backends take single tokens for decoding and expect them before longer runs
        order = [token for piece in pieces for token in piece]
        blocks = torch.tensor(block_ids, dtype=torch.int32)
        positions = torch.tensor(order)
        slots = blocks[positions // self._block_tokens].long() * self._block_tokens + positions % self._block_tokens
        starts = torch.tensor([0, *(len(piece) for piece in pieces)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([piece.stop for piece in pieces], dtype=torch.int32)
        place = self.device
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(place),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(place),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(pieces),
            num_actual_tokens=len(order),
            max_query_len=max(map(len, pieces)),
            max_seq_len=int(lengths.max()),
            block_table_tensor=blocks.expand(len(pieces), -1).contiguous().to(place),
            slot_mapping=slots.to(place),
            causal=True,
            is_prefilling=torch.ones(len(pieces), dtype=torch.bool),
            positions=positions.to(place),
        )
        metadata = self._builder.build(0, common)
        ids = torch.tensor([token_ids[token] for token in order], device=place)
        with self._forward(metadata, slots.to(place), len(order)):
            self._model(input_ids=ids, positions=positions.to(place))

    @contextmanager
    def _forward(self, metadata: Any, slots: Tensor | None, n_tokens: int) -> Iterator[None]:
        """vLLM's context of a forward pass, without compiled code, in which hooks would not fire."""
        per_layer = None if metadata is None else dict.fromkeys(self._names, metadata)
        mapping = None if slots is None else dict.fromkeys(self._names, slots)
        with set_forward_context(per_layer, self._vllm_config, num_tokens=n_tokens, slot_mapping=mapping, skip_compiled=True):
            yield


class _Reached(Exception):
    """Ends a forward pass that has reached the first attention layer."""


@contextmanager
def _stopping_at(layer: Any) -> Iterator[list[Tensor]]:
    """End a pass at a layer's attention and collect its inputs: query, key and value."""
    seen: list[Tensor] = []

    def hook(module: Any, args: tuple[Tensor, ...]) -> None:
        if len(args) < 3:
            raise UnsupportedModelError(f"{type(module).__name__}: found {len(args)} inputs, needed query, key and value")
        seen.extend(part.clone() for part in args[:3])
        raise _Reached

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _attending(layers: list[Any], memory: Tensor, attend: Callable[..., Tensor]) -> Iterator[None]:
    """Replace vLLM's attention, which reads and writes the paged cache, by the connector's own."""
    for layer, own in zip(layers, memory, strict=True):
        layer.forward = functools.partial(attend, layer, own)  # hides the class's method for this one module
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _runs(tokens: Sequence[int], longest: int) -> Iterator[range]:
    """Runs of neighbours among ascending numbers, none longer than `longest`."""
    start = 0
    for index in range(1, len(tokens) + 1):
        if index == len(tokens) or tokens[index] != tokens[index - 1] + 1 or index - start == longest:
            yield range(tokens[start], tokens[index - 1] + 1)
            start = index


def _model_around(layer: torch.nn.Module) -> torch.nn.Module:
    """The outermost module that holds an attention layer.

    vLLM gives a connector the attention layers and the caches, but not the model, and a module does not know its parent.
    """
    holding: list[torch.nn.Module] = [
        module
        for module in gc.get_objects()
        if issubclass(type(module), torch.nn.Module) and any(inner is layer for inner in module.modules())
    ]
    return max(holding, key=lambda module: sum(1 for _ in module.modules()))
