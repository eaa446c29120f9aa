"""Folders and files that appear whole or not at all, and the scratch folders that runs work in."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfit.errors import BundleError

_LOCK = ".in-use"
_UNLOCKED_SECONDS = 3600  # a run locks its scratch folder within milliseconds of making it


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
def scratch_folder(destination: Path) -> Iterator[Path]:
    """A temporary sibling ``.NAME.XXXXXXXX.partial`` of `destination` that is removed when the block ends.

    A run that was killed leaves its scratch folder behind; the next run for the same destination removes it. The folder of
    a run that is still going on is left alone: it holds a lock, which the system takes from a process that ends.

    Raises:
        BundleError: the disk refused inside the block (full, read-only); says so in one line.
    """
    from filelock import FileLock

    remove_abandoned(destination)
    scratch = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        scratch.mkdir(parents=True)
        with FileLock(scratch / _LOCK):
            yield scratch
    except OSError as error:
        raise BundleError(
            f"{destination}: cannot be written ({error.strerror or error}), needed a disk with room for all of it:"
            " free some, or choose another place"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_abandoned(destination: Path) -> None:
    """Remove the scratch folders that killed runs for `destination` left behind."""
    name = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.partial")
    if not destination.parent.is_dir():
        return
    for scratch in list(destination.parent.iterdir()):
        if name.fullmatch(scratch.name) and _is_abandoned(scratch):
            shutil.rmtree(scratch, ignore_errors=True)


def _is_abandoned(scratch: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        if not (scratch / _LOCK).exists():
            return time.time() - scratch.stat().st_mtime > _UNLOCKED_SECONDS
        with FileLock(scratch / _LOCK, timeout=0):
            return True
    except (Timeout, OSError):
        return False


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """A scratch folder that becomes the destination when the block ends well, and vanishes when it does not.

    Raises:
        BundleError: the destination exists by then, or the disk refused (full, read-only); nothing is left behind.
    """
    with scratch_folder(destination) as scratch:
        yield scratch
        (scratch / _LOCK).unlink(missing_ok=True)
        sync_folder(scratch)
        require_free(destination)  # os.rename would take the place of an empty folder
        os.rename(scratch, destination)
        sync_folder(destination.parent)


def write_file(path: Path, data: bytes) -> str:
    """Write a new file down to the disk; returns its SHA-256 in hexadecimal."""
    with open(path, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return hashlib.sha256(data).hexdigest()


def sync_file(path: Path) -> None:
    """Bring the content of a file that something else wrote down to the disk."""
    with open(path, "r+b") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's names down to the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
