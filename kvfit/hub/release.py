"""What is published of a bundle: its files, with the card made for the place where they go."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvfit.bundle import manifest
from kvfit.bundle.bundle import Bundle
from kvfit.hub import card

Status = Literal["pushed", "unchanged", "proposed", "checked"]


@dataclass(frozen=True)
class Published:
    """What became of a release at the place where it was to go; see `kvfit.hub.push.PushResult`."""

    status: Status
    tag: str | None
    commit: str | None
    url: str
    tags: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True)
class ReleaseFile:
    """One file: its content is in memory where it was made for the release, else on disk."""

    name: str
    sha256: str
    size: int
    content: bytes | Path

    def git_id(self) -> str:
        """The file's name in git, which is how the Hub tells regular files apart."""
        digest = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        if isinstance(self.content, bytes):
            digest.update(self.content)
        else:
            with open(self.content, "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()


@dataclass(frozen=True)
class Release:
    """A bundle ready to be published.

    Attributes:
        bundle: the bundle, all of it checked.
        files: every file, ``SHA256SUMS`` included.
        metadata: of the card.
    """

    bundle: Bundle
    files: tuple[ReleaseFile, ...]
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, folder: str | Path, *, ref: str | None, license: str | None = None) -> Release:
        """Check a bundle in full and make its card for `ref`.

        A card that kvfit made, or none, is made anew; one that its author changed stays as it is.

        Raises:
            BundleError: the bundle or its card is not fit to be published.
        """
        bundle = Bundle.open(folder)
        bundle.check_weights()
        readme = bundle.folder / "README.md"
        text = readme.read_bytes().decode("utf-8", "replace") if "README.md" in bundle.digests else None
        if text is None or card.is_generated(text):
            stated = license or (card.check_metadata(text, str(folder)).get("license") if text is not None else None)
            text = card.render_card(bundle, ref=ref, license=stated)
        metadata = card.check_metadata(text, str(folder))
        data = text.encode("utf-8")
        digests = dict(bundle.digests) | {"README.md": hashlib.sha256(data).hexdigest()}
        made = {"README.md": data, manifest.MANIFEST: manifest.render(digests)}
        files = [_on_disk(bundle.folder, name, digests[name]) for name in sorted(digests) if name not in made]
        files += [ReleaseFile(name, hashlib.sha256(data).hexdigest(), len(data), data) for name, data in made.items()]
        return cls(bundle, tuple(files), metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 by name, of all files but ``SHA256SUMS``: what two releases are compared by."""
        return {file.name: file.sha256 for file in self.files if file.name != manifest.MANIFEST}

    @property
    def license(self) -> str:
        """The licence that the card states, ``other`` where it states none."""
        return str(self.metadata.get("license") or "other")


def _on_disk(folder: Path, name: str, digest: str) -> ReleaseFile:
    path = folder / name
    return ReleaseFile(name, digest, path.stat().st_size, path)
