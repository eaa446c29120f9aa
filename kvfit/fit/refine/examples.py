"""Make the training examples: sequences with the inputs of the maps, and the predictions of the target with its own cache.

Both models run on each sequence once, without gradients. Training then needs only the examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.fit.capture.activations import Activations
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.model.rope import angles, unrotate
from kvfit.runtime import EXACT_HEAD
from kvfit.runtime.features import Columns, Pairs
from kvfit.spec import KINDS, MapperSpec

# Of the target's own distribution, the probabilities of this many most likely tokens are kept, and the sum of the others.
LIKELIEST = 128


@dataclass(frozen=True)
class Example:
    """One sequence of T tokens, everything on the CPU.

    Attributes:
        ids: (T,), the token ids.
        inputs: (T, F), the columns that any map reads, in the order of `kvfit.runtime.features.Columns`; with a shared basis,
            their projection (T, r). In the target's dtype.
        exact: per target layer, the target's own keys and values of what is not mapped, (1, H, n, D): all tokens of a
            layer before the first mapped one, and the first `EXACT_HEAD` tokens of every other layer.
        likely: (T, K), the most likely next tokens after each token, with the target's own cache.
        log_probs: (T, K + 1), their log-probabilities, then that of all other tokens together.
    """

    ids: Tensor
    inputs: Tensor
    exact: Pairs
    likely: Tensor
    log_probs: Tensor


@torch.no_grad()
def examples(
    spec: MapperSpec, source: Any, target: Any, sequences: Iterable[Tensor], basis: Tensor | None = None
) -> list[Example]:
    """Run both models on sequences of one length.

    Args:
        spec: the mapper's spec, with support ``full``.
        source: the loaded source.
        target: the loaded target.
        sequences: token ids, (T,) each.
        basis: the mapper's shared basis in float32; None if it has none.
    """
    found = []
    columns, dtype = Columns(spec, spec.mapped_layers), caches.cache_dtype(target)
    for ids in sequences:
        read = Activations(source, spec.source, range(len(ids)))(ids[None])
        cache = caches.full_cache()
        logits = caches.forward(target, ids[None].to(input_device(target)), cache)[0].float()
        pairs = caches.read_cache(cache)
        blocks = [read[kind][layer_index][0] for kind in KINDS for layer_index in columns.read[kind]]
        inputs = torch.cat([block.float().to(logits.device) for block in [*blocks, *_lexical(spec, *pairs[0])]], 1)
        if basis is not None:
            inputs = inputs @ basis.to(inputs.device)
        first_mapped = spec.mapped_layers.start
        exact = [
            tuple(half[:, :, : len(ids) if index < first_mapped else EXACT_HEAD].cpu() for half in pair)
            for index, pair in enumerate(pairs)
        ]
        likely, log_probs = _likeliest(logits)
        found.append(Example(ids, inputs.to(dtype).cpu(), exact, likely.cpu(), log_probs.cpu()))  # type: ignore[arg-type]
    return found


def _lexical(spec: MapperSpec, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Per lag, (T, 2 * H * D): un-rotated keys, then values, from those of the target's first layer, (1, H, T, D)."""
    if not spec.lexical_lags:
        return []
    steps = torch.arange(keys.shape[2], device=keys.device)
    table = spec.target.rope.table(0)
    if table is not None:
        keys = unrotate(keys, table, angles(table, steps), dtype=torch.float32)
    rows = torch.cat([half[0].transpose(0, 1).flatten(1).float() for half in (keys, values)], 1)
    return [rows[(steps - lag).clamp(min=0)] for lag in spec.lexical_lags]


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely ids (T, K), and log-probabilities (T, K + 1), of logits (T, vocabulary)."""
    log_probs = logits.log_softmax(-1)
    kept, ids = log_probs.topk(min(LIKELIEST, logits.shape[-1] - 1))
    return ids, with_rest(kept)


def with_rest(log_probs: Tensor) -> Tensor:
    """Log-probabilities (..., K) of some outcomes, followed by that of all others together, (..., K + 1)."""
    none_of_them = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([log_probs, none_of_them], -1)
