"""The store in which a source engine leaves keys and values for a target engine: its interface and a folder of files.

Another store (a key-value server, another cache) can replace the folder where it offers the same three calls:

    put(address, data) -> bool     keep the bytes; False where they cannot be kept
    get(address) -> bytes | None   the bytes; None where the entry is missing or was deleted
    has(address) -> bool           whether a get would find them now; cheap, and no promise

An address is 64 hexadecimal digits. An entry never changes: whoever puts an address again puts the same content. A get returns
an entry whole or not at all.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvfit.errors import MismatchError

_log = logging.getLogger("kvfit")

_ADDRESS = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".kv"
# How many puts pass between two scans for what other processes have written. Between them, every process that writes to the
# folder may take it past its limit by this many entries.
_PUTS_A_SCAN = 32
_ABANDONED_SECONDS = 600  # a file still unfinished after this time belongs to a writer that was killed


@runtime_checkable
class Store(Protocol):
    """The calls that the connector needs of a store. They may come from several processes at once."""

    def put(self, address: str, data: bytes) -> bool:
        """Keep an entry; False where it cannot be kept. A full store is no error."""

    def get(self, address: str) -> bytes | None:
        """An entry's bytes; None where there is no such entry."""

    def has(self, address: str) -> bool:
        """Whether an entry is there now."""


class FolderStore:
    """A store that keeps its entries as files in a folder, best in shared memory (``/dev/shm``).

    A folder on a disk that both engines reach works as well. A file is written under another name and renamed, so a reader sees
    all of it or nothing. When the folder is full, the entries that were unused for longest are deleted. The folder may be
    deleted at any time: a missing entry is a miss.

    Attributes:
        folder: the folder with the entries.
        max_bytes: the most bytes that they may take together.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        """Open a folder. Where it does not exist, make one that only this user can read.

        Raises:
            MismatchError: the folder cannot be created or written to, or `max_bytes` is not positive.
        """
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        if max_bytes < 1:
            raise MismatchError(f"max_store_bytes: found {max_bytes}, needed 1 or more")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise MismatchError(f"store: found {self.folder} ({error.strerror}), needed a folder that can be written") from None
        if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            raise MismatchError(f"store: found {self.folder} without the right to write, needed a folder that can be written")
        self._numbers = itertools.count()
        self._room = 0  # bytes until the next scan
        self._puts = 0

    def put(self, address: str, data: bytes) -> bool:
        """Keep an entry; False where it is larger than the whole store or the disk is full."""
        path = self._path(address)
        if len(data) > self.max_bytes:
            return False
        if path.exists():
            self._touch(path)
            return True
        self._puts += 1
        if self._room < len(data) or self._puts >= _PUTS_A_SCAN:
            self._make_room(len(data))
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}-{next(self._numbers)}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(unfinished, "xb") as file:
                file.write(data)
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            _log.warning("store %s: an entry of %d bytes was not kept (%s)", self.folder, len(data), error.strerror)
            return False
        self._room -= len(data)
        return True

    def get(self, address: str) -> bytes | None:
        """An entry's bytes; it counts as used now."""
        path = self._path(address)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        self._touch(path)
        return data

    def has(self, address: str) -> bool:
        """Whether the entry's file exists."""
        return self._path(address).is_file()

    def _path(self, address: str) -> Path:
        if not _ADDRESS.fullmatch(address):
            raise MismatchError(f"address: found {address[:80]!r}, needed 64 hexadecimal digits")
        return self.folder / address[:2] / f"{address}{_SUFFIX}"

    def _touch(self, path: Path) -> None:
        try:
            os.utime(path)
        except OSError:
            _log.debug("store %s: %s was deleted while it was used", self.folder, path.name)

    def _make_room(self, needed: int) -> None:
        """Delete the entries unused for longest until `needed` bytes and a tenth of the store are free."""
        entries = sorted(self._files())  # by time of last use
        total = sum(size for _, size, _ in entries)
        if total + needed > self.max_bytes:
            goal = max(0, self.max_bytes - needed - self.max_bytes // 10)
            for _, size, path in entries:
                if total <= goal:
                    break
                path.unlink(missing_ok=True)
                total -= size
        self._room = self.max_bytes - total
        self._puts = 0

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, size, path) of every entry; files that a killed writer has left are deleted."""
        for path in self.folder.glob("??/*"):
            try:
                state = path.stat()
                if path.suffix == _SUFFIX:
                    yield state.st_mtime, state.st_size, path
                elif path.suffix == ".part" and state.st_mtime < time.time() - _ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # deleted meanwhile by another process


def open_store(place: str, max_bytes: int, options: dict[str, Any]) -> Store:
    """The store that a configuration names.

    Args:
        place: a folder, or ``package.module:factory`` for a store of one's own; the factory is called with `options`.
        max_bytes: the folder's size limit.
        options: the factory's argument.

    Raises:
        MismatchError: there is no such factory, or what it makes lacks one of the three calls.
    """
    module, separator, name = place.partition(":")
    if not separator or "/" in place:
        return FolderStore(place, max_bytes)
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MismatchError(f"store: found {place!r} ({error}), needed a folder or package.module:factory") from None
    store = factory(options)
    if not isinstance(store, Store):
        raise MismatchError(f"store: found {type(store).__name__} from {place}, needed an object with put, get and has")
    return store
