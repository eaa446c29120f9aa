"""Likelihood of held-out text under every arm, and how far each is from the target with its own cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.arms import Arm

FIRST_TOKENS = 16
# Documents whose mapped tokens make the mean of the `mean` control.
MEAN_DOCUMENTS = 8


@dataclass(frozen=True)
class Scores:
    """One arm over N documents of C continuation tokens; float64 on the CPU.

    Attributes:
        nll: (N,) mean negative log-likelihood per token, in nats.
        kl: (N,) mean of KL(native | arm) over the vocabulary, in nats per token.
        kl_first: (N,) the same over the first 16 tokens.
        kl_tokens: (N, C) the same of every token.
        top1: (N,) share of tokens whose likeliest next token is native's.
        greedy: (N,) share of native's greedy continuation that the arm says alike before its first different token.
    """

    nll: Tensor
    kl: Tensor
    kl_first: Tensor
    kl_tokens: Tensor
    top1: Tensor
    greedy: Tensor

    def rows(self, chosen: Tensor) -> Scores:
        """The documents `chosen`."""
        return Scores(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


@dataclass
class _Parts:
    """Scores of one arm, batch by batch."""

    nll: list[Tensor] = field(default_factory=list)
    kl_tokens: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    greedy: list[Tensor] = field(default_factory=list)

    def joined(self) -> Scores:
        kl = torch.cat(self.kl_tokens)
        return Scores(
            nll=torch.cat(self.nll),
            kl=kl.mean(1),
            kl_first=kl[:, :FIRST_TOKENS].mean(1),
            kl_tokens=kl,
            top1=torch.cat(self.top1),
            greedy=torch.cat(self.greedy),
        )


def likelihood(
    pair: arms.Pair, ids: Tensor, prefix: int, *, batch_size: int, greedy_tokens: int = 64, progress: bool = True
) -> dict[Arm, Scores]:
    """Score every arm on the same documents.

    Args:
        pair: models and mapper.
        ids: (N, prefix + C) token ids of N >= 2 different documents.
        prefix: tokens of context; the cache of an arm covers all but the last of them.
        batch_size: documents per forward pass.
        greedy_tokens: length of the greedy continuation.
        progress: show a bar.
    """
    chosen = [arm for arm in arms.ARMS if arm != "raw" or arms.raw_allowed(pair.mapper)]
    parts: dict[Arm, _Parts] = {arm: _Parts() for arm in chosen}
    mean = arms.mean_pairs(pair, arms.Prefixes(pair, ids[:MEAN_DOCUMENTS, : prefix - 1]).mapped)
    batches = torch.split(torch.arange(len(ids)), batch_size)
    for rows in tqdm(batches, desc=f"likelihood, {prefix} tokens", disable=None if progress else True):
        part = ids[rows]
        # The neighbour in the batch is the wrong document; a document alone in its batch takes the next of all.
        other = None if len(rows) > 1 else arms.Prefixes(pair, ids[(rows + 1) % len(ids), : prefix - 1])
        prefixes = arms.Prefixes(pair, part[:, : prefix - 1], other=other, mean=mean)
        reference: _Reference | None = None
        for arm in chosen:
            model = arms.model_of(pair, arm)
            cache = arms.Rewindable(prefixes.cache(arm, next_ids=part[:, prefix - 1 : prefix]))
            if reference is None:
                reference = _Reference(pair, cache, part, prefix, greedy_tokens)
            reference.score(parts[arm], model, cache)
    return {arm: found.joined() for arm, found in parts.items()}


class _Reference:
    """What the target with its own cache makes of one batch, kept to compare the other arms with."""

    def __init__(self, pair: arms.Pair, cache: arms.Rewindable, ids: Tensor, prefix: int, greedy_tokens: int) -> None:
        self.vocabulary = arms.shared_vocabulary(pair)
        self.ids, self.prefix = ids, prefix
        self.logits = self._logits(pair.target, cache, ids)
        last = ids[:, prefix - 1 : prefix]
        said = arms.greedy(pair.target, cache.fresh(pair.target), last, greedy_tokens, self.vocabulary)
        # The arm is run over native's own continuation: up to the first token at which it would have said another, that is
        # what it would have said by itself. Native is run over it in the same way: many tokens at a time round otherwise than
        # one at a time, and in bfloat16 the likeliest token is often a tie.
        self.said = torch.cat([ids[:, :prefix], said.to(ids.device)], 1)
        self.would = self._logits(pair.target, cache, self.said).argmax(-1) if greedy_tokens else None

    def _logits(self, model: Any, cache: arms.Rewindable, ids: Tensor) -> Tensor:
        return arms.continuation_logits(model, cache.fresh(model), ids, self.prefix, self.vocabulary)

    def score(self, parts: _Parts, model: Any, cache: arms.Rewindable) -> None:
        found = self._logits(model, cache, self.ids).to(self.logits.device)
        # Row by row: a vocabulary's worth of float32 for a whole batch would be the largest thing in memory.
        for row, native in enumerate(self.logits):
            ours, theirs = (F.log_softmax(logits.float(), -1) for logits in (native, found[row]))  # (C, vocabulary)
            wanted = self.ids[row, self.prefix :].to(theirs.device)
            parts.nll.append(-theirs.gather(-1, wanted[:, None]).double().mean()[None].cpu())
            parts.kl_tokens.append((ours.exp() * (ours - theirs)).sum(-1).double().clamp(min=0)[None].cpu())
            parts.top1.append((theirs.argmax(-1) == ours.argmax(-1)).double().mean()[None].cpu())
        del found
        if self.would is not None:
            would = self._logits(model, cache, self.said).argmax(-1)
            same = would == self.would.to(would.device)
            parts.greedy.append(same.long().cumprod(1).double().mean(1).cpu())
        else:
            parts.greedy.append(torch.full((len(self.ids),), float("nan"), dtype=torch.float64))
