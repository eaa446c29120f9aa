"""The verb `verify`: check everything in a bundle, and say what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfit.bundle.bundle import Bundle, Verdict
from kvfit.hub.load import resolve


@dataclass(frozen=True)
class Verification:
    """A bundle of which every file, digest, field and weight was checked.

    Attributes:
        ref: as asked for.
        folder: where it is.
        source: ref of the source model.
        target: ref of the target model.
        verdict: of the evaluation.
        format_version: of the bundle.
        weights_digest: of spec and weights.
        files: how many files were checked.
        nbytes: bytes of the weights.
    """

    ref: str
    folder: str
    source: str
    target: str
    verdict: Verdict
    format_version: int
    weights_digest: str
    files: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.ref}: sound, {self.source} -> {self.target}, verdict {self.verdict}, {self.files} files,"
            f" {self.nbytes / 1e6:.1f} MB, weights {self.weights_digest}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))


def verify(ref: str | Path, *, revision: str | None = None, local_files_only: bool = False) -> Verification:
    """Check all of a bundle: names, digests, spec, shapes, and that every weight is finite.

    Args:
        ref: a folder, or ``org/name[@revision]``.
        revision: the revision, where `ref` does not end in it.
        local_files_only: never ask the Hub.

    Raises:
        RefError: nothing is there, or it cannot be reached.
        BundleError: something is wrong with it; names the file and the field.
    """
    bundle = Bundle.open(resolve(ref, revision, local_files_only))
    bundle.check_weights()
    return Verification(
        ref=str(ref),
        folder=str(bundle.folder),
        source=bundle.spec.source.ref,
        target=bundle.spec.target.ref,
        verdict=bundle.verdict,
        format_version=bundle.spec.format_version,
        weights_digest=bundle.weights_digest,
        files=len(bundle.digests),
        nbytes=bundle.nbytes,
    )
