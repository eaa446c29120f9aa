"""Find the tokens that a source attends to as it reads the end of a prompt and begins its answer.

The queries (the prompt's last tokens and a draft of the answer), the choice of heads and the means are those of
`kvfit.runtime.recompute`, computed with an engine of vLLM. The pass works on a copy of the prompt's keys and values beside
the engine's paged cache, so it changes nothing that other requests see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfit.runtime.recompute import DRAFT_TOKENS, N_HEADS, OTHERS_WEIGHT, QUESTION_TOKENS
from kvfit.vllm.engine import Engine


def looks(engine: Engine, token_ids: Sequence[int], block_ids: Sequence[int]) -> Tensor:
    """The weight of each token for the queries: the last query counts in full, the others in part.

    Args:
        engine: the source engine, which has read the whole prompt.
        token_ids: the prompt, S tokens.
        block_ids: the engine's blocks that hold it.

    Returns:
        (S - 1,) float32: a weight for each token but the last; 0 for the first.
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
    """For each query, the heads of all layers with the largest single weight on a token other than the first."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.kept: Tensor | None = None  # (queries, heads, tokens)

    def take(self, weights: Tensor) -> None:
        """Merge one layer's weights, (Hq, queries, T)."""
        heads = weights[:, :, : self.n_tokens].transpose(0, 1).clone()
        heads[:, :, 0] = 0.0  # the first token draws attention whatever it is
        heads = heads if self.kept is None else torch.cat([self.kept, heads], 1)
        best = heads.amax(2).argsort(dim=1, descending=True, stable=True)[:, :N_HEADS]
        self.kept = heads.gather(1, best[:, :, None].expand(-1, -1, self.n_tokens))

    def taken(self) -> Tensor:
        """The mean over each query's heads, (queries, tokens), for the pass that has ended; the next pass starts afresh."""
        assert self.kept is not None
        mean, self.kept = self.kept.mean(1), None
        return mean
