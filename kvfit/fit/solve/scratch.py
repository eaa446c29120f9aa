"""The folder beside a bundle in which maps wait until all are solved; one that a killed run left is cleared by the next."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvfit.errors import BundleError

SUFFIX = ".scratch"
LOCK = "lock"


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is gone when the block ends, however it ends.

    Raises:
        BundleError: writing failed inside the block, as on a full disk; names the place and the reason.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(out)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=SUFFIX, dir=out.parent))
        try:
            # The lock goes with the process, so a folder that nobody has locked is one that a killed run left.
            with FileLock(folder / LOCK):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise BundleError(
            f"{out}: cannot be written in {out.parent} ({error.strerror or error}), needed a disk with room for the bundle"
            " twice: free some or choose another --out"
        ) from error


def clear_abandoned(out: Path) -> None:
    """Remove the scratch folders that killed runs with the same `out` have left."""
    for folder in out.parent.glob(f".{out.name}.*{SUFFIX}"):
        with contextlib.suppress(Timeout, OSError):
            with FileLock(folder / LOCK, timeout=0):
                pass
            shutil.rmtree(folder)
