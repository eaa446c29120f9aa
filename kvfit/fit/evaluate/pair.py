"""Load and check a bundle's two models, and the mapper between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfit.bundle.bundle import Bundle
from kvfit.fit.capture import models
from kvfit.fit.capture.locate import recorded_refs
from kvfit.model.decoder import text_config
from kvfit.runtime import EXACT_HEAD
from kvfit.runtime.mapper import Mapper

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """Both models and the mapper between them.

    Attributes:
        source: the loaded source.
        target: the loaded target.
        mapper: the mapper between them, bound to both.
        exact_head: number of first tokens that the target runs itself in the `handoff` arm.
        exact_tail: number of last tokens of the prefix that it runs itself there.
        recompute: share of the mapped tokens that it recomputes there, guided by the source; 0 for none.
        prefilled: cache of the source's keys and values by the bytes of the ids, for several mappers on the same contexts; None
            for no cache.
    """

    source: Any
    target: Any
    mapper: Mapper
    exact_head: int = EXACT_HEAD
    exact_tail: int = 0
    recompute: float = 0.0
    prefilled: dict[bytes, list[tuple[Tensor, Tensor]]] | None = None


def load_pair(
    bundle: Bundle,
    *,
    source: str | None = None,
    target: str | None = None,
    loading: tuple[models.Options, models.Options] | None = None,
    **options: Any,
) -> tuple[Pair, Any]:
    """Load and check both models of a bundle. Returns them with the mapper bound to both, and the tokenizer.

    Args:
        bundle: an open bundle.
        source: ref of the source model; by default the one in the bundle.
        target: ref of the target model; by default the one in the bundle.
        loading: how source and target are loaded.
        **options: `exact_head`, `exact_tail` and `recompute` of the pair.

    Raises:
        RefError: a model cannot be found.
        MismatchError: the bundle was fitted on another model.
    """
    refs = recorded_refs(bundle.spec, source, target)
    loaded = [
        models.load(ref, revision, how)
        for (ref, revision), how in zip(refs, loading or (models.Options(), models.Options()), strict=True)
    ]
    a, b = loaded
    mapper = _unjudged(bundle).bind(a.model, tokenizer=a.tokenizer).bind(target_model=b.model, tokenizer=b.tokenizer)
    return Pair(a.model, b.model, mapper, **options), b.tokenizer


def mapper_for(bundle: Bundle, target: Any) -> Mapper:
    """A bundle's mapper bound to the loaded target, as in production, whatever the verdict of an earlier evaluation."""
    return _unjudged(bundle).bind(target_model=target)


def _unjudged(bundle: Bundle) -> Mapper:
    return Mapper.from_bundle(replace(bundle, evaluation=None))


def shared_vocabulary(pair: Pair) -> int:
    """The number of logits that both models have. Models of one family may pad their embeddings to different sizes."""
    return min(int(text_config(model).vocab_size) for model in (pair.source, pair.target))
