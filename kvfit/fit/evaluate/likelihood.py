"""Measure the likelihood of held-out text under every arm, and the arm's distance to the target with its own cache."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.arms import Arm
from kvfit.fit.evaluate.options import Options
from kvfit.fit.progress import track

FIRST_TOKENS = 16
# Number of documents whose mapped tokens are averaged for the `mean` control.
MEAN_DOCUMENTS = 8


@dataclass(frozen=True)
class Scores:
    """The scores of one arm on N documents with C continuation tokens; float64 on the CPU.

    Attributes:
        nll: (N,), mean negative log-likelihood in nats per token.
        kl: (N,), mean of KL(native | arm) in nats per token.
        kl_first: (N,), the mean over the first 16 tokens.
        kl_tokens: (N, C), KL of every token.
        top1: (N,), share of tokens with the same most likely next token as native.
        greedy: (N,), share of native's greedy continuation before the arm's first different token.
        recomputed: (N,), share of the prefix that the target recomputed in the arm.
    """

    nll: Tensor
    kl: Tensor
    kl_first: Tensor
    kl_tokens: Tensor
    top1: Tensor
    greedy: Tensor
    recomputed: Tensor

    def rows(self, chosen: Tensor) -> Scores:
        """The scores of the documents `chosen`."""
        return Scores(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


# Per arm and field of `Scores`, a list with an entry per document. These are JSON values, so that a batch can be saved.
Batch = dict[str, dict[str, list[Any]]]


def likelihood(
    pair: arms.Pair,
    ids: Tensor,
    prefix: int,
    options: Options,
    *,
    chosen: Collection[Arm] = arms.ARMS,
    references: dict[int, Reference] | None = None,
    progress: bool = True,
    kept: Callable[[str, Callable[[], Batch]], Batch] | None = None,
) -> dict[Arm, Scores]:
    """Score arms on the same documents.

    Args:
        pair: models and mapper.
        ids: (N, prefix + C) token ids of N >= 2 different documents.
        prefix: tokens of context; the cache of an arm covers all but the last of them.
        options: `batch_size` documents per forward pass, and `greedy` tokens of greedy continuation.
        chosen: arms to score.
        references: remembers what native makes of each batch, to judge the next mapper on the same documents: a vocabulary's
            worth of logits for every scored token.
        progress: show a bar.
        kept: ``kept(name, measure)`` gives what an interrupted evaluation has measured of a batch, or measures it.
    """
    scorer = _Scorer(pair, ids, prefix, options.greedy, chosen, references)
    joined: dict[Arm, dict[str, list[Any]]] = {}
    batches = torch.split(torch.arange(len(ids)), options.batch_size)
    for rows in track(batches, f"evaluate, likelihood at {prefix} tokens", "batches", show=progress):

        def measure(rows: Tensor = rows) -> Batch:
            return scorer.batch(rows)

        name = f"documents {int(rows[0])} to {int(rows[-1])}"
        for arm, found in (measure() if kept is None else kept(name, measure)).items():
            fields = joined.setdefault(arm, {})  # type: ignore[arg-type]
            for field, values in found.items():
                fields.setdefault(field, []).extend(values)
    return {arm: _scores(found) for arm, found in joined.items()}


def _scores(found: dict[str, list[Any]]) -> Scores:
    nll, kl, top1, greedy, recomputed = (
        torch.tensor([float("nan") if value is None else value for value in found[name]], dtype=torch.float64)
        for name in ("nll", "kl_tokens", "top1", "greedy", "recomputed")
    )
    return Scores(nll, kl.mean(1), kl[:, :FIRST_TOKENS].mean(1), kl, top1, greedy, recomputed)


class _Scorer:
    """Scores documents batch by batch. What all batches share is computed with the first."""

    def __init__(
        self,
        pair: arms.Pair,
        ids: Tensor,
        prefix: int,
        greedy_tokens: int,
        chosen: Collection[Arm],
        references: dict[int, Reference] | None,
    ) -> None:
        self.pair, self.ids, self.prefix, self.greedy_tokens = pair, ids, prefix, greedy_tokens
        self.chosen, self.references = chosen, references

    @cached_property
    def mean(self) -> arms.Pairs:
        """Keys and values of the `mean` control."""
        return arms.mean_pairs(self.pair, arms.Prefixes(self.pair, self.ids[:MEAN_DOCUMENTS, : self.prefix - 1]).mapped)

    @torch.no_grad()
    def batch(self, rows: Tensor) -> Batch:
        """Scores of the documents `rows` under every arm."""
        pair, prefix, part = self.pair, self.prefix, self.ids[rows]
        # For `shuffled`, each document gets its neighbour in the batch. A document that is alone in its batch gets the next
        # one.
        other = None if len(rows) > 1 else arms.Prefixes(pair, self.ids[(rows + 1) % len(self.ids), : prefix - 1])
        mean = self.mean if "mean" in self.chosen else None
        prefixes = arms.Prefixes(pair, part[:, : prefix - 1], other=other, mean=mean)
        reference, native = self._reference(prefixes, rows)
        out: Batch = {}
        for arm in arms.ARMS:
            if arm not in self.chosen or (arm == "raw" and not arms.raw_allowed(pair.mapper)):
                continue
            if arm == "native" and native is not None:
                cache = native
            else:
                cache = arms.Rewindable(prefixes.cache(arm, next_ids=part[:, prefix - 1 : prefix]))
            shares = prefixes.recomputed if arm in ("handoff", "auto") else [0.0] * len(rows)
            out[arm] = reference.score(arms.model_of(pair, arm), cache) | {"recomputed": shares}
        return out

    def _reference(self, prefixes: arms.Prefixes, rows: Tensor) -> tuple[Reference, arms.Rewindable | None]:
        """The reference of a batch, and native's cache if it was made."""
        known = None if self.references is None else self.references.get(int(rows[0]))
        if known is not None and "native" not in self.chosen:
            return known, None
        native = arms.Rewindable(prefixes.cache("native"))
        reference = Reference(self.pair, native, self.ids[rows], self.prefix, self.greedy_tokens)
        if self.references is not None:
            self.references[int(rows[0])] = reference
        return reference, native


