"""The verb `refine`: improve a bundle by training through the frozen target. The result is written only if it is better.

Training starts from the closed-form map, so a few hundred steps are enough. Each map gets a small linear correction (see
`correction`) that is folded into its weight and bias at the end, so a refined bundle has the same shape, size and speed as the
original one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.bundle.files import require_free
from kvfit.errors import MismatchError, OptionError, TextError
from kvfit.fit.capture import models
from kvfit.fit.capture.activations import check_positions
from kvfit.fit.capture.locate import recorded_refs
from kvfit.fit.capture.sequences import interleaved
from kvfit.fit.capture.text import DEFAULT_MIX, TextOptions, mix
from kvfit.fit.progress import track
from kvfit.fit.refine.correction import Correction
from kvfit.fit.refine.examples import Example, examples
from kvfit.fit.refine.training import Continuation, Schedule, train
from kvfit.fit.stats import digests
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.model.identity import check_model
from kvfit.runtime.handoff import handoff
from kvfit.runtime.mapper import Mapper
from kvfit.spec import FORMAT_VERSION

__all__ = ["Options", "Refined", "Schedule", "refine"]

logger = logging.getLogger("kvfit")


@dataclass(frozen=True)
class Options:
    """Options of `refine`.

    Attributes:
        num_sequences: number of sequences, training and holdout together, taken from the texts by their shares.
        seq_len: tokens per sequence.
        holdout: share of the sequences that only decides when to stop and whether the result is better.
        rank: maximal rank of each map's correction.
        schedule: schedule of the training.
    """

    num_sequences: int = 64
    seq_len: int = 512
    holdout: float = 0.25
    rank: int = 2048
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if not 0 < self.holdout < 1 or self.n_holdout < 2 or self.num_sequences - self.n_holdout < 2:
            raise OptionError(
                f"--num-sequences {self.num_sequences}, --holdout {self.holdout:g}: found {self.n_holdout} sequences to stop "
                "by, needed two or more, and two or more to learn from"
            )
        if self.rank < 1:
            raise OptionError(f"--rank: found {self.rank}, needed 1 or more")
        least = self.schedule.prefix_least + self.schedule.continuation
        if self.seq_len < least:
            raise OptionError(f"--seq-len: found {self.seq_len}, needed {least} for the shortest prefix and its continuation")

    @property
    def n_holdout(self) -> int:
        """The number of sequences in the holdout."""
        return round(self.num_sequences * self.holdout)


@dataclass(frozen=True)
class Refined:
    """The result of `refine`.

    Attributes:
        bundle: folder of the refined bundle; None if it would not have been better, so that nothing was written.
        kl_before: KL of the target with the original mapper's cache on the holdout, in nats per token.
        kl_after: the same with the refined mapper.
        looks: step and KL of every check on the holdout during training.
    """

    bundle: Path | None
    kl_before: float
    kl_after: float
    looks: list[dict[str, float]]

    def __str__(self) -> str:
        change = f"KL to the target's own cache {self.kl_before:.4f} before, {self.kl_after:.4f} after"
        if self.bundle is None:
            return f"not refined: {change}; nothing was written"
        return f"{self.bundle}: {change}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bundle": None if self.bundle is None else str(self.bundle)}


def refine(
    bundle: str | Path,
    out: str | Path,
    *,
    texts: Sequence[TextOptions] | None = None,
    source: str | None = None,
    target: str | None = None,
    options: Options | None = None,
    loading: tuple[models.Options, models.Options] | None = None,
    progress: bool = True,
) -> Refined:
    """Train corrections of a bundle's maps and write the result as a new bundle, if it is better.

    Args:
        bundle: folder of the original bundle; it is not changed.
        out: folder of the new bundle, which must not exist.
        texts: texts with shares; by default those of `capture`. Text with questions about itself teaches what ordinary text
            does not.
        source: ref of the source model; by default the one in the bundle.
        target: ref of the target model; by default the one in the bundle.
        options: options of the refinement.
        loading: how source and target are loaded.
        progress: whether to show progress.

    Raises:
        BundleError: the bundle cannot be read, or `out` exists.
        MismatchError: the bundle was fitted on other models, or its maps read one head at a time.
        TextError: there is too little text.
    """
    options = options or Options()
    loading = loading or (models.Options(), models.Options())
    require_free(Path(out))
    opened = Bundle.open(bundle)
    spec = opened.spec
    if spec.support != "full" or spec.keys_rotated:
        raise MismatchError(f"bundle {bundle}: found support {spec.support}, needed full, with keys that are not rotated")
    refs = recorded_refs(spec, source, target)
    for (ref, revision), how in zip(refs, loading, strict=True):
        config = models.load_config(ref, revision, trust_remote_code=how.trust_remote_code)
        check_positions(config, ref, options.seq_len, "--seq-len")
    tokenizer = models.load_tokenizer(*refs[1], trust_remote_code=loading[1].trust_remote_code)
    texts = tuple(texts or mix(DEFAULT_MIX, TextOptions()))
    found = itertools.islice(interleaved(texts, tokenizer, seq_len=options.seq_len), options.num_sequences)
    taken = [(torch.tensor(sequence.ids), sequence.documents) for sequence in found]
    if len(taken) < options.num_sequences:
        raise TextError(
            f"--dataset: found {len(taken)} sequences of {options.seq_len} tokens, needed {options.num_sequences}: give more "
            "text, or lower --num-sequences or --seq-len"
        )
    loaded = [models.load(ref, revision, how) for (ref, revision), how in zip(refs, loading, strict=True)]
    for role, model in zip((spec.source, spec.target), loaded, strict=True):
        check_model(role, model.model, model.tokenizer)
        model.model.requires_grad_(False)
    job = _Job(opened, loaded[0].model, loaded[1].model, options, progress)
    return job.run(taken, Path(out))


class _Job:
    """The refinement of one bundle with its loaded models."""

    def __init__(self, opened: Bundle, source: Any, target: Any, options: Options, progress: bool) -> None:
        self.opened, self.spec = opened, opened.spec
        self.source, self.target = source, target
        self.options, self.progress = options, progress
        self.continuation = Continuation(opened.spec, target)

    def run(self, taken: Sequence[tuple[Tensor, tuple[str, ...]]], out: Path) -> Refined:
        """Train, compare, and write the result if it is better."""
        device = input_device(self.target)
        basis = self.opened.basis(device=device, dtype=torch.float32)
        sequences = track([ids for ids, _ in taken], "refine, both models", "sequences", show=self.progress)
        found = examples(self.spec, self.source, self.target, sequences, basis)
        # Holdout sequences are evenly spaced, so that each text is on both sides.
        places = torch.linspace(0, len(found) - 1, self.options.n_holdout).round().long().tolist()
        holdout = [found[place] for place in places]
        fit = [example for place, example in enumerate(found) if place not in set(places)]
        weights = {
            (entry.kind, entry.layer_index): self.opened.layer(
                entry.kind, entry.layer_index, device=device, dtype=torch.float32
            )
            for entry in self.spec.layers
        }
        correction = Correction(self.spec, weights, [example.inputs for example in fit], self.options.rank)
        looks = train(correction, self.continuation, fit, holdout, self.options.schedule, progress=self.progress)
        before = self.judged(Mapper.from_bundle(replace(self.opened, evaluation=None)), holdout)
        refined = correction.folded()
        dtype = getattr(torch, self.spec.dtype)
        stored = {key: (weight.to(dtype).cpu(), bias.to(dtype).cpu()) for key, (weight, bias) in refined.items()}
        after = self.judged(Mapper(self.spec, stored, basis=None if basis is None else basis.to(dtype).cpu()), holdout)
        logger.info("refine: KL %.4f before, %.4f after", before, after)
        if not after < before:
            return Refined(None, before, after, looks)
        self.write(out, refined, basis, {"kl_before": before, "kl_after": after, "looks": looks}, taken)
        return Refined(out, before, after, looks)

    @torch.no_grad()
    def judged(self, mapper: Mapper, holdout: Sequence[Example]) -> float:
        """The mean KL of a mapper through `handoff`, in the dtype of the stored weights."""
        mapper = mapper.bind(target_model=self.target)
        n_tokens = self.options.schedule.continuation
        found = []
        for example in holdout:
            for prefix in self.options.schedule.holdout_prefixes(example):
                ids = example.ids[None, : prefix + 1]
                cache = caches.full_cache()
                caches.forward(self.source, ids[:, :-1].to(input_device(self.source)), cache, base=True)
                moved = handoff(mapper, self.target, ids.to(input_device(self.target)), cache)
                found.append(float(self.continuation.divergence(moved.cache, [example], prefix, n_tokens)))
        return sum(found) / len(found)

    def write(
        self,
        out: Path,
        refined: Any,
        basis: Tensor | None,
        measured: dict[str, Any],
        taken: Sequence[tuple[Tensor, tuple[str, ...]]],
    ) -> None:
        """Write the new bundle. Its recipe also has the documents that it was refined on, where it has those of the fit."""
        spec = replace(self.spec, format_version=FORMAT_VERSION)
        dtype = getattr(torch, spec.dtype)
        recipe, known = dict(self.opened.recipe), digests.of_recipe(self.opened.recipe)
        if known is not None:  # a list of refine's documents alone would pass for one of all documents
            new = dict.fromkeys(name for _, names in taken for name in names if name not in known)
            recipe[digests.FIELD] = str(recipe[digests.FIELD]) + "".join(new)
        write_bundle(
            out,
            spec,
            (
                (kind, layer_index, weight.to(dtype).cpu().contiguous(), bias.float().cpu())
                for (kind, layer_index), (weight, bias) in refined.items()
            ),
            recipe=recipe,
            solve={**self.opened.solve, "refine": {**asdict(self.options), **measured}},
            basis=None if basis is None else basis.to(dtype).cpu(),
        )
