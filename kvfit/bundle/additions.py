"""Add files to a finished bundle, such as an evaluation and a card.

The commit point is the replacement of ``SHA256SUMS``. Before it, the new files are written next to the old ones, under names
that begin with a dot and end with their digest, which readers ignore. After it, ``SHA256SUMS`` lists their digests, and anyone
who opens the bundle can rename them into place. So a process that is killed in between, or a rename that fails, loses nothing.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfit.bundle import manifest
from kvfit.bundle.files import sync_folder, write_file
from kvfit.errors import BundleError

_STAGED = ".staged"


def add_files(folder: str | Path, files: Mapping[str, bytes]) -> None:
    """Add or replace files that do not change what the mapper computes, and list them in ``SHA256SUMS``: all of them or none.

    Args:
        folder: the bundle.
        files: content by name: ``evaluation.json``, ``evaluation.md``, ``README.md``, ``LICENSE``, ``*.png``, ``*.svg``.

    Raises:
        BundleError: a name is not allowed, or a reader would refuse the content; then nothing has changed. Or the disk
            failed; then the bundle is unchanged, or the next reader completes the addition.
    """
    from filelock import FileLock

    path = Path(folder)
    try:
        for name, data in files.items():
            if not manifest.is_extra(name):
                raise BundleError(f"file {name[:100]!r}: cannot be added to a finished bundle")
            if name == "evaluation.json":
                check_evaluation(manifest.parse_record(name, data))
            if os.path.lexists(path / name):
                manifest.check_regular(path, name)
        with FileLock(path / ".lock"):  # the lock file is kept, because removing it would let two processes in
            digests = manifest.read(path)
            complete(path, digests)
            _discard_staged(path)
            added = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
            _stage(path, files, digests | added)
    except BundleError as error:
        raise BundleError(f"bundle {path}: {error}") from None
    except OSError as error:
        raise BundleError(f"bundle {path}: files could not be added ({error.strerror or error})") from None


def check_evaluation(evaluation: dict[str, Any]) -> None:
    """Refuse an ``evaluation.json`` without the fields that a verdict needs.

    Raises:
        BundleError: a field is missing or wrong; names it.
    """
    if evaluation.get("verdict") not in ("pass", "fail", "unknown"):
        raise BundleError(
            f"file evaluation.json, field verdict: found {repr(evaluation.get('verdict'))[:80]}, needed pass, fail or unknown"
        )
    if not isinstance(evaluation.get("weights_digest"), str):
        raise BundleError("file evaluation.json, field weights_digest: needed the digest of the weights that were evaluated")


def _stage(folder: Path, files: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
    """Write and commit the files; `digests` lists all files of the bundle. An error before the commit point changes nothing."""
    sums = folder / f".{manifest.MANIFEST}{_STAGED}"
    written = [sums]
    try:
        for name, data in files.items():
            written.append(folder / _staged_name(name, digests[name]))
            _rewrite(written[-1], data)
        _rewrite(sums, manifest.render(digests))
        sync_folder(folder)
        os.replace(sums, folder / manifest.MANIFEST)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    complete(folder, digests)
    sync_folder(folder)


def complete(folder: Path, digests: Mapping[str, str]) -> None:
    """Rename the files of an interrupted addition into place, if it had passed its commit point.

    Raises:
        BundleError: a file cannot be renamed, because the folder is not writable.
    """
    present = {entry.name for entry in os.scandir(folder) if entry.name.endswith(_STAGED)}
    for name, digest in digests.items() if present else ():
        staged = folder / _staged_name(name, digest)
        if staged.name not in present or not manifest.is_extra(name):
            continue
        try:
            if stat.S_ISREG(staged.lstat().st_mode) and manifest.file_digest(staged) == digest:
                os.replace(staged, folder / name)
        except FileNotFoundError:
            pass  # another reader was quicker
        except OSError as error:
            raise BundleError(
                f"file {name}: an addition was interrupted and cannot be completed here ({error.strerror}); run kvfit verify on"
                " the folder as a user who may write to it"
            ) from None


def _discard_staged(folder: Path) -> None:
    """Remove the files of an addition that did not reach its commit point. The caller must hold the bundle's lock."""
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(".") and entry.name.endswith(_STAGED) and entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def _staged_name(name: str, digest: str) -> str:
    return f".{name}.{digest[:16]}{_STAGED}"


def _rewrite(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    write_file(path, data)
