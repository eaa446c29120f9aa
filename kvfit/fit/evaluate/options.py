"""The options of `evaluate`, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfit.errors import OptionError
from kvfit.fit.evaluate.questions import PROBE_KINDS, QUESTIONS_PER_CONTEXT, ProbeKind
from kvfit.fit.evaluate.verdict import Thresholds
from kvfit.runtime import EXACT_HEAD

LEAST_MAPPED = 0.25  # least share of the context that the map must provide in the judged handoff


@dataclass(frozen=True)
class Options:
    """What an evaluation measures, and the thresholds of its verdict.

    Attributes:
        prefix: tokens of context, including the last token, which the model runs itself; several lengths are measured in turn.
        continuation: number of tokens after the context that are scored.
        documents: number of documents.
        probes: number of recall questions of each kind, about at least two contexts; 0 for none.
        probe_kinds: kinds of recall questions; see `kvfit.fit.evaluate.questions`.
        greedy: length of the greedy continuation that is compared with native's; 0 for none.
        diagnose: number of documents to diagnose layers and heads on; 0 for none.
        turns: the target's turns in a conversation that moves back and forth; 0 for none.
        transcripts: number of documents whose continuations the HTML page shows; 0 for none.
        exact_head: number of first tokens that the target runs itself in the `handoff` arm.
        exact_tail: number of last tokens of the prefix that it runs itself there.
        recompute: share of the mapped tokens that it recomputes there, guided by the source.
        batch_size: documents per forward pass.
        seconds: time for all timings together; 0 for none. The number of repetitions follows from the time of one run.
        time_tokens: longest length to time, if it is longer than the longest prefix.
        resamples: number of bootstrap samples.
        seed: seed of questions and bootstrap.
        thresholds: thresholds of the verdict.
    """

    prefix: int | tuple[int, ...] = 384
    continuation: int = 128
    documents: int = 48
    probes: int = 40
    probe_kinds: tuple[ProbeKind, ...] = PROBE_KINDS
    greedy: int = 64
    diagnose: int = 8
    turns: int = 0
    transcripts: int = 10
    exact_head: int = EXACT_HEAD
    exact_tail: int = 0
    recompute: float = 0.0
    batch_size: int = 8
    seconds: float = 60.0
    time_tokens: int = 0
    resamples: int = 1000
    seed: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        for name, least in (
            ("continuation", 1),
            ("documents", 2),
            ("probes", 0),
            ("greedy", 0),
            ("diagnose", 0),
            ("turns", 0),
            ("transcripts", 0),
            ("exact_head", 0),
            ("exact_tail", 0),
            ("batch_size", 1),
            ("seconds", 0),
            ("time_tokens", 0),
            ("resamples", 1),
        ):
            if not getattr(self, name) >= least:
                raise OptionError(f"--{name.replace('_', '-')}: found {getattr(self, name)}, needed at least {least}")
        if not self.prefixes or self.prefixes[0] < 2:
            raise OptionError(f"--prefix: found {self.prefix}, needed 2 tokens or more")
        if not 0 <= self.recompute <= 1:
            raise OptionError(f"--recompute: found {self.recompute}, needed a share between 0 and 1")
        moved = self.prefixes[0] - 1
        mapped = (moved - self.exact_head - self.exact_tail) * (1 - self.recompute) / moved
        if mapped < LEAST_MAPPED:
            raise OptionError(
                f"--exact-head {self.exact_head}, --exact-tail {self.exact_tail}, --recompute {self.recompute:g}: found "
                f"{max(0.0, mapped):.0%} of {moved} tokens of context left to the map, needed {LEAST_MAPPED:.0%}: give a "
                "longer --prefix or fewer exact tokens, or the verdict would be about what the target runs itself"
            )
        if 0 < self.probes <= QUESTIONS_PER_CONTEXT:
            raise OptionError(
                f"--probes: found {self.probes}, needed 0 for none, or at least {QUESTIONS_PER_CONTEXT + 1}: "
                f"{QUESTIONS_PER_CONTEXT} questions share a context, and the control answers from another one"
            )
        unknown = set(self.probe_kinds) - set(PROBE_KINDS)
        if unknown:
            raise OptionError(f"--probe-kinds: found {', '.join(sorted(unknown))}, needed some of {', '.join(PROBE_KINDS)}")

    @property
    def prefixes(self) -> tuple[int, ...]:
        """The context lengths, ascending. The report begins with the arms of the last one."""
        return tuple(sorted({self.prefix} if isinstance(self.prefix, int) else set(self.prefix)))

    @property
    def handoff(self) -> str:
        """A description of the judged handoff."""
        return self._handoff(f"{self.recompute:.0%}" if self.recompute else "")

    @property
    def handoff_auto(self) -> str:
        """A description of the handoff that decides itself how much to recompute."""
        return self._handoff("as much as needed")

    def _handoff(self, recomputed: str) -> str:
        parts = [f"first {self.exact_head} exact"] if self.exact_head else []
        parts += [f"last {self.exact_tail} exact"] if self.exact_tail else []
        parts += [f"{recomputed} recomputed where the source looks"] if recomputed else []
        return ", ".join(parts) or "nothing exact"
