"""The recipe of a store: everything that its numbers depend on."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvfit.fit.capture import models
from kvfit.fit.capture.ranks import Ranks
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.stats import digests
from kvfit.model.decoder import decoder_parameters, hidden_size
from kvfit.spec import ModelSpec

PACKAGES = ("kvfit-mappers", "torch", "transformers", "datasets", "zarr")


def make_recipe(
    specs: list[ModelSpec],
    loaded: list[Any],
    texts: tuple[TextOptions, ...],
    options: dict[str, Any],
    loading: tuple[models.Options, models.Options],
    batch_size: int,
    ranks: Ranks,
) -> dict[str, Any]:
    """The recipe. A resumed capture must have the same as before, and merged captures the same except for `part`.

    `loaded` are the two models.

    The store also has the models' specs. Their fingerprints are repeated in the recipe, so that errors can name a difference.
    """
    described = [{**asdict(text), "dataset": public_name(text.dataset)} for text in texts]
    for text in described:
        del text["least_chars"]
    return {
        "models": [
            {
                "ref": spec.ref,
                "revision": spec.revision,
                "tokenizer": spec.tokenizer_fingerprint,
                "weights": spec.weight_fingerprint,
                "decoder_parameters": decoder_parameters(model),
                "hidden_size": hidden_size(model),
            }
            for spec, model in zip(specs, loaded, strict=True)
        ],
        "text": described[0] if len(described) == 1 else {"merged": described},
        "options": options,
        "batch_size": batch_size,
        "part": {"rank": ranks.rank, "of": ranks.size},
        "dtype": [how.dtype for how in loading],
        "attn_implementation": [how.attn_implementation for how in loading],
        "versions": {name: _version(name) for name in PACKAGES},
    }


def bundle_recipe(recipe: dict[str, Any], cursor: Any) -> dict[str, Any]:
    """The recipe for a bundle: the store's recipe, and the digests of the captured documents if its cursor has them.

    The digests are sorted, so that they do not depend on the order of the text and of merging.
    """
    found = digests.of_cursor(cursor)
    return recipe if not found else {**recipe, digests.FIELD: "".join(sorted(found))}


def public_name(dataset: str) -> str:
    """A dataset's name for the recipe. Of a local path only the last part is recorded, so that no local path is published."""
    return Path(dataset).name if Path(dataset).exists() else dataset


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
