"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfit.errors import BundleError


def require_free(folder: str | Path) -> None:
    """Refuse a destination that exists; for checking before long work.

    Raises:
        BundleError: something is there already.
    """
    if os.path.lexists(folder):
        raise BundleError(f"bundle {folder}: already exists; choose another folder or remove it")


def require_writable(destination: str | Path) -> None:
    """Refuse a destination that no folder can be made at; for checking before long work.

    Raises:
        BundleError: says which folder cannot be written, and why.
    """
    home = Path(destination).absolute().parent
    while not os.path.lexists(home):
        home = home.parent
    try:
        # Asking for permissions is not enough: the superuser has them all, on a read-only disk too.
        os.rmdir(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=home))
    except OSError as error:
        reason = error.strerror or error
        raise BundleError(f"{destination}: cannot be written in {home} ({reason}), needed another place") from None


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """A temporary sibling that becomes the destination when the block ends well, and vanishes when it does not."""
    temporary = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        require_free(destination)  # os.rename would take the place of an empty folder
        os.rename(temporary, destination)
        sync_folder(destination.parent)
    except OSError as error:
        raise BundleError(f"bundle {destination}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: Path, data: bytes) -> str:
    """Write a new file down to the disk; returns its SHA-256 in hexadecimal."""
    with open(path, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return hashlib.sha256(data).hexdigest()


def sync_folder(path: Path) -> None:
    """Bring a folder's names down to the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
