"""The verb `evaluate`: is the mapped cache worth having? On text that neither fit nor selection saw.

Likelihood and recall are measured for every arm (see `kvfit.fit.arms`), with intervals over documents, and a verdict is
bound to the digest of the weights.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from kvfit.bundle import Bundle, add_files
from kvfit.errors import TextError
from kvfit.fit import arms, models, recall
from kvfit.fit.arms import Arm
from kvfit.fit.text import TextOptions, documents
from kvfit.identity import check_model
from kvfit.mapper import Mapper

RECALL_ARMS: tuple[Arm, ...] = ("native", "transfer", "handoff", "source", "shuffled")


@dataclass(frozen=True)
class Thresholds:
    """What a bundle has to reach to pass. Written into `evaluation.json`, so that a verdict can be read without this code.

    Attributes:
        share_of_gap: least share of the likelihood gap between source and native that the handoff recovers. 0 means that moving
            beats staying with the source: less, and there is no reason to move.
        interval_low: least lower end of its 95 % interval.
        kl: most mean KL to native, in nats per token.
        control_margin: least lead over the better control (mean, shuffled), in nats per token: what the context adds.
        recall: least share of the native recall that the handoff keeps, where both models can do the probe.
        recall_native: what both models must recall for the probe to count.
    """

    share_of_gap: float = 0.25
    interval_low: float = 0.0
    kl: float = 0.5
    control_margin: float = 0.05
    recall: float = 0.5
    recall_native: float = 0.5


@dataclass(frozen=True)
class Options:
    """How a bundle is evaluated.

    Attributes:
        prefix: tokens that the cache covers, and the model's own last token.
        continuation: tokens scored after it.
        documents: how many documents.
        probes: how many recall questions; 0 for none.
        exact_head: of the `handoff` arm.
        exact_tail: of the `handoff` arm.
        batch_size: documents per forward pass.
        repeats: timed runs of transfer and prefill, after warm-up.
        resamples: of the bootstrap.
        seed: of probes and bootstrap.
    """

    prefix: int = 384
    continuation: int = 128
    documents: int = 48
    probes: int = 40
    exact_head: int = 1
    exact_tail: int = 0
    batch_size: int = 8
    repeats: int = 10
    resamples: int = 1000
    seed: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True)
class Evaluated:
    """What `evaluate` found: the content of `evaluation.json`."""

    bundle: Path
    report: dict[str, Any]

    @property
    def verdict(self) -> Literal["pass", "fail", "unknown"]:
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
    options: Options | None = None,
    loading: tuple[models.Options, models.Options] | None = None,
    progress: bool = True,
) -> Evaluated:
    """Measure a bundle on held-out text and write `evaluation.json` into it.

    Args:
        bundle: its folder.
        source: ref of the source model; default the one that the bundle names.
        target: likewise.
        text: held-out text; default the built-in held-out text.
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
    specs = (opened.spec.source, opened.spec.target)
    loaded = [
        models.load(ref or spec.ref, spec.revision if ref is None else None, how)
        for ref, spec, how in zip((source, target), specs, loading, strict=True)
    ]
    for spec, model in zip(specs, loaded, strict=True):
        check_model(spec, model.model, model.tokenizer)
    target_model = loaded[1].model
    mapper = Mapper.from_bundle(opened, device=next(target_model.parameters()).device)
    pair = arms.Pair(loaded[0].model, target_model, mapper, options.exact_head, options.exact_tail)
    tokenizer = loaded[1].tokenizer
    ids = _documents(text, tokenizer, options).to(next(target_model.parameters()).device)
    likelihood = _likelihood(pair, ids, options, progress)
    recalled = _recall(pair, tokenizer, text, options, progress) if options.probes else {}
    report = _report(opened, options, text, likelihood, recalled, _milliseconds(pair, ids[:1, : options.prefix - 1], options, progress))
    data = json.dumps(report, indent=2, sort_keys=True, allow_nan=False) + "\n"
    add_files(opened.folder, {"evaluation.json": data.encode()})
    return Evaluated(opened.folder, report)


