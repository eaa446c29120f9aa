"""Compare several mappers of one pair on the same documents and questions.

The prefills of both models and the results of native and source are the same for all mappers, so they are measured once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from kvfit.bundle.bundle import Bundle
from kvfit.errors import TextError
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate import arms, ways
from kvfit.fit.evaluate.arms import Arm
from kvfit.fit.evaluate.clock import devices_of, timed
from kvfit.fit.evaluate.heldout import fillers, heldout
from kvfit.fit.evaluate.intervals import share_interval, share_of_gap
from kvfit.fit.evaluate.likelihood import Reference, Scores, likelihood
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.pair import mapper_for
from kvfit.fit.evaluate.questions import QUESTIONS_PER_CONTEXT, Probe, probes
from kvfit.fit.evaluate.recall import ask
from kvfit.runtime.mapper import Mapper


@dataclass(frozen=True)
class Row:
    """One way of giving the target a context.

    Attributes:
        nll: mean negative log-likelihood in nats per token.
        share: share of the gap between the source and native that is recovered.
        interval: 95 % interval of `share` over documents.
        kl: KL to the target with its own cache in nats per token.
        recall: per kind of question, share of exact answers and mean log-probability of the answers' tokens.
        work: share of a prefill's operations; None if nothing is moved.
        recomputed: share of the documents' tokens that the target recomputed.
        milliseconds: time until the target can continue from one context, without the source's prefill; None if not timed.
    """

    nll: float
    share: float
    interval: tuple[float, float]
    kl: float
    recall: dict[str, tuple[float, float]]
    work: float | None
    recomputed: float = 0.0
    milliseconds: float | None = None


class Comparison:
    """Two loaded models, documents and questions, and the results that are independent of the mapper."""

    def __init__(
        self,
        first: Bundle,
        text: TextOptions,
        options: Options,
        *,
        source: str | None = None,
        target: str | None = None,
        loading: tuple[models.Options, models.Options] | None = None,
    ) -> None:
        """Load the models of a bundle and read the text. All mappers must be for the same two models.

        Args:
            first: any of the bundles.
            text: held-out text.
            options: `prefix`, `continuation`, `documents`, `probes`, `probe_kinds`, `batch_size`, `resamples` and `seed` are
                used.
            source: ref of the source model; by default the one in the bundle.
            target: ref of the target model; by default the one in the bundle.
            loading: how source and target are loaded.

        Raises:
            TextError: there is too little text.
        """
        self.options = options
        pair, self.tokenizer = arms.load_pair(first, source=source, target=target, loading=loading)
        self.pair = replace(pair, prefilled={}, exact_head=options.exact_head, exact_tail=options.exact_tail)
        self.prefix = options.prefixes[-1]
        self.ids = heldout(text, self.tokenizer, self.prefix + options.continuation, options.documents, None).ids
        self.questions = {kind: self._questions(kind, text) for kind in options.probe_kinds if options.probes}
        self._references: dict[int, Reference] = {}
        self._without_map = self._scores(self.pair, ("native", "source", "no_context"))
        self._source, self._native = self._without_map["source"].nll, self._without_map["native"].nll

    @cached_property
    def without_map(self) -> dict[Arm, Row]:
        """The rows of native, of the source alone, and of no context."""
        found = self._without_map
        return {arm: self._row(self.pair, arm, found[arm], asked=arm != "no_context") for arm in found}

    def _questions(self, kind: Any, text: TextOptions) -> list[Probe]:
        options = self.options
        texts = fillers(text, options.probes, None)
        try:
            return probes(
                self.tokenizer,
                texts,
                kind=kind,
                count=options.probes,
                context_tokens=self.prefix - 1,
                per_context=QUESTIONS_PER_CONTEXT,
                seed=options.seed,
            )
        except TextError:  # the context is too short for such facts
            return []

    def _scores(self, pair: arms.Pair, chosen: Sequence[Arm]) -> dict[Arm, Scores]:
        options = replace(self.options, greedy=0)
        return likelihood(pair, self.ids, self.prefix, options, chosen=chosen, references=self._references)

    def _row(self, pair: arms.Pair, arm: Arm, scores: Scores, *, asked: bool = True) -> Row:
        options, recall = self.options, dict[str, tuple[float, float]]()
        for kind, questions in self.questions.items() if asked else ():
            if questions:
                answers = ask(pair, self.tokenizer, questions, (arm,), batch_size=options.batch_size)[arm]
                exact = sum(answer.exact for answer in answers) / len(answers)
                recall[kind] = (exact, sum(answer.log_probability for answer in answers) / len(answers))
        low_high = share_interval(self._source, self._native, scores.nll, resamples=options.resamples, seed=options.seed)
        recomputed = float(scores.recomputed.mean())
        return Row(
            nll=float(scores.nll.mean()),
            share=share_of_gap(self._source, self._native, scores.nll),
            interval=low_high,
            kl=float(scores.kl.mean()),
            recall=recall,
            work=ways.work_shares(pair, self.prefix - 1, {arm: recomputed}).get(arm),
            recomputed=recomputed,
        )

    def mapper(self, bundle: Bundle) -> Mapper:
        """A bundle's mapper, bound to the target."""
        return mapper_for(bundle, self.pair.target)

    @torch.no_grad()
    def row(self, mapper: Mapper, recompute: float | Literal["auto"] = 0.0, *, arm: Arm = "handoff") -> Row:
        """Measure a mapper.

        Args:
            mapper: a mapper of the same two models.
            recompute: share of the context that the target recomputes, guided by the source; ``auto`` for as much as needed.
            arm: the arm; ``mean`` and ``shuffled`` are the controls.
        """
        arm = "auto" if recompute == "auto" else arm
        pair = replace(self.pair, mapper=mapper, recompute=0.0 if recompute == "auto" else recompute)
        return self._row(pair, arm, self._scores(pair, (arm,))[arm])

    def milliseconds(self, arm: Arm, seconds: float, mapper: Mapper | None = None, recompute: float = 0.0) -> float:
        """The median time of one arm for one context, measured for about `seconds`."""
        pair = replace(self.pair, mapper=mapper or self.pair.mapper, recompute=recompute)
        ids = self.ids[:1, : self.prefix - 1]
        # The source's own prefill happens before anything is moved, so it is not timed.
        prefixes = arms.Prefixes(pair, ids, sources=arms.source_pairs(pair, ids))
        return float(timed(lambda: prefixes.cache(arm), devices_of(pair), seconds)["median"])
