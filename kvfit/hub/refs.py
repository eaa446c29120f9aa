"""Refs, which name models and mappers: ``org/name@revision`` or a folder. Also tags and versions."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvfit.errors import RefError

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_VERSION = re.compile(r"v?\d{1,9}(\.\d{1,9}){0,9}", re.ASCII)


def split_ref(ref: str) -> tuple[str, str | None]:
    """Split ``org/name@revision`` into name and revision; the revision is None if the ref has none.

    Raises:
        RefError: nothing follows the ``@``.
    """
    name, separator, revision = ref.rpartition("@")
    if not separator or not name:
        return ref, None
    if not revision:
        raise RefError(f"{ref!r}: found no revision after the @, needed a tag, branch or commit hash")
    return name, revision


def is_repository(name: str) -> bool:
    """Whether a name has the form ``org/name`` of the Hub."""
    return _REPOSITORY.fullmatch(name) is not None and "--" not in name and ".." not in name and not name.endswith(".git")


def is_path(name: str) -> bool:
    """Whether a name has the form of a path and can only be a folder: ``./x``, ``../x``, ``/x``, ``~/x``, ``C:\\x``."""
    return name.startswith((".", "~", os.sep)) or os.path.isabs(name) or "\\" in name or name.endswith("/")


def is_tag(tag: str) -> bool:
    """Whether a name can be a tag: letters, digits, ``.``, ``_`` and ``-``, not a path."""
    return _TAG.fullmatch(tag) is not None and ".." not in tag


def is_version(name: str) -> bool:
    """Whether a name has the form of a numbered version: ``v1``, ``2``, ``1.0``, ``v1.10.2``."""
    return _VERSION.fullmatch(name) is not None


def version_key(tag: str) -> tuple[int, tuple[int, ...], str]:
    """Sort key for tags: other names first, then versions by number, with or without ``v``: v1, v1.1, v1.10, v2, 2.1."""
    if not is_version(tag):
        return 0, (), tag
    return 1, _numbers(tag), tag


def next_version(tags: list[str]) -> str:
    """The next major version: v3 after v2 and after 2.1; ``v1`` if there is none yet."""
    return f"v{max((_numbers(tag)[0] for tag in tags if is_version(tag)), default=0) + 1}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("v").split("."))


def published_versions(folder: Path) -> list[str]:
    """The bundles in a folder, in the order of their versions, oldest first: v2 comes before v10."""
    found = [entry.name for entry in folder.iterdir() if is_tag(entry.name) and (entry / "mapper.json").is_file()]
    return sorted(found, key=version_key)