def _documents(text: TextOptions, tokenizer: Any, options: Options) -> Tensor:
    length = options.prefix + options.continuation
    rows: list[list[int]] = []
    for document in documents(text):
        ids = tokenizer(document)["input_ids"]
        if len(ids) >= length:
            rows.append(ids[:length])
        if len(rows) == options.documents:
            break
    if len(rows) < 2:
        raise TextError(f"{text.dataset}: found {len(rows)} documents of {length} tokens, needed at least 2: lower --prefix or give more text")
    return torch.tensor(rows)


@dataclass
class _Scores:
    """Per document means of one arm: negative log-likelihood, KL to native, agreement of the top token."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    kl_tokens: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)


def _likelihood(pair: arms.Pair, ids: Tensor, options: Options, progress: bool) -> dict[Arm, _Scores]:
    chosen = [arm for arm in arms.ARMS if arm != "raw" or arms.raw_allowed(pair.mapper)]
    scores: dict[Arm, _Scores] = {arm: _Scores() for arm in chosen}
    for part in tqdm(ids.split(options.batch_size), desc="evaluate", disable=None if progress else True):
        prefix_ids, wanted = part[:, : options.prefix - 1], part[:, options.prefix :]
        sources = arms.source_pairs(pair, prefix_ids)
        # The next document's cache stands in for a wrong one; a batch of one borrows from the first document of all.
        if len(part) > 1:
            other = [(keys.roll(1, 0), values.roll(1, 0)) for keys, values in sources]
        else:
            other = arms.source_pairs(pair, ids[:1, : options.prefix - 1])
        native: Tensor | None = None
        for arm in chosen:
            cache = arms.prefix_cache(pair, arm, prefix_ids, sources, other)
            found = arms.continuation_log_probabilities(pair, arm, cache, part, options.prefix)
            native = found if native is None else native
            kl = (native.exp() * (native - found)).sum(-1)
            score = scores[arm]
            score.nll.append(-found.gather(-1, wanted[..., None])[..., 0].mean(1).double().cpu())
            score.kl.append(kl.mean(1).double().cpu())
            score.kl_tokens.append(kl.flatten().cpu())
            score.top1.append((found.argmax(-1) == native.argmax(-1)).double().mean(1).cpu())
    return scores


def _recall(pair: arms.Pair, tokenizer: Any, text: TextOptions, options: Options, progress: bool) -> dict[Arm, float]:
    """Share of recall probes answered exactly, per arm."""
    fillers = []
    for document in documents(text):
        # Text that already holds a list or a question of the probe's form would ask two things at once.
        if "[Codes" not in document and "[Recall" not in document:
            fillers.append(document)
        if len(fillers) == options.probes:
            break
    if not fillers:
        return {}
    asked = recall.probes(tokenizer, fillers, count=options.probes, context_tokens=options.prefix - 1, seed=options.seed)
    right = dict.fromkeys(RECALL_ARMS, 0)
    device = next(pair.target.parameters()).device
    contexts = [torch.tensor([probe.context_ids], device=device) for probe in asked]
    for index, probe in enumerate(tqdm(asked, desc="recall", disable=None if progress else True)):
        sources = arms.source_pairs(pair, contexts[index])
        wrong = arms.source_pairs(pair, contexts[index - 1])
        length = min(contexts[index].shape[1], contexts[index - 1].shape[1])
        other = [(keys[:, :, :length], values[:, :, :length]) for keys, values in wrong]
        for arm in RECALL_ARMS:
            cache = arms.prefix_cache(pair, arm, contexts[index], sources, other)
            model = pair.source if arm == "source" else pair.target
            said = arms.answer(model, cache, torch.tensor([probe.question_ids], device=device), len(probe.answer_ids))
            right[arm] += tuple(said) == probe.answer_ids
    return {arm: count / len(asked) for arm, count in right.items()}


def _milliseconds(pair: arms.Pair, prefix_ids: Tensor, options: Options, progress: bool) -> dict[str, float]:
    """Median time of mapping one prefix against prefilling it."""
    sources = arms.source_pairs(pair, prefix_ids)
    device = prefix_ids.device

    def timed(arm: Arm) -> float:
        taken = []
        for _ in range(options.repeats + 3):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            arms.prefix_cache(pair, arm, prefix_ids, sources)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(1000 * (time.perf_counter() - begun))
        return statistics.median(taken[3:])

    return {"transfer": timed("transfer"), "prefill": timed("native")}


def _report(
    opened: Bundle,
    options: Options,
    text: TextOptions,
    likelihood: dict[Arm, _Scores],
    recalled: dict[Arm, float],
    milliseconds: dict[str, float],
) -> dict[str, Any]:
    nll = {arm: torch.cat(score.nll) for arm, score in likelihood.items()}
    table: dict[str, dict[str, Any]] = {}
    for arm, score in likelihood.items():
        low, high = _interval(nll["source"], nll["native"], nll[arm], options)
        table[arm] = {
            "nll": float(nll[arm].mean()),
            "kl": float(torch.cat(score.kl).mean()),
            "kl_p95": float(torch.cat(score.kl_tokens).quantile(0.95)),
            "top1": float(torch.cat(score.top1).mean()),
            "share_of_gap": share_of_gap(nll["source"], nll["native"], nll[arm]),
            "interval": [low, high],
            "recall": recalled.get(arm),
        }
    verdict, reasons = judge(table, options.thresholds)
    return {
        "weights_digest": opened.weights_digest,
        "verdict": verdict,
        "reasons": reasons,
        "arms": table,
        "milliseconds": milliseconds,
        "tokens": {"prefix": options.prefix, "continuation": options.continuation, "documents": len(nll["native"])},
        "text": Path(text.dataset).name if Path(text.dataset).exists() else text.dataset,
        "options": asdict(options),
    }


def share_of_gap(source: Tensor, native: Tensor, arm: Tensor) -> float:
    """``(source - arm) / (source - native)`` of mean negative log-likelihoods: 1 is native, 0 the source, less is worse than it."""
    gap = float((source - native).mean())
    return float((source - arm).mean()) / gap if abs(gap) > 1e-9 else 0.0


def _interval(source: Tensor, native: Tensor, arm: Tensor, options: Options) -> tuple[float, float]:
    """Paired bootstrap 95 % interval over documents of the share of gap."""
    generator = torch.Generator().manual_seed(options.seed)
    rows = torch.randint(len(source), (options.resamples, len(source)), generator=generator)
    above, gap = (source - arm)[rows].mean(1), (source - native)[rows].mean(1)
    shares = torch.where(gap.abs() > 1e-9, above / gap, 0.0)
    low, high = shares.quantile(torch.tensor([0.025, 0.975], dtype=shares.dtype)).tolist()
    return low, high


def judge(table: dict[str, dict[str, Any]], thresholds: Thresholds) -> tuple[Literal["pass", "fail", "unknown"], list[str]]:
    """The verdict on a table of arms, and why it is not a plain pass.

    The arm that is judged is `handoff`, because that is what runs in use.
    """
    moved, native, source = table["handoff"], table["native"], table["source"]
    if native["nll"] >= source["nll"]:
        return "fail", ["the source alone is at least as good as the target with its own cache: there is nothing to gain by moving"]
    failed, unknown = [], []
    if moved["share_of_gap"] < thresholds.share_of_gap:
        failed.append(f"share of gap {moved['share_of_gap']:.2f}, needed {thresholds.share_of_gap:.2f}")
    if moved["interval"][0] < thresholds.interval_low:
        failed.append(f"its interval begins at {moved['interval'][0]:.2f}, needed {thresholds.interval_low:.2f}")
    if moved["kl"] > thresholds.kl:
        failed.append(f"KL to native {moved['kl']:.3f} nats, needed at most {thresholds.kl:.3f}")
    control = min(table["mean"]["nll"], table["shuffled"]["nll"])
    if control - moved["nll"] < thresholds.control_margin:
        failed.append(f"lead over the better control {control - moved['nll']:.3f} nats, needed {thresholds.control_margin:.3f}")
    able = [arm["recall"] for arm in (native, source)]
    if any(value is None or value < thresholds.recall_native for value in able):
        unknown.append("recall is unknown: the models cannot do the probe themselves")
    elif moved["recall"] < thresholds.recall * native["recall"]:
        failed.append(f"recall {moved['recall']:.2f}, needed {thresholds.recall:.2f} of the native {native['recall']:.2f}")
    if failed:
        return "fail", failed + unknown
    return "pass", unknown
