"""The verb `evaluate`: measure a mapper on documents that it was not fitted on, and write a verdict.

It measures likelihood and recall for every way of moving a context (see `kvfit.fit.evaluate.arms`), with intervals over
documents. It diagnoses every layer and head, and times each way and a prefill. The verdict is bound to the digest of the
weights. An interrupted evaluation continues where it stopped.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

import kvfit
from kvfit.bundle.bundle import Bundle, add_files
from kvfit.bundle.manifest import dump_record
from kvfit.errors import BundleError
from kvfit.fit.capture import models
from kvfit.fit.capture.activations import check_positions
from kvfit.fit.capture.locate import recorded_refs
from kvfit.fit.capture.recipe import public_name
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate import arms, ways
from kvfit.fit.evaluate.heldout import Heldout, fillers, heldout
from kvfit.fit.evaluate.measure import Measured
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.parts import Parts
from kvfit.fit.evaluate.report import html_page, markdown
from kvfit.fit.evaluate.verdict import Thresholds
from kvfit.fit.plots import evaluation_pictures
from kvfit.fit.stats import digests
from kvfit.hub.card import write_card

__all__ = ["Evaluated", "Options", "Thresholds", "evaluate"]

LOGGER = logging.getLogger("kvfit")
PROBE_TOKENS = 96  # upper bound for a recall question with its worked example and its answer


@dataclass(frozen=True)
class Evaluated:
    """The result of `evaluate`.

    Attributes:
        bundle: folder of the bundle.
        report: the content of `evaluation.json`.
        page: the HTML page with pictures and transcripts, next to the bundle; None if it could not be written.
    """

    bundle: Path
    report: dict[str, Any]
    page: Path | None = None

    @property
    def verdict(self) -> Literal["pass", "fail", "unknown"]:
        """The verdict of the thresholds on the measurements."""
        return self.report["verdict"]  # type: ignore[no-any-return]

    def __str__(self) -> str:
        """One line with the verdict, gap, recall and speed of the judged handoff, and the path of the report."""
        rows = {row["way"]: row for row in self.report["ways"]}
        judged, native = rows["handoff"], rows["native"]
        parts = [f"{self.verdict}", f"{judged['share_of_gap']:.0%} of the gap recovered"]
        if judged["recall"] is not None and judged["recall_by_kind"]:
            parts.append(f"recall {judged['recall']:.0%} where native has {native['recall']:.0%}")
        speed = ways.speed_text(judged, self.report["tokens"]["prefix"] - 1)
        parts += [speed or "not timed", *self.report["reasons"], f"report: {self.page or self.bundle / 'evaluation.md'}"]
        return f"{self.bundle}: " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The report."""
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

    It also writes an HTML page with tables, pictures and transcripts next to the bundle. The page quotes the text and is not
    published with the bundle. Measurements are saved next to the bundle, so that the same call continues after an interrupt.

    Args:
        bundle: folder of the bundle.
        source: ref of the source model; by default the one in the bundle.
        target: ref of the target model; by default the one in the bundle.
        text: held-out text like the calibration text; by default the built-in held-out text.
        texts: further texts of other kinds by name, which are measured at the longest prefix and reported separately.
        options: what is measured, and the thresholds.
        loading: how source and target are loaded.
        progress: whether to show progress.

    Raises:
        BundleError: the bundle cannot be read.
        MismatchError: the bundle was fitted on other models.
        TextError: there is too little text.
    """
    options = options or Options()
    loading = loading or (models.Options(), models.Options())
    opened = Bundle.open(bundle)
    if not os.access(opened.folder, os.W_OK):
        raise BundleError(f"bundle {bundle}: found a folder that cannot be written, needed one for the result: copy the bundle")
    refs = recorded_refs(opened.spec, source, target)
    # Text is read before weights are loaded, so that too little text is an error early on.
    tokenizer = models.load_tokenizer(*refs[1], trust_remote_code=loading[1].trust_remote_code)
    read = _Texts(
        text or TextOptions(dataset="demo:heldout"), texts or {}, tokenizer, options, digests.of_recipe(opened.recipe)
    )
    for (ref, revision), how in zip(refs, loading, strict=True):
        config = models.load_config(ref, revision, trust_remote_code=how.trust_remote_code)
        beyond = max(options.continuation, options.greedy, PROBE_TOKENS if options.probes else 0)
        needed = max(options.prefixes[-1] + beyond, options.time_tokens if options.seconds else 0)
        check_positions(config, ref, needed, "--prefix, --continuation, --greedy and --time-tokens")
    pair, tokenizer = arms.load_pair(
        opened,
        source=source,
        target=target,
        loading=loading,
        exact_head=options.exact_head,
        exact_tail=options.exact_tail,
        recompute=options.recompute,
    )
    job = [kvfit.__version__, opened.weights_digest, refs, asdict(options), [asdict(how) for how in loading], read.digest()]
    measured = Measured(pair, tokenizer, options, progress)
    parts = Parts(opened.folder, job, measured.count(len(read.further)), plan=measured.plan(), progress=progress)
    with parts.shown:
        report, transcripts = measured.report(opened, read.ids(), read.further_ids(), read.fillers, parts)
    read.describe(report)
    report = _finite(report)
    pictures = evaluation_pictures(report)
    data = dump_record("evaluation.json", report)
    add_files(opened.folder, {"evaluation.json": data, "evaluation.md": markdown(report, opened.spec).encode(), **pictures})
    write_card(opened.folder)
    page = _write_page(opened.folder, html_page(report, opened.spec, pictures, transcripts))
    found = Evaluated(opened.folder, report, page)
    after = (
        f"kvfit push {bundle} --to ORG/NAME"
        if found.verdict != "fail"
        else f"see the reasons in {opened.folder / 'evaluation.md'}"
    )
    parts.finish(f"{found.verdict}, {page or opened.folder / 'evaluation.md'}", after)
    return found


def _write_page(folder: Path, page: str) -> Path | None:
    path = folder.parent / f"{folder.name}.evaluation.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        LOGGER.warning("evaluate: %s was not written (%s)", path, error.strerror or error)
        return None
    return path


class _Texts:
    """The held-out documents of all lengths and kinds, read once."""

    def __init__(
        self,
        text: TextOptions,
        texts: Mapping[str, TextOptions],
        tokenizer: Any,
        options: Options,
        fitted: frozenset[str] | set[str] | None,
    ) -> None:
        def read(one: TextOptions, prefix: int) -> Heldout:
            return heldout(one, tokenizer, prefix + options.continuation, options.documents, fitted)

        self.text, self.texts, self.checked = text, texts, fitted is not None
        self.main = {prefix: read(text, prefix) for prefix in options.prefixes}
        self.further = {name: read(other, options.prefixes[-1]) for name, other in texts.items()}
        self.fillers = fillers(text, options.probes, fitted) if options.probes else []

    def ids(self) -> dict[int, Tensor]:
        """(N, prefix + C) ids of the main text, by length."""
        return {prefix: found.ids for prefix, found in self.main.items()}

    def further_ids(self) -> dict[str, Tensor]:
        """(N, prefix + C) ids of the further texts, by name."""
        return {name: found.ids for name, found in self.further.items()}

    def digest(self) -> str:
        """Digest of all text that was read, so that an evaluation of a changed file does not continue."""
        found = hashlib.sha256("\0".join(self.fillers).encode())
        for one in (*self.main.values(), *self.further.values()):
            found.update(one.ids.numpy().tobytes())
        return found.hexdigest()

    def describe(self, report: dict[str, Any]) -> None:
        """Add to the report which texts were read, by names instead of paths, and how many documents were left out."""
        longest = max(self.main)
        report["text"] = public_name(self.text.dataset)
        report["overlap"] = {"checked": self.checked, "left_out": self.main[longest].left_out}
        for name, found in self.further.items():
            report["texts"][name] |= {"text": public_name(self.texts[name].dataset), "left_out": found.left_out}


def _finite(value: Any) -> Any:
    """The report with None for NaN and infinity, so that a mean over nothing does not make the whole report invalid."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
