"""The verb `evaluate`: is the mapped cache worth having? On documents that were not captured, where the bundle says which were.

Likelihood and recall are measured for every arm (see `kvfit.fit.evaluate.arms`), with intervals over documents; every layer
and head is diagnosed; transfer and prefill are timed; and a verdict is bound to the digest of the weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.errors import BundleError, OptionError
from kvfit.fit.capture import models
from kvfit.fit.capture.activations import check_positions
from kvfit.fit.capture.recipe import public_name
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.arms import Arm
from kvfit.fit.evaluate.clock import Effort, milliseconds
from kvfit.fit.evaluate.curves import pictures
from kvfit.fit.evaluate.diagnose import Diagnosis, diagnose
from kvfit.fit.evaluate.heldout import fillers, heldout
from kvfit.fit.evaluate.intervals import share_interval, share_of_gap
from kvfit.fit.evaluate.likelihood import Scores, likelihood
from kvfit.fit.evaluate.questions import PROBE_KINDS, ProbeKind
from kvfit.fit.evaluate.recall import pooled, recall_table
from kvfit.fit.evaluate.report import written
from kvfit.fit.evaluate.turns import drift
from kvfit.fit.evaluate.verdict import Reasons, Thresholds, control_lead, judge, judge_map
from kvfit.fit.stats import digests
from kvfit.hub.card import write_card
from kvfit.spec import KINDS

__all__ = ["Evaluated", "Options", "Thresholds", "evaluate"]

PROBE_TOKENS = 64  # at most, of a recall question and its answer
LEAST_MAPPED = 0.25  # of the context, in the arm that is judged


@dataclass(frozen=True)
class Options:
    """How a bundle is evaluated.

    Attributes:
        prefix: tokens of context, the model's own last token included; several lengths are measured one after the other.
        continuation: tokens scored after it.
        documents: how many documents.
        probes: how many recall questions of each kind; 0 for none.
        probe_kinds: see `kvfit.fit.evaluate.questions`.
        greedy: tokens of the greedy continuation that is compared with native's; 0 for none.
        diagnose: documents that layers and heads are diagnosed on; 0 for none.
        turns: turns of the target in a conversation that goes back and forth; 0 for none.
        exact_head: of the `handoff` arm.
        exact_tail: of the `handoff` arm.
        recompute: of the `handoff` arm: share of the prefix that the target recomputes, guided by the source.
        batch_size: documents per forward pass.
        warm_ups: runs before times are taken.
        repeats: timed runs; 0 for none.
        seconds: most seconds for one time, see `kvfit.fit.evaluate.clock`.
        resamples: of the bootstrap.
        seed: of probes and bootstrap.
        thresholds: of the verdict.
    """

    prefix: int | tuple[int, ...] = 384
    continuation: int = 128
    documents: int = 48
    probes: int = 40
    probe_kinds: tuple[ProbeKind, ...] = PROBE_KINDS
    greedy: int = 64
    diagnose: int = 8
    turns: int = 0
    exact_head: int = 1
    exact_tail: int = 0
    recompute: float = 0.0
    batch_size: int = 8
    warm_ups: int = 10
    repeats: int = 30
    seconds: float = 20.0
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
            ("exact_head", 0),
            ("exact_tail", 0),
            ("batch_size", 1),
            ("repeats", 0),
            ("resamples", 1),
        ):
            if getattr(self, name) < least:
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
                f"{max(0.0, mapped):.0%} of {moved} tokens of context left to the map, needed {LEAST_MAPPED:.0%}: the target "
                "would be judged by what it runs itself"
            )
        unknown = set(self.probe_kinds) - set(PROBE_KINDS)
        if unknown:
            raise OptionError(f"--probe-kinds: found {', '.join(sorted(unknown))}, needed some of {', '.join(PROBE_KINDS)}")

    @property
    def prefixes(self) -> tuple[int, ...]:
        """The lengths, ascending; the last is the one whose arms stand at the top of the report."""
        return tuple(sorted({self.prefix} if isinstance(self.prefix, int) else set(self.prefix)))


@dataclass(frozen=True)
class Evaluated:
    """What `evaluate` found: the content of `evaluation.json`."""

    bundle: Path
    report: dict[str, Any]

    @property
    def verdict(self) -> Literal["pass", "fail", "unknown"]:
        """What the thresholds say of what was measured."""
        return self.report["verdict"]  # type: ignore[no-any-return]

    def __str__(self) -> str:
        share = self.report["arms"]["handoff"]["share_of_gap"]
        reasons = "; ".join(self.report["reasons"])
        return f"{self.bundle}: {self.verdict}, {share:.0%} of the gap recovered" + (f" ({reasons})" if reasons else "")

    def to_json(self) -> dict[str, Any]:
        return self.report


def evaluate(
    bundle: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    text: TextOptions | None = None,
    texts: Mapping[str, TextOptions] | None = None,
    options: Options | None = None,
    loading: tuple[models.Options, models.Options] | None = None,
    progress: bool = True,
) -> Evaluated:
    """Measure a bundle on held-out text and write `evaluation.json`, `evaluation.md` and pictures into it.

    Args:
        bundle: its folder.
        source: ref of the source model; default the one that the bundle names.
        target: likewise.
        text: held-out text of the calibration kind; default the built-in held-out text.
        texts: further texts by name, of other kinds; measured at the longest prefix and reported apart.
        options: see `Options`.
        loading: how source and target are loaded.
        progress: show bars.

    Raises:
        BundleError: the bundle cannot be read.
        MismatchError: the models are not the ones that the bundle was fitted on.
        TextError: too little text.
    """
    options = options or Options()
    text = text or TextOptions(dataset="demo:heldout")
    loading = loading or (models.Options(), models.Options())
    opened = Bundle.open(bundle)
    if not os.access(opened.folder, os.W_OK):
        raise BundleError(f"bundle {bundle}: found a folder that cannot be written, needed one for the result: copy the bundle")
    # Text is read before weights are loaded, so that too little of it is found out at once.
    refs = models.recorded_refs(opened.spec, source, target)
    tokenizer = models.load_tokenizer(*refs[1], trust_remote_code=loading[1].trust_remote_code)
    fitted = digests.of_recipe(opened.recipe)
    read = {
        prefix: heldout(text, tokenizer, prefix + options.continuation, options.documents, fitted)
        for prefix in options.prefixes
    }
    longest = options.prefixes[-1]
    further = {
        name: heldout(other, tokenizer, longest + options.continuation, options.documents, fitted)
        for name, other in (texts or {}).items()
    }
    for (ref, revision), how in zip(refs, loading, strict=True):
        config = models.load_config(ref, revision, trust_remote_code=how.trust_remote_code)
        beyond = max(options.continuation, options.greedy, PROBE_TOKENS if options.probes else 0)
        check_positions(config, ref, longest + beyond, "--prefix, --continuation and --greedy")
    pair, tokenizer = arms.load_pair(
        opened,
        source=source,
        target=target,
        loading=loading,
        exact_head=options.exact_head,
        exact_tail=options.exact_tail,
        recompute=options.recompute,
    )
    measured = _Measured(pair, tokenizer, options, progress)
    report = measured.report(
        opened,
        {prefix: found.ids for prefix, found in read.items()},
        {name: found.ids for name, found in further.items()},
        fillers(text, options.probes, fitted) if options.probes else [],
    )
    report["text"] = public_name(text.dataset)
    report["overlap"] = {"checked": fitted is not None, "left_out": read[longest].left_out}
    for name, other in (texts or {}).items():
        report["texts"][name] |= {"text": public_name(other.dataset), "left_out": further[name].left_out}
    pages = {"evaluation.md": written(report, opened.spec).encode(), **pictures(report)}
    report = _finite(report)
    data = json.dumps(report, indent=2, sort_keys=True, allow_nan=False) + "\n"
    files = {"evaluation.json": data.encode(), **pages}
    add_files(opened.folder, files)
    write_card(opened.folder)
    return Evaluated(opened.folder, report)


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have: a mean over nothing must not lose an hour's measurements."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Measured:
    """Everything that is measured with one pair of models."""

    def __init__(self, pair: arms.Pair, tokenizer: Any, options: Options, progress: bool) -> None:
        self.pair = pair
        self.tokenizer = tokenizer
        self.options = options
        self.progress = progress

    def report(self, opened: Bundle, read: dict[int, Tensor], further: dict[str, Tensor], fillers: list[str]) -> dict[str, Any]:
        """The content of `evaluation.json`."""
        options = self.options
        thresholds = options.thresholds
        longest = options.prefixes[-1]
        reasons = Reasons()
        by_prefix: dict[str, Any] = {}
        for prefix, ids in read.items():
            recalled = self.recall(prefix, fillers)
            by_prefix[str(prefix)] = {
                "arms": self.arms(ids, prefix, pooled(recalled)),
                "recall": recalled,
                "documents": len(ids),
            }
            at = f"at {prefix} tokens: " if len(read) > 1 else ""
            reasons.add(judge(by_prefix[str(prefix)]["arms"], thresholds, recall=recalled, documents=len(ids)), at)
        diagnosis = self.diagnosis(read[longest], longest)
        if diagnosis is None:
            reasons.missing.append("layers were not diagnosed")
        else:
            inputs = max(opened.spec.input_width(kind, i) for kind in KINDS for i in range(opened.spec.target.n_layers))
            reasons.failed[:0] = judge_map(diagnosis, opened.solve, inputs, thresholds)
        apart: dict[str, Any] = {}
        for name, ids in further.items():
            table = self.arms(ids, longest, {})
            elsewhere = self.diagnosis(ids, longest)
            apart[name] = {"arms": table, "layers": [] if elsewhere is None else elsewhere.layers, "documents": len(ids)}
            reasons.failed += [f"on {name}: {reason}" for reason in control_lead(table, thresholds)]
        ids = read[longest]
        return {
            "weights_digest": opened.weights_digest,
            "verdict": reasons.verdict,
            "reasons": list(reasons),
            "arms": by_prefix[str(longest)]["arms"],
            "recall": by_prefix[str(longest)]["recall"],
            "prefixes": by_prefix,
            "layers": [] if diagnosis is None else diagnosis.layers,
            "explained": None if diagnosis is None else {**diagnosis.explained, "keys_rotated": diagnosis.explained_rotated},
            "milliseconds": self.milliseconds(ids, longest),
            "turns": drift(self.pair, ids, options.turns, batch_size=options.batch_size, progress=self.progress)
            if options.turns
            else [],
            "texts": apart,
            "tokens": {"prefix": longest, "continuation": options.continuation, "documents": len(ids)},
            "options": {**asdict(options), "prefix": list(options.prefixes)},
        }

    def arms(self, ids: Tensor, prefix: int, recalled: dict[Arm, dict[str, Any]]) -> dict[str, Any]:
        """Per arm what `evaluation.json` says of it."""
        options = self.options
        scores = likelihood(
            self.pair,
            ids,
            prefix,
            batch_size=options.batch_size,
            greedy_tokens=options.greedy,
            progress=self.progress,
        )
        return {
            arm: _row(scores, arm, options) | {name: recalled.get(arm, {}).get(name) for name in ("recall", "log_probability")}
            for arm in scores
        }

    def recall(self, prefix: int, fillers: list[str]) -> dict[str, Any]:
        """Per probe kind what `evaluation.json` says of it."""
        options = self.options
        if not options.probes or len(fillers) < 2:
            return {}
        return recall_table(
            self.pair,
            self.tokenizer,
            fillers,
            options.probe_kinds,
            count=options.probes,
            context_tokens=prefix - 1,
            able_from=options.thresholds.recall_native,
            batch_size=options.batch_size,
            resamples=options.resamples,
            seed=options.seed,
            progress=self.progress,
        )

    def diagnosis(self, ids: Tensor, prefix: int) -> Diagnosis | None:
        """Layers and heads on the first documents."""
        count = self.options.diagnose
        return diagnose(self.pair, ids[:count], prefix, batch_size=self.options.batch_size) if count else None

    def milliseconds(self, ids: Tensor, prefix: int) -> dict[str, Any]:
        """Times at the longest prefix and below."""
        options = self.options
        if not options.repeats:
            return {}
        effort = Effort(options.warm_ups, options.repeats, options.seconds)
        return milliseconds(self.pair, ids[:1, : prefix - 1], effort=effort, progress=self.progress)


def _row(scores: dict[Arm, Scores], arm: Arm, options: Options) -> dict[str, Any]:
    source, native, found = scores["source"].nll, scores["native"].nll, scores[arm]
    greedy = float(found.greedy.mean())
    return {
        "nll": float(found.nll.mean()),
        "kl": float(found.kl.mean()),
        "kl_p95": float(found.kl_tokens.flatten().quantile(0.95)),
        "kl_first": float(found.kl_first.mean()),
        "top1": float(found.top1.mean()),
        "greedy_match": greedy if greedy == greedy else None,  # NaN where none was asked for
        "share_of_gap": share_of_gap(source, native, found.nll),
        "interval": list(share_interval(source, native, found.nll, resamples=options.resamples, seed=options.seed)),
    }