class Reference:
    """The results of the target with its own cache on one batch, with which the other arms are compared."""

    def __init__(self, pair: arms.Pair, cache: arms.Rewindable, ids: Tensor, prefix: int, greedy_tokens: int) -> None:
        self.vocabulary = arms.shared_vocabulary(pair)
        self.ids, self.prefix = ids, prefix
        self.logits = self._logits(pair.target, cache, ids)
        last = ids[:, prefix - 1 : prefix]
        said = arms.greedy(pair.target, cache.fresh(pair.target), last, greedy_tokens, self.vocabulary)
        # Every arm runs over native's greedy continuation in one pass. Up to the first token at which it differs, this is what
        # it would have generated itself. Native runs over it in the same way, because a pass over many tokens rounds
        # differently than single steps, and in bfloat16 the most likely token is often a tie.
        self.said = torch.cat([ids[:, :prefix], said.to(ids.device)], 1)
        self.would = self._logits(pair.target, cache, self.said).argmax(-1) if greedy_tokens else None

    def _logits(self, model: Any, cache: arms.Rewindable, ids: Tensor) -> Tensor:
        return arms.continuation_logits(model, cache.fresh(model), ids, self.prefix, self.vocabulary)

    def score(self, model: Any, cache: arms.Rewindable) -> dict[str, list[Any]]:
        """Score a model that continues the same documents from a cache. Returns the fields of `Scores` per document."""
        found = self._logits(model, cache, self.ids).to(self.logits.device)
        out: dict[str, list[Any]] = {"nll": [], "kl_tokens": [], "top1": []}
        # Row by row, because float32 log-probabilities of a whole batch would need most memory.
        for row, native in enumerate(self.logits):
            ours, theirs = (F.log_softmax(logits.float(), -1) for logits in (native, found[row]))  # (C, vocabulary)
            wanted = self.ids[row, self.prefix :].to(theirs.device)
            out["nll"].append(-float(theirs.gather(-1, wanted[:, None]).double().mean()))
            out["kl_tokens"].append((ours.exp() * (ours - theirs)).sum(-1).double().clamp(min=0).tolist())
            out["top1"].append(float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()))
        del found
        if self.would is None:
            return out | {"greedy": [None] * len(self.ids)}
        would = self._logits(model, cache, self.said).argmax(-1)
        same = would == self.would.to(would.device)
        return out | {"greedy": same.long().cumprod(1).double().mean(1).tolist()}
