"""Where a source looks as it reads the end of a prompt and begins its answer: what `kvfit.runtime.recompute` asks of a guide.

The same queries (the prompt's last tokens, and a draft of the answer), heads and means as there, from an engine of vLLM. It
runs beside the engine's paged cache, on a copy of the prompt's keys and values, so nothing that other requests see is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfit.runtime.recompute import DRAFT_TOKENS, N_HEADS, OTHERS_WEIGHT, QUESTION_TOKENS
from kvfit.vllm.engine import Engine


def looks(engine: Engine, token_ids: Sequence[int], block_ids: Sequence[int]) -> Tensor:
    """What the queries attend to: the last one, and in part the others.

    Args:
        engine: the source's; it has read the whole prompt.
        token_ids: the prompt, S tokens.
        block_ids: of the engine's blocks that hold it.

    Returns:
        (S - 1,) float32: one weight for each token but the last; 0 for the first.
    """
    length = len(token_ids)
    question = min(QUESTION_TOKENS, length)
    states = engine.read(block_ids)[:, :, :, :length]
    memory = torch.cat([states, states.new_zeros(*states.shape[:3], DRAFT_TOKENS, states.shape[4])], 3)
    strongest = _Strongest(length - 1)
    logits = engine.read_on(token_ids[length - question :], memory[:, :, :, :length], strongest.take)
    taken = strongest.taken()
    others = taken.amax(0)
    for step in range(DRAFT_TOKENS):
        token = int(logits.argmax())
        if token in engine.end_ids:
            break
        logits = engine.read_on([token], memory[:, :, :, : length + step + 1], strongest.take)
        others = torch.maximum(others, strongest.taken()[0])
    return torch.maximum(taken[-1], OTHERS_WEIGHT * others)


class _Strongest:
    """Each query's heads with the largest single weight on a token that counts, over all layers of a pass."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.kept: Tensor | None = None  # (queries, heads, tokens)

    def take(self, weights: Tensor) -> None:
        """Merge one layer's weights, (Hq, queries, T)."""
        found = weights[:, :, : self.n_tokens].transpose(0, 1).clone()
        found[:, :, 0] = 0.0  # the first token draws attention whatever it is
        found = found if self.kept is None else torch.cat([self.kept, found], 1)
        best = found.amax(2).argsort(dim=1, descending=True, stable=True)[:, :N_HEADS]
        self.kept = found.gather(1, best[:, :, None].expand(-1, -1, self.n_tokens))

    def taken(self) -> Tensor:
        """(queries, tokens) the mean over each query's heads, of the pass that has run."""
        assert self.kept is not None
        mean, self.kept = self.kept.mean(1), None
        return mean
