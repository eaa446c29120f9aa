"""Read documents from local files: `.jsonl`, `.json`, `.parquet` and `.txt`, plain or compressed (`.gz`, `.zst`, ...).

The files are not read through `datasets`, because it treats brackets in a name as a pattern, infers types for all columns
although only one is needed, and skips some files of a folder silently.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvfit.errors import TextError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
# Files of a dataset that hold no documents. Hidden files are left out as well.
NO_TEXT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "readme.md", "license", "thumbs.db")
BYTE_ORDER_MARK = "\ufeff"

Row = dict[str, Any]


class LocalRows:
    """The rows of a file, or of all files of a folder in the order of their names. They can be iterated repeatedly."""

    def __init__(self, path: Path, column: str, start: int = 0) -> None:
        """Find the files.

        Args:
            path: a file, or a folder of files of one format at any depth.
            column: the column with the text; other columns are not read if the format allows it.
            start: number of rows to skip.

        Raises:
            TextError: a file has an unknown format, there are files of several formats, or there are none.
        """
        self._path, self._column, self._start = path, column, start
        self._files = _files(path)
        self.file: Path | None = None  # the one that is being read, for error messages
        formats = {name.__name__.removeprefix("_"): name for name in map(_reader, self._files) if name is not None}
        unknown = [file for file in self._files if _reader(file) is None]
        if unknown or len(formats) != 1:
            found = ", ".join(sorted({"".join(file.suffixes) or file.name for file in (unknown or self._files)}))
            where = f" (first {unknown[0].name})" if unknown and path.is_dir() else ""
            raise TextError(
                f"{path}: found {found or 'nothing to read'}{where}, needed files of one kind: {', '.join(_READERS)}, "
                f"also compressed ({', '.join(COMPRESSIONS)})"
            )

    def skip(self, count: int) -> LocalRows:
        """The rows without the first `count`."""
        return LocalRows(self._path, self._column, count)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for file in self._files:
            reader = _reader(file)
            assert reader is not None
            self.file = file
            for row in reader(file, self._column):
                if number >= self._start:
                    yield row
                number += 1


def content_digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and the content of all files of a folder that may hold documents."""
    found = hashlib.sha256()
    for file in _files(path):
        found.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode("utf-8", "surrogateescape"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def _files(path: Path) -> list[Path]:
    """All files that may hold documents: `path` itself, or the files below it."""
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        kept = (name for name in names if not name.startswith(".") and name.lower() not in NO_TEXT)
        found += [Path(folder, name) for name in kept]
        if len(Path(folder).relative_to(path).parts) > 32:
            raise TextError(f"{path}: found folders more than 32 deep, needed fewer: a link may point to a folder above itself")
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _reader(file: Path) -> Callable[[Path, str], Iterator[Row]] | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return _READERS.get(suffixes[-1]) if suffixes else None


def _stream(file: Path) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file), compression=COMPRESSIONS.get(file.suffix.lower())))


def _json(file: Path, column: str) -> Iterator[Row]:
    """One JSON object per line, or one list of objects if the file begins with a bracket."""
    del column  # JSON cannot be read in part
    with _stream(file) as stream:
        start = stream.peek(1).lstrip(BYTE_ORDER_MARK.encode())
        if start.lstrip()[:1] == b"[":
            yield from map(_row, json.loads(stream.read().decode("utf-8-sig")))
            return
        for number, line in enumerate(stream):
            text = line.decode("utf-8-sig" if number == 0 else "utf-8")
            if text.strip():
                yield _row(json.loads(text))


def _row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"a line holds {type(value).__name__}, not an object")
    return value


def _parquet(file: Path, column: str) -> Iterator[Row]:
    import pyarrow.parquet

    with _stream(file) as stream:
        # Parquet is read from its end, so a compressed file has to be unpacked first.
        table = pyarrow.parquet.ParquetFile(io.BytesIO(stream.read()) if file.suffix.lower() in COMPRESSIONS else str(file))
    names = table.schema_arrow.names
    if column not in names:
        yield from [dict.fromkeys(names)] * min(table.metadata.num_rows, 1)
        return
    for batch in table.iter_batches(columns=[column]):
        for text in batch.column(0).to_pylist():
            yield {column: text}


def _text(file: Path, column: str) -> Iterator[Row]:
    """One document: the whole file."""
    with _stream(file) as stream:
        yield {column: stream.read().decode("utf-8-sig")}


_READERS = {".jsonl": _json, ".json": _json, ".parquet": _parquet, ".txt": _text}
