"""`StoreWriter` locks a store, writes chunks to the generation that is not live, and commits.

It knows chunks and commits, but nothing of activations. `accumulate` and `merge` use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from kvfit import __version__
from kvfit.bundle.files import sync_folder
from kvfit.errors import StoreError
from kvfit.fit.stats.layout import SPLITS, BlockArray, Generation, Layout, Part, VectorArray, array_path, create_arrays
from kvfit.fit.stats.record import (
    FORMAT_VERSION,
    Array,
    Batches,
    Live,
    Record,
    Tokens,
    read_chunk,
    read_record,
    write_chunk,
    write_record,
)  # fmt: skip

LOCK_NAME = "lock"


class StoreWriter:
    """A store that is open for writing and locked, and changes only by whole commits.

    Attributes:
        root: the store's folder.
        record: the last commit.
        disk_seconds: the time in reading, hashing and writing chunks.
        disk_processor_seconds: the part of that time in which a processor worked and did not wait for the disk.
        disk_bytes: the bytes of chunks that were written.
    """

    def __init__(self, root: Path, record: Record, lock: FileLock) -> None:
        self.root = root
        self.record = record
        self.layout = record.layout
        self.disk_seconds = 0.0
        self.disk_processor_seconds = 0.0
        self.disk_bytes = 0
        self._counting = threading.Lock()  # chunks are written by several threads
        self._lock: FileLock | None = lock
        # The generation with each split's current numbers: the live one, or the other one once it has been rewritten.
        self._current: dict[Part, Generation | None] = {split: record.live.of(split) for split in SPLITS}
        self._unsynced: set[str] = set()  # folders of arrays with a new file whose name may not be on the disk yet
        self._digests: dict[str, list[str]] = {path: list(digests) for path, digests in record.digests.items()}

    @classmethod
    def create(cls, path: Path, layout: Layout, recipe: dict[str, Any]) -> StoreWriter:
        """Make a new, empty, committed store: it is built beside `path` and then renamed.

        Raises:
            StoreError: `path` exists, another process is making it, or the disk fails.
        """
        with building(path) as (root, lock):
            writer = cls.start_at(root, layout, recipe, lock)
            sync_tree(root)
            publish(root, path)
            writer.root = path
        return writer

    @classmethod
    def start_at(cls, root: Path, layout: Layout, recipe: dict[str, Any], lock: FileLock) -> StoreWriter:
        """Make an empty, committed store in a folder that `building` made and `publish` will rename."""
        create_arrays(root, layout)
        record = empty_record(layout, recipe)
        write_record(root, record)
        return cls(root, record, lock)

    @classmethod
    def open(cls, path: Path) -> StoreWriter:
        """Lock an existing store and delete the files that its commit does not name.

        Raises:
            StoreError: there is no store, its record is damaged, or another process writes it.
        """
        read_record(path)  # fails before a lock file appears in a folder that is not a store
        lock = take_lock(path, path)
        try:
            writer = cls(path, read_record(path), lock)
            for name in path.glob("*.partial"):
                name.unlink()
            writer.drop_dead()
        except BaseException:
            lock.release()
            raise
        return writer

    def pending(self, split: Part) -> Generation:
        """The generation to which a split's new numbers are written."""
        return "b" if self.record.live.of(split) == "a" else "a"

    def add_to_chunk(self, split: Part, array: BlockArray, number: int, addition: Array) -> str:
        """Write ``current + addition`` of one chunk to the pending generation and return its digest; thread-safe.

        Args:
            addition: (pairs of the chunk, rows of the chunk, columns) float64.
        """
        started, busy = time.perf_counter(), time.thread_time()
        chunk, current = array.chunks[number], self._current[split]
        numbers = np.zeros(array.chunk_shape, np.dtype(array.dtype).newbyteorder("<"))
        inside = numbers[: chunk.last - chunk.first, : chunk.bottom - chunk.top]
        if current is None:
            inside[...] = addition
        else:
            path = array_path(split, current, array)
            stored = read_chunk(self.root, path, array, number, self._digests[path][number])
            inside[...] = stored[: inside.shape[0], : inside.shape[1]] + addition
        digest = self._write(array_path(split, self.pending(split), array), chunk.key, numbers)
        self._count(numbers.nbytes, time.perf_counter() - started, time.thread_time() - busy)
        return digest

    def write_chunk(self, split: Part, array: BlockArray, number: int, numbers: Array) -> str:
        """Write one whole chunk to the pending generation and return its digest; thread-safe."""
        started, busy = time.perf_counter(), time.thread_time()
        data = np.ascontiguousarray(numbers, np.dtype(array.dtype).newbyteorder("<"))
        digest = self._write(array_path(split, self.pending(split), array), array.chunks[number].key, data)
        self._count(data.nbytes, time.perf_counter() - started, time.thread_time() - busy)
        return digest

    def read_block(self, split: Part, array: BlockArray, number: int) -> Array:
        """Read and check one chunk of the last commit."""
        generation = self.record.live.of(split)
        if generation is None:
            raise StoreError(f"{self.root} has no tokens in its {split} split")
        path = array_path(split, generation, array)
        return read_chunk(self.root, path, array, number, self.record.digests[path][number])

    def _count(self, n_bytes: int, seconds: float, busy: float) -> None:
        with self._counting:
            self.disk_bytes += n_bytes
            self.disk_seconds += seconds
            self.disk_processor_seconds += busy

    def end(self, split: Part, digests: dict[BlockArray, list[str]], sums: dict[str, Array]) -> None:
        """End the rewriting of a split: note its blocks' digests, write its small arrays, and make it current."""
        generation = self.pending(split)
        for array, of_chunks in digests.items():
            self._digests[array_path(split, generation, array)] = of_chunks
        for small in self.layout.sums:
            path = array_path(split, generation, small)
            self._digests[path] = [self.write_vector(path, small, sums[small.name])]
        self._current[split] = generation

    def write_vector(self, path: str, array: VectorArray, numbers: Array) -> str:
        """Write one small array and return its digest."""
        data = np.ascontiguousarray(numbers, np.dtype(array.dtype).newbyteorder("<"))
        return self._write(path, array.chunks[0].key, data)

    def write_shifts(self, shifts: dict[str, Array]) -> None:
        """Write the shifts by name; allowed only before the first commit that names them."""
        for array in self.layout.shifts:
            self._digests[array.name] = [self.write_vector(array.name, array, shifts[array.name])]

    def read_vector(self, path: str, array: VectorArray) -> Array:
        """The current numbers of a small array, as a writable copy."""
        return read_chunk(self.root, path, array, 0, self._digests[path][0]).copy()

    def commit(self, *, cursor: Any, tokens: Tokens, batches: Batches, buffer_tokens: int | None, finished: bool) -> None:
        """Make everything that was written since the last commit live, atomically."""
        live = Live(self.layout.shifts[0].name in self._digests, self._current["fit"], self._current["holdout"])
        record = dataclasses.replace(
            self.record, kvfit_version=__version__, commit=self.record.commit + 1, finished=finished, cursor=cursor,
            buffer_tokens=buffer_tokens, tokens=tokens, batches=batches, live=live,
        )  # fmt: skip
        named = record.live_arrays()
        record = dataclasses.replace(record, digests={path: tuple(self._digests[path]) for path in named})
        for path in sorted(self._unsynced):
            sync_folder(self.root / path)
        self._unsynced.clear()
        write_record(self.root, record)
        self.record = record
        self._digests = {path: self._digests[path] for path in named}
        if finished:
            self.drop_dead()

    def drop_dead(self) -> None:
        """Delete the chunk files that the last commit does not name."""
        live = self.record.live_arrays()
        for path, _ in self.layout.paths():
            if path not in live:
                for file in (self.root / path).glob("c.*"):
                    file.unlink()

    def _write(self, path: str, key: str, numbers: Array) -> str:
        file = self.root / path / key
        if not file.exists():
            self._unsynced.add(path)
        return write_chunk(file, numbers)

    def close(self) -> None:
        """Release the lock; what was not committed is lost."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def empty_record(layout: Layout, recipe: dict[str, Any]) -> Record:
    """The record of commit 0, without tokens."""
    return Record(
        format_version=FORMAT_VERSION, kvfit_version=__version__, commit=0, finished=False, cursor=None, source=layout.source,
        target=layout.target, inputs=layout.inputs, stats_dtype=layout.stats_dtype, lexical_lags=layout.lexical_lags,
        recipe=recipe, buffer_tokens=None, tokens=Tokens(0, 0), batches=Batches(0, 0, None), live=Live(False, None, None),
        digests={},
    )  # fmt: skip


@contextlib.contextmanager
def building(path: Path) -> Iterator[tuple[Path, FileLock]]:
    """Make a locked, empty folder beside `path` to build a store in. On an error, delete it and release the lock.

    Raises:
        StoreError: `path` exists, or another process is building it.
    """
    if path.exists():
        raise StoreError(f"{path} exists; continue it with --resume, or choose another --out")
    root = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be created: {error}") from error
    lock = take_lock(root, path)
    try:
        for name in root.iterdir():  # a process that was killed may have left files
            if name.name != LOCK_NAME:
                shutil.rmtree(name) if name.is_dir() else name.unlink()
        yield root, lock
    except BaseException as error:
        shutil.rmtree(root, ignore_errors=True)
        lock.release()
        if isinstance(error, OSError):
            raise StoreError(f"{path} cannot be written: {error}; free space or choose another --out") from error
        raise


def publish(root: Path, path: Path) -> None:
    """Rename a built store to its place.

    Raises:
        StoreError: `path` exists by now.
    """
    if path.exists():
        raise StoreError(f"{path} appeared while it was being made; choose another --out")
    os.rename(root, path)
    sync_folder(path.parent)


def take_lock(root: Path, path: Path) -> FileLock:
    """Take the exclusive lock of a store; it ends with its release or with the process.

    Args:
        root: the folder to lock; while a store is being built, not yet its final place.
        path: the store's final place, for the error.

    Raises:
        StoreError: another process has the lock, or the folder cannot be locked.
    """
    # One lock for all threads of the process, so that any of them can release it.
    lock = FileLock(root / LOCK_NAME, mode=0o644, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise StoreError(f"{path} is being written by another process; wait for it or choose another --out") from None
    except (OSError, NotImplementedError) as error:
        raise StoreError(f"{path} cannot be locked: {error}; use a file system with locks") from error
    return lock


def sync_tree(root: Path) -> None:
    """Make sure that a whole folder is on the disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))
