"""The verb `verify`: check everything in a bundle, and report what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfit.bundle.bundle import Bundle, Verdict
from kvfit.hub.load import resolve


@dataclass(frozen=True)
class Verification:
    """The result for a bundle whose files, digests, fields and weights were all checked.

    Attributes:
        ref: the ref that was passed.
        folder: the bundle's folder.
        source: ref of the source model.
        target: ref of the target model.
        verdict: verdict of the evaluation.
        format_version: format version of the bundle.
        weights_digest: digest of spec and weights.
        files: number of files that were checked.
        nbytes: size of the weight files in bytes.
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
        """The result as JSON values."""
        return dict(vars(self))


def verify(ref: str | Path, *, revision: str | None = None, local_files_only: bool = False) -> Verification:
    """Check everything in a bundle: names, digests, spec, shapes, and that every weight is finite.

    Args:
        ref: a folder, or ``org/name[@revision]``.
        revision: the revision, if `ref` does not end in one.
        local_files_only: never ask the Hub.

    Raises:
        RefError: nothing is found under the ref, or it cannot be reached.
        BundleError: the bundle is not sound; names the file and the field.
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
