"""Measure the drift over a conversation that moves back and forth between source and target.

A held-out document is cut into 2 N turns: the source writes the first, the target the second, and so on. Before each of the
target's turns, only the source's last turn is mapped; the tokens that the target ran itself stay as they are. The target's
likelihood of its own turn is compared with that of the target that has read everything itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.fit.evaluate import arms
from kvfit.fit.progress import track
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.runtime.handoff import handoff

SHORTEST_TURN = 2


@torch.no_grad()
def drift(pair: arms.Pair, ids: Tensor, n_turns: int, *, batch_size: int = 8, progress: bool = True) -> list[dict[str, Any]]:
    """The drift of the target in each of its turns, compared with the target with its own cache.

    Args:
        pair: models and mapper.
        ids: (N, T) token ids of conversations.
        n_turns: number of turns of the target.
        batch_size: conversations per forward pass.
        progress: whether to show progress.

    Returns:
        Per turn: ``turn`` (from 1), ``tokens_before``, ``mapped`` (tokens that were mapped for it), ``nll``, ``native_nll``,
        ``source_nll``, ``kl`` and ``drift`` = ``nll - native_nll``, in nats per token.

    Raises:
        MismatchError: the turns would be shorter than two tokens.
    """
    size = ids.shape[1] // (2 * n_turns) if n_turns > 0 else 0
    if size < SHORTEST_TURN:
        raise MismatchError(
            f"--turns: found {n_turns} for {ids.shape[1]} tokens, needed at least 1 and {SHORTEST_TURN} tokens a turn: "
            "fewer turns or a longer --prefix"
        )
    vocabulary = arms.shared_vocabulary(pair)
    sums = torch.zeros(n_turns, 4, dtype=torch.float64)
    mapped = [0] * n_turns
    for part in track(torch.split(ids, batch_size), "evaluate, turns", "batches", show=progress):
        part = part[:, : 2 * n_turns * size].to(input_device(pair.target))
        sources = arms.source_pairs(pair, part[:, :-1])
        exact = {
            name: caches.forward(model, part.to(input_device(model)), caches.new_cache(model))[..., :vocabulary]
            for name, model in (("native", pair.target), ("source", pair.source))
        }
        cache, held = None, 0
        for turn in range(n_turns):
            start, stop = (2 * turn + 1) * size, (2 * turn + 2) * size
            moved = handoff(
                pair.mapper,
                pair.target,
                part[:, :start],
                [(keys[:, :, : start - 1], values[:, :, : start - 1]) for keys, values in sources],
                exact_head=pair.exact_head,
                exact_tail=pair.exact_tail,
                recompute=pair.recompute,
                guide=pair.source if pair.recompute else None,
                target_cache=cache,
                target_ids=None if cache is None else part[:, :held],
            )
            mapped[turn] = moved.n_mapped
            cache, held = moved.cache, stop - 1
            logits = caches.forward(pair.target, part[:, start - 1 : stop - 1], cache)[..., :vocabulary]
            wanted = part[:, start:stop, None]
            ours, native, source = (
                F.log_softmax(found.to(logits.device).float(), -1)
                for found in (logits, *(exact[name][:, start - 1 : stop - 1] for name in ("native", "source")))
            )
            nll = [-float(found.gather(-1, wanted).double().sum()) for found in (ours, native, source)]
            kl = float((native.exp() * (native - ours)).sum(-1).double().sum())
            sums[turn] += torch.tensor([*nll, kl], dtype=torch.float64)
    means = (sums / (len(ids) * size)).tolist()
    return [
        {
            "turn": turn + 1,
            "tokens_before": (2 * turn + 1) * size,
            "mapped": mapped[turn],
            "nll": nll,
            "native_nll": native,
            "source_nll": source,
            "kl": kl,
            "drift": nll - native,
        }
        for turn, (nll, native, source, kl) in enumerate(means)
    ]
