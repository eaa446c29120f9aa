"""Measure everything with one loaded pair of models, part by part, and make the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvfit.bundle.bundle import Bundle
from kvfit.fit.evaluate import arms, ways
from kvfit.fit.evaluate.arms import Arm, Prefixes
from kvfit.fit.evaluate.clock import lengths_up_to, milliseconds
from kvfit.fit.evaluate.diagnose import Diagnosis, diagnose
from kvfit.fit.evaluate.intervals import share_interval, share_of_gap
from kvfit.fit.evaluate.likelihood import Batch, Scores, likelihood
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.parts import Parts
from kvfit.fit.evaluate.recall import pooled, recall_table
from kvfit.fit.evaluate.turns import drift
from kvfit.fit.evaluate.verdict import Reasons, control_lead, judge, judge_map
from kvfit.spec import KINDS

SHOWN: tuple[Arm, ...] = ("native", "handoff", "source")
SHOWN_CONTEXT, SHOWN_TOKENS = 64, 48


class Measured:
    """The measurements of one pair under one set of options."""

    def __init__(self, pair: arms.Pair, tokenizer: Any, options: Options, progress: bool) -> None:
        self.pair, self.tokenizer, self.options, self.progress = pair, tokenizer, options, progress

    def count(self, n_further: int) -> int:
        """An upper bound of the number of parts. There are fewer if the text has too few documents."""
        options = self.options
        batches = -(-options.documents // options.batch_size)
        tables = len(options.prefixes) + n_further
        kinds = len(options.prefixes) * len(options.probe_kinds) if options.probes else 0
        single = sum(map(bool, (options.seconds, options.turns, options.transcripts)))
        return tables * batches + kinds + (1 + n_further if options.diagnose else 0) + single

    def plan(self) -> str:
        """A summary of what will be measured, for the first line of the log."""
        options = self.options
        parts = [f"{options.documents} documents at {', '.join(map(str, options.prefixes))} tokens of context"]
        parts += [f"{options.probes} questions of {len(options.probe_kinds)} kinds"] if options.probes else []
        parts += [f"{options.diagnose} documents layer by layer"] if options.diagnose else []
        parts += [f"timing for about {options.seconds:g} s"] if options.seconds else []
        return ", ".join(parts)

    def report(
        self, opened: Bundle, read: dict[int, Tensor], further: dict[str, Tensor], fillers: list[str], parts: Parts
    ) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """The content of `evaluation.json`, and the transcripts, which are for the HTML page only.

        Args:
            opened: the bundle.
            read: held-out ids by context length.
            further: held-out ids of further texts by name.
            fillers: texts to hide facts in.
            parts: saves every measurement.
        """
        options = self.options
        longest = options.prefixes[-1]
        times = parts("time", lambda: self.times(read[longest])) if options.seconds else {}
        reasons, by_prefix = Reasons(), {}
        for prefix, ids in read.items():
            recalled = self.recall(prefix, fillers, parts)
            table = self.arms(ids, prefix, recalled, parts, f"{prefix} tokens")
            work = ways.work_shares(self.pair, prefix - 1, {way: row["recomputed"] for way, row in table.items()})
            rows = ways.rows(table, recalled, times, work, options, prefix - 1)
            by_prefix[str(prefix)] = {"arms": table, "recall": recalled, "ways": rows, "documents": len(ids)}
            judged = next(row for row in rows if row["judged"])
            speed = judged, prefix - 1
            found = judge(
                table, options.thresholds, recall=recalled, documents=len(ids), speed=speed, recompute=options.recompute
            )
            reasons.add(found, f"at {prefix} tokens: " if len(read) > 1 else "")
        diagnosis = self.diagnosis(read[longest], parts, "the text")
        if diagnosis is None:
            reasons.missing.append("layers were not diagnosed")
        else:
            spec = opened.spec
            inputs = max(spec.input_width(kind, i) for kind in KINDS for i in spec.mapped_layers)
            reasons.failed[:0] = judge_map(diagnosis, opened.solve, inputs, options.thresholds)
        apart = {}
        for name, ids in further.items():
            table = self.arms(ids, longest, {}, parts, name)
            elsewhere = self.diagnosis(ids, parts, name)
            apart[name] = {"arms": table, "layers": [] if elsewhere is None else elsewhere.layers, "documents": len(ids)}
            reasons.failed += [f"on {name}: {reason}" for reason in control_lead(table, options.thresholds)]
        turns = parts("turns", lambda: self.turns(read[longest])) if options.turns else []
        transcripts = parts("transcripts", lambda: self.transcripts(read[longest])) if options.transcripts else []
        return {
            "weights_digest": opened.weights_digest,
            "verdict": reasons.verdict,
            "reasons": list(reasons),
            "ways": by_prefix[str(longest)]["ways"],
            "arms": by_prefix[str(longest)]["arms"],
            "recall": by_prefix[str(longest)]["recall"],
            "prefixes": by_prefix,
            "layers": [] if diagnosis is None else diagnosis.layers,
            "explained": None if diagnosis is None else {**diagnosis.explained, "keys_rotated": diagnosis.explained_rotated},
            "milliseconds": times,
            "turns": turns,
            "texts": apart,
            "tokens": {"prefix": longest, "continuation": options.continuation, "documents": len(read[longest])},
            "options": {**asdict(options), "prefix": list(options.prefixes)},
        }, transcripts

    def arms(self, ids: Tensor, prefix: int, recalled: dict[str, Any], parts: Parts, name: str) -> dict[str, Any]:
        """The table of arms for `evaluation.json`."""
        options = self.options

        def kept(rows: str, measure: Callable[[], Batch]) -> Batch:
            return parts(f"likelihood, {name}, {rows}", measure)

        scores = likelihood(self.pair, ids, prefix, options, progress=self.progress, kept=kept)
        pool = pooled(recalled)
        return {
            arm: _row(scores, arm, options) | {key: pool.get(arm, {}).get(key) for key in ("recall", "log_probability")}
            for arm in scores
        }

    def recall(self, prefix: int, fillers: list[str], parts: Parts) -> dict[str, Any]:
        """The table of recall for `evaluation.json`."""
        options = self.options
        if not options.probes or len(fillers) < 2:
            return {}
        return recall_table(
            self.pair, self.tokenizer, fillers, options, context_tokens=prefix - 1, progress=self.progress, kept=parts
        )

    def diagnosis(self, ids: Tensor, parts: Parts, name: str) -> Diagnosis | None:
        """The diagnosis of layers and heads on the first documents, at the longest prefix."""
        options = self.options
        if not options.diagnose:
            return None

        def measure() -> dict[str, Any]:
            part = ids[: options.diagnose]
            return diagnose(self.pair, part, options.prefixes[-1], batch_size=options.batch_size).to_json()

        return Diagnosis.from_json(parts(f"layers, {name}", measure))

    def times(self, ids: Tensor) -> dict[str, Any]:
        """The times of every evaluated length and of powers of two, up to `time_tokens`."""
        options = self.options
        evaluated = [prefix - 1 for prefix in options.prefixes]
        lengths = lengths_up_to(max(evaluated[-1], options.time_tokens), *evaluated)
        row = ids.flatten()  # the time does not depend on the tokens
        row = row.repeat(-(-lengths[-1] // len(row)))[None, : lengths[-1]]
        return milliseconds(self.pair, row, lengths=lengths, seconds=options.seconds, progress=self.progress)

    def turns(self, ids: Tensor) -> list[dict[str, Any]]:
        """The drift over a conversation that moves back and forth."""
        return drift(self.pair, ids, self.options.turns, batch_size=self.options.batch_size, progress=self.progress)

    @torch.no_grad()
    def transcripts(self, ids: Tensor) -> list[dict[str, str]]:
        """The end of some contexts, and the greedy continuations of native, of the handoff and of the source."""
        prefix, out = self.options.prefixes[-1], list[dict[str, str]]()
        vocabulary = arms.shared_vocabulary(self.pair)
        for part in torch.split(ids[: self.options.transcripts, :prefix], self.options.batch_size):
            prefixes, last = Prefixes(self.pair, part[:, :-1]), part[:, -1:]
            said = {
                arm: arms.greedy(
                    arms.model_of(self.pair, arm), prefixes.cache(arm, next_ids=last), last, SHOWN_TOKENS, vocabulary
                )
                for arm in SHOWN
            }
            for number, row in enumerate(part):
                shown: dict[str, str] = {
                    arm: self.tokenizer.decode(arms.up_to_end(arms.model_of(self.pair, arm), tokens[number]))
                    for arm, tokens in said.items()
                }
                out.append({"context": self.tokenizer.decode(row[-SHOWN_CONTEXT:].tolist()), **shown})
        return out


def _row(scores: dict[Arm, Scores], arm: Arm, options: Options) -> dict[str, Any]:
    source, native, found = scores["source"].nll, scores["native"].nll, scores[arm]
    greedy = float(found.greedy.mean())
    return {
        "nll": float(found.nll.mean()),
        "kl": float(found.kl.mean()),
        "kl_p95": float(found.kl_tokens.flatten().quantile(0.95)),
        "kl_first": float(found.kl_first.mean()),
        "top1": float(found.top1.mean()),
        "recomputed": float(found.recomputed.mean()),
        "greedy_match": greedy if greedy == greedy else None,  # NaN if none was requested
        "share_of_gap": share_of_gap(source, native, found.nll),
        "interval": list(share_interval(source, native, found.nll, resamples=options.resamples, seed=options.seed)),
    }
