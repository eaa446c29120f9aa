"""Judge the measurements: a verdict, and the reasons for it.

Every known way in which a bundle can be wrong has its own check, so that a reason says what to do and not only that a number is
low. `docs/guides/evaluate.md` explains the defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

import torch

from kvfit.bundle.bundle import Verdict
from kvfit.bundle.records import value_at
from kvfit.errors import OptionError
from kvfit.fit.evaluate.clock import shown
from kvfit.fit.evaluate.diagnose import Diagnosis
from kvfit.spec import KINDS

Table = Mapping[str, Mapping[str, Any]]

# Shares to recompute that are worth trying, one after the other. Beyond them little of the prefill is saved.
RECOMPUTES = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class Thresholds:
    """What a bundle has to reach to pass. They are written to `evaluation.json`, so that a verdict can be read without this
    code.

    Attributes:
        share_of_gap: minimal share of the likelihood gap between source and native that the handoff recovers.
        interval_low: minimal lower end of its 95 % interval; 0 means that moving is better than staying with the source.
        kl: maximal mean KL to native, in nats per token.
        control_margin: minimal lead over the better control (mean, shuffled), in nats per token: what the context adds.
        recall: minimal share of native's recall that the handoff keeps, for each kind of question that judges.
        recall_native: minimal recall of the target with its own cache for a kind of question to judge.
        recall_shuffled: maximal recall from another document's cache; above it, the answers can be guessed.
        attention_cosine: minimal cosine of the worst layer's attention output.
        explained_drop: maximal drop of the explained variance from the value of `solve` on its holdout split.
        correlation: minimal mean correlation between the map's outputs and the layers that they resemble most.
        rotated_margin: maximal gain of the explained variance of keys if the map is applied to rotated keys.
        tokens_per_input: minimal number of fitted tokens per input of the widest map.
        documents: minimal number of documents to pass, because an interval over fewer says nothing.
        speed: minimal speed of the handoff at every evaluated length, as a multiple of a prefill's; 0 turns the check off.
    """

    share_of_gap: float = 0.25
    interval_low: float = 0.0
    kl: float = 0.5
    control_margin: float = 0.05
    recall: float = 0.5
    recall_native: float = 0.5
    recall_shuffled: float = 0.25
    attention_cosine: float = 0.5
    explained_drop: float = 0.3
    correlation: float = 0.3
    rotated_margin: float = 0.1
    tokens_per_input: float = 3.0
    documents: float = 8.0
    speed: float = 1.0

    @classmethod
    def changed(cls, values: Mapping[str, str]) -> Thresholds:
        """The default thresholds with some changed by the command line.

        Raises:
            OptionError: a threshold does not exist, or a value is not a number.
        """
        names = [one.name for one in fields(cls)]
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except ValueError:
                numbers[name] = float("nan")
            if name not in names or not isfinite(numbers[name]):
                raise OptionError(f"--threshold: found {name}={value}, needed a number for one of {', '.join(names)}")
        return cls(**numbers)


@dataclass
class Reasons:
    """The reasons of a verdict.

    Attributes:
        failed: measurements that are not good enough.
        missing: measurements that a bundle needs to pass but that were not made.
        unknown: facts that could not be found out with these models, and that do not prevent a pass.
    """

    failed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, other: Reasons, at: str = "") -> None:
        """Add other reasons, each preceded by `at`, which says what prefix length or text it is about."""
        for name in ("failed", "missing", "unknown"):
            getattr(self, name).extend(at + reason for reason in getattr(other, name))

    @property
    def verdict(self) -> Verdict:
        """Fail if anything fails, else unknown if a measurement is missing, else pass."""
        return "fail" if self.failed else "unknown" if self.missing else "pass"

    def __iter__(self) -> Iterator[str]:
        return iter((*self.failed, *self.missing, *self.unknown))


def judge(
    table: Table,
    thresholds: Thresholds,
    *,
    recall: Table | None = None,
    documents: int,
    speed: tuple[Mapping[str, Any], int] | None = None,
    recompute: float = 0.0,
) -> Reasons:
    """Judge one table of arms.

    The judged arm is `handoff`, because production runs it.

    Args:
        table: arms as in `evaluation.json`.
        thresholds: the thresholds.
        recall: kinds of questions as in `evaluation.json`; None if recall was not measured.
        documents: number of documents of the table.
        speed: the handoff's row of `ways` and the number of tokens that it moves; None if nothing was timed.
        recompute: share that the handoff recomputed.
    """
    found = Reasons(_likelihood(table, thresholds))
    if thresholds.speed > 0:
        found.add(_speed(speed, thresholds, recompute))
    if documents < thresholds.documents:
        found.missing.append(f"only {documents} documents, needed {thresholds.documents:g}: give more text or --documents")
    judging = {kind: entry for kind, entry in (recall or {}).items() if entry["judges"]}
    if not recall:
        found.missing.append(
            "recall was not measured: no probes were asked, or no two documents of the text are without questions of their own "
            "to hide them in"
        )
    elif not judging:
        why = "; ".join(f"{kind}: {entry['reason']}" for kind, entry in recall.items())
        found.unknown.append(f"recall is unknown: no kind of question judges ({why})")
    for kind, entry in judging.items():
        native, moved = (entry["arms"][arm]["recall"] for arm in ("native", "handoff"))
        if not moved >= thresholds.recall * native:
            found.failed.append(
                f"recall of {kind} {moved:.2f}, needed {thresholds.recall:.2f} of the native {native:.2f}: {_more(recompute)}"
            )
        guessed = entry["arms"]["shuffled"]["recall"]
        if guessed > thresholds.recall_shuffled:
            found.unknown.append(
                f"recall of {kind} is unknown: another document's cache answers {guessed:.0%}, so it can be guessed"
            )
    return found


def _more(recompute: float) -> str:
    """What to try against lost recall after a handoff that recomputed a share."""
    step = next((share for share in RECOMPUTES if share > recompute), None)
    if step is None:
        return f"recomputing {recompute:.0%} did not bring it back: fit a better map, on more text or with a larger --cost"
    how = "recompute more" if recompute else "hand over with guided recompute"
    return f"{how}, and evaluate so (--recompute {step:g})"


def _speed(timed: tuple[Mapping[str, Any], int] | None, thresholds: Thresholds, recompute: float) -> Reasons:
    if timed is None or timed[0]["speed"] is None:
        return Reasons(missing=["speed was not measured: give --seconds, or turn the check off with --threshold speed=0"])
    row, tokens = timed
    if row["speed"] >= thresholds.speed:
        return Reasons()
    pays = (
        "it pays at no length that was timed" if row["breaks_even"] is None else f"it pays from {row['breaks_even']} tokens on"
    )
    return Reasons(
        [
            f"the handoff takes {shown(row['milliseconds'])} for {tokens} tokens, {row['speed']:.2f} x as fast as a prefill, "
            f"needed {thresholds.speed:g} x: {pays}; move longer contexts, {'recompute less, ' if recompute else ''}"
            "or fit a cheaper map"
        ]
    )


def _likelihood(table: Table, thresholds: Thresholds) -> list[str]:
    moved, native, source = table["handoff"], table["native"], table["source"]
    # The comparisons are written so that NaN fails.
    if not native["nll"] < source["nll"]:
        return ["the source alone is at least as good as the target with its own cache: there is nothing to gain by moving"]
    failed = []
    if not moved["nll"] < source["nll"]:
        failed.append(
            f"the source alone is better than the moved target ({source['nll']:.3f} against {moved['nll']:.3f} nats): "
            "stay with it"
        )
    elif not moved["share_of_gap"] >= thresholds.share_of_gap:
        failed.append(f"share of gap {moved['share_of_gap']:.2f}, needed {thresholds.share_of_gap:.2f}")
    elif not moved["interval"][0] >= thresholds.interval_low:
        failed.append(f"its interval begins at {moved['interval'][0]:.2f}, needed {thresholds.interval_low:.2f}")
    if not moved["kl"] <= thresholds.kl:
        failed.append(f"KL to native {moved['kl']:.3f} nats, needed at most {thresholds.kl:.3f}")
    return failed + control_lead(table, thresholds)


def control_lead(table: Table, thresholds: Thresholds) -> list[str]:
    """The reason to fail if the moved context is not better than a cache without its content; also used for further texts."""
    lead = min(table[arm]["nll"] for arm in ("mean", "shuffled")) - table["handoff"]["nll"]
    if lead >= thresholds.control_margin:
        return []
    return [f"lead over the better control {lead:.3f} nats, needed {thresholds.control_margin:.3f}"]


def judge_map(found: Diagnosis, solve: Mapping[str, Any], inputs: int, thresholds: Thresholds) -> list[str]:
    """Reasons to fail that are in the map itself, each with its cause.

    Args:
        found: the diagnosis on the main text.
        solve: the bundle's `solve.json`.
        inputs: F, the inputs of the widest map.
        thresholds: the thresholds.
    """
    failed = []
    fitted = value_at(solve, "tokens", "fit")
    if isinstance(fitted, int) and fitted < thresholds.tokens_per_input * inputs:
        failed.append(
            f"fitted on {fitted} tokens for {inputs} inputs, needed {thresholds.tokens_per_input:g} per input: capture more "
            "sequences"
        )
    misplaced = {kind: _misplaced(order, thresholds) for kind, order in found.order.items()}
    blank = {kind: float(order.max(1).values.mean()) for kind, order in found.order.items()}
    for kind in KINDS:
        if not blank[kind] >= thresholds.correlation:
            failed.append(
                f"{kind}: the map's outputs resemble no layer of the target (mean correlation {blank[kind]:.2f}, needed "
                f"{thresholds.correlation:.2f}): its weights belong to another pair or are damaged"
            )
        elif misplaced[kind]:
            pairs = ", ".join(f"{i} gives {j}" for i, j in misplaced[kind][:4])
            failed.append(f"{kind}: layers are in the wrong order (the map for layer {pairs})")
    rotated = found.explained_rotated
    if rotated is not None and rotated > found.explained["keys"] + thresholds.rotated_margin:
        failed.append(
            f"keys: the map fits keys with their rotation (explained variance {rotated:.2f}) and is applied without "
            f"({found.explained['keys']:.2f}): it was fitted on rotated keys"
        )
    elif not any(misplaced.values()) and min(blank.values()) >= thresholds.correlation:
        failed += _dropped(found, solve, thresholds)
    cosines = [(layer["attention_cosine"], layer["layer_index"]) for layer in found.layers]
    # A cosine of NaN counts as the worst value.
    known = [(cosine if isfinite(cosine) else -2.0, layer_index) for cosine, layer_index in cosines if cosine is not None]
    if known and min(known)[0] < thresholds.attention_cosine:
        worst, layer_index = min(known)
        failed.append(
            f"attention of layer {layer_index} reads something else (cosine {worst:.2f}, needed "
            f"{thresholds.attention_cosine:.2f})"
        )
    return failed


def _misplaced(order: torch.Tensor, thresholds: Thresholds) -> list[tuple[int, int]]:
    """Pairs (layer, the layer that its map's output resembles most), for layers where that is clearly another one."""
    best = order.max(1)
    clear = best.values - order.diagonal() > thresholds.correlation / 2
    return [(int(i), int(best.indices[i])) for i in clear.nonzero()[:, 0]]


def _dropped(found: Diagnosis, solve: Mapping[str, Any], thresholds: Thresholds) -> list[str]:
    failed = []
    for kind in KINDS:
        solved = value_at(solve, "r2", kind, "chosen", "holdout")
        if isinstance(solved, float) and not solved - found.explained[kind] <= thresholds.explained_drop:
            failed.append(
                f"{kind}: explained variance {found.explained[kind]:.2f}, {solved:.2f} when it was solved, needed a drop of at "
                f"most {thresholds.explained_drop:.2f}: the text is unlike the calibration text, or the map is another one"
            )
    return failed
