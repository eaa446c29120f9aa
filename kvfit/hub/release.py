"""The files of a bundle that are published, with a card for the place where they are published."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfit.bundle import manifest
from kvfit.bundle.bundle import Bundle
from kvfit.hub import card

README = "README.md"


@dataclass(frozen=True)
class ReleaseFile:
    """One file. Its content is in memory if it was made for the release, else on disk."""

    name: str
    sha256: str
    size: int
    content: bytes | Path


@dataclass(frozen=True)
class Release:
    """A bundle ready to be published.

    Attributes:
        bundle: the bundle, fully checked.
        files: every file, ``SHA256SUMS`` included.
        card: text of its ``README.md``.
        metadata: metadata of the card.
    """

    bundle: Bundle
    files: tuple[ReleaseFile, ...]
    card: str
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, folder: str | Path, *, ref: str | None, license: str | None = None) -> Release:
        """Check a bundle in full and make its card for `ref`.

        The card is made again if it is missing or was made by kvfit. A card that its author has changed is kept.

        Raises:
            BundleError: the bundle or its card is not fit to be published.
        """
        bundle = Bundle.open(folder)
        bundle.check_weights()
        text = (bundle.folder / README).read_bytes().decode("utf-8", "replace") if README in bundle.digests else None
        if text is None or card.is_generated(text):
            stated = license or (card.check_metadata(text, str(folder)).get("license") if text is not None else None)
            text = card.render_card(bundle, ref=ref, license=stated)
        metadata = card.check_metadata(text, str(folder))
        data = text.encode("utf-8")
        digests = dict(bundle.digests) | {README: hashlib.sha256(data).hexdigest()}
        made = {README: data, manifest.MANIFEST: manifest.render(digests)}
        on_disk = [(name, bundle.folder / name) for name in sorted(digests) if name not in made]
        files = [ReleaseFile(name, digests[name], path.stat().st_size, path) for name, path in on_disk]
        files += [ReleaseFile(name, hashlib.sha256(data).hexdigest(), len(data), data) for name, data in made.items()]
        return cls(bundle, tuple(files), text, metadata)

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 by name of all files except ``SHA256SUMS``. Two releases are equal if these are."""
        return {file.name: file.sha256 for file in self.files if file.name != manifest.MANIFEST}

    @property
    def license(self) -> str:
        """The licence that the card states; ``other`` if it states none."""
        return str(self.metadata.get("license") or "other")
