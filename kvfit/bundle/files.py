"""Write folders and files that appear completely or not at all, and the scratch folders for that."""

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
_UNLOCKED_SECONDS = 3600  # a run locks its scratch folder within milliseconds of creating it


def require_free(folder: str | Path) -> None:
    """Refuse a destination that exists, to be called before long work.

    Raises:
        BundleError: the destination exists.
    """
    if os.path.lexists(folder):
        raise BundleError(f"bundle {folder}: already exists; choose another folder or remove it")


def require_writable(destination: str | Path) -> None:
    """Refuse a destination where no folder can be created, to be called before long work.

    Raises:
        BundleError: a folder is not writable; says which, and why.
    """
    home = Path(destination).absolute().parent
    while not os.path.lexists(home):
        home = home.parent
    try:
        # A check of the permissions is not enough, because the superuser has all of them, even on a read-only disk.
        os.rmdir(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=home))
    except OSError as error:
        reason = error.strerror or error
        raise BundleError(f"{destination}: cannot be written in {home} ({reason}), needed another place") from None


@contextmanager
def scratch_folder(destination: Path) -> Iterator[Path]:
    """A temporary sibling ``.NAME.XXXXXXXX.partial`` of `destination` that is removed when the block ends.

    The scratch folder of a run that was killed is removed by the next run for the same destination. The folder of a run that
    is still active is kept: it holds a lock, which the system releases when a process ends.

    Raises:
        BundleError: the disk failed inside the block (full, read-only).
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
    """A scratch folder that is renamed to the destination when the block succeeds, and removed when it fails.

    Raises:
        BundleError: the destination exists at the end, or the disk failed (full, read-only). Nothing is left behind.
    """
    with scratch_folder(destination) as scratch:
        yield scratch
        (scratch / _LOCK).unlink(missing_ok=True)
        sync_folder(scratch)
        require_free(destination)  # os.rename would replace an empty folder
        os.rename(scratch, destination)
        sync_folder(destination.parent)


def write_file(path: Path, data: bytes) -> str:
    """Write a new file and flush it to the disk; returns its SHA-256 in hexadecimal."""
    with open(path, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return hashlib.sha256(data).hexdigest()


def sync_file(path: Path) -> None:
    """Flush a file that other code has written to the disk."""
    with open(path, "r+b") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
