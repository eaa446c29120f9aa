"""``SHA256SUMS``, the manifest: the files that a bundle has, and their digests."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvfit.bundle import records
from kvfit.errors import BundleError

MANIFEST = "SHA256SUMS"
MAX_MANIFEST = 1 << 20
# The maximal size of each record in bytes. A recipe lists the digests of all documents; the others are far below a MiB.
MAX_RECORD = {"mapper.json": 4 << 20, "recipe.json": 32 << 20, "solve.json": 8 << 20, "evaluation.json": 8 << 20}
HASH_THREADS = 8  # a thread hashes about 1 GB/s, and disks read a few GB/s
REQUIRED = ("mapper.json", "recipe.json", "solve.json")
SHARD = re.compile(r"mapper-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
EXTRA = re.compile(
    r"evaluation\.(json|md|html)|fit\.yaml|README\.md|LICENSE|(?=.{1,128}\Z)[A-Za-z0-9][A-Za-z0-9._-]*\.(png|svg)", re.ASCII
)
_LINE = re.compile(r"([0-9a-f]{64})  (.+)", re.ASCII)


def is_extra(name: str) -> bool:
    """Whether a file of this name may be added to a finished bundle."""
    return EXTRA.fullmatch(name) is not None


def is_meaning(name: str) -> bool:
    """Whether a file of this name determines what the mapper computes."""
    return name == "mapper.json" or SHARD.fullmatch(name) is not None


def render(digests: Mapping[str, str]) -> bytes:
    """The content of ``SHA256SUMS`` for digests by name."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def weights_digest(digests: Mapping[str, str]) -> str:
    """Digest of the spec and all weights, from the digests of the files. A verdict is bound to it."""
    lines = render({name: digest for name, digest in digests.items() if is_meaning(name)})
    return "sha256:" + hashlib.sha256(lines).hexdigest()


def entries(data: bytes) -> list[tuple[int, str, str]]:
    """(line number, digest, name) of every line.

    Raises:
        BundleError: a line is malformed, or a name is listed twice.
    """
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise BundleError(f"file {MANIFEST}: needed ASCII text") from None
    if len(data) > MAX_MANIFEST or lines.pop() != "":
        raise BundleError(f"file {MANIFEST}: {len(data)} bytes, needed at most {MAX_MANIFEST} that end with a line feed")
    found: list[tuple[int, str, str]] = []
    names: set[str] = set()
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise BundleError(
                f"file {MANIFEST}, line {number}: found {line[:100]!r}, needed 64 hexadecimal digits, two spaces, a name"
            )
        digest, name = match.groups()
        if name in names:
            raise BundleError(f"file {MANIFEST}, line {number}: {name[:100]} is listed twice")
        names.add(name)
        found.append((number, digest, name))
    return found


def parse(data: bytes) -> dict[str, str]:
    """Digests by name.

    Raises:
        BundleError: a line is malformed, a name is not allowed or listed twice, or a required file is not listed.
    """
    digests: dict[str, str] = {}
    for number, digest, name in entries(data):
        if not (name in REQUIRED or is_meaning(name) or is_extra(name)):
            raise BundleError(f"file {MANIFEST}, line {number}: the name {name[:100]!r} is not allowed in a bundle")
        digests[name] = digest
    for name in REQUIRED:
        if name not in digests:
            raise BundleError(f"file {MANIFEST}: {name} is not listed; the bundle is incomplete")
    _check_numbers(digests)
    return digests


def read(folder: Path) -> dict[str, str]:
    """The digests that a bundle lists, by name.

    Raises:
        BundleError: ``SHA256SUMS`` is missing or violates the format.
    """
    return parse(read_small(folder, MANIFEST, MAX_MANIFEST))


def read_record(folder: Path, name: str, digests: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A JSON record of a bundle.

    Args:
        folder: the bundle.
        name: name of the file.
        digests: digests to compare the file's digest with; None not to.

    Raises:
        BundleError: the file is missing or too large, has another digest, or is not a strict JSON object; names it.
    """
    data = read_small(folder, name, MAX_RECORD[name])
    if digests is not None:
        check_digest(folder / name, hashlib.sha256(data).hexdigest(), digests)
    return parse_record(name, data)


def parse_record(name: str, data: bytes) -> dict[str, Any]:
    """A JSON record from its text.

    Raises:
        BundleError: the text is not a strict JSON object; names the file.
    """
    try:
        value = records.parse_json(data)
    except ValueError as error:
        raise BundleError(f"file {name}: not strict JSON ({records.one_line(error)})") from None
    if not isinstance(value, dict):
        raise BundleError(f"file {name}: found a {type(value).__name__}, needed an object")
    return value


def dump_record(name: str, value: dict[str, Any]) -> bytes:
    """The text of a JSON record.

    Raises:
        BundleError: strict JSON has no such value, or a reader would refuse the size; names the file.
    """
    try:
        data = records.dump_json(value)
        records.parse_json(data)  # refuse to write what could not be read
    except ValueError as error:
        raise BundleError(f"file {name}: cannot be written as strict JSON ({records.one_line(error)})") from None
    if len(data) > MAX_RECORD.get(name, len(data)):
        raise BundleError(f"file {name}: {len(data)} bytes, needed at most {MAX_RECORD[name]}")
    return data


def shard_names(digests: Mapping[str, str]) -> list[str]:
    """The weight files, in order."""
    return sorted(name for name in digests if SHARD.fullmatch(name))


def check_folder(folder: Path, digests: Mapping[str, str]) -> None:
    """Check that a folder holds exactly the listed files, and that each is a regular file.

    Raises:
        BundleError: a file is not listed or missing, or is a link, a folder or a device; names the first.
    """
    present = {entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")}
    for name in sorted(present - set(digests) - {MANIFEST}):
        raise BundleError(f"file {name[:100]!r}: not listed in {MANIFEST}; remove it, or fetch the bundle again")
    for name in sorted(set(digests) - present):
        raise BundleError(f"file {name}: listed in {MANIFEST} but missing; fetch the bundle again")
    for name in sorted(present):
        check_regular(folder, name)


def check_regular(folder: Path, name: str) -> None:
    """Refuse everything except a regular file, or a link from a snapshot of the Hub's cache to one of the cache's blobs."""
    path = folder / name
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            target = Path(os.path.realpath(path))
            if not _is_blob(target, Path(os.path.realpath(folder))):
                raise BundleError(f"file {name}: a symbolic link to {str(target)[:200]!r}, needed a regular file")
            mode = target.lstat().st_mode
    except FileNotFoundError:
        raise BundleError(f"file {name}: missing in {folder}, so this is not a bundle or an incomplete one") from None
    except OSError as error:
        raise BundleError(f"file {name}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        raise BundleError(f"file {name}: neither a regular file nor a link to one")


def _is_blob(target: Path, folder: Path) -> bool:
    """Whether a file is where the Hub's client stores the content of the snapshot CACHE/models--A--B/snapshots/COMMIT."""
    repository = folder.parent.parent
    own = target.parent == repository / "blobs"
    shared = target.parent.parent == repository.parent / "blobs"  # the client's store of content that repositories share
    return folder.parent.name == "snapshots" and (own or shared)


def read_small(folder: Path, name: str, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        BundleError: the file is missing, not a regular file, or larger.
    """
    check_regular(folder, name)
    with open(folder / name, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise BundleError(f"file {name}: more than {limit} bytes")
    return data


def check_digest(path: Path, found: str, digests: Mapping[str, str]) -> None:
    """Refuse a file whose digest differs from the listed one.

    Raises:
        BundleError: the digests differ; names the file.
    """
    listed = digests[path.name]
    if found != listed:
        raise BundleError(
            f"file {path.name}: digest {found[:12]}, {MANIFEST} says {listed[:12]}; altered or torn, {how_to_renew(path)}"
        )


def check_digests(folder: Path, names: Iterable[str], digests: Mapping[str, str]) -> None:
    """Compute the digests of several files at once, and compare them with the listed ones.

    Raises:
        BundleError: a digest differs; names the first file in the order of `names`.
    """
    paths = [folder / name for name in names]
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashing releases the GIL
        for path, found in zip(paths, pool.map(file_digest, paths), strict=True):
            check_digest(path, found, digests)


def how_to_renew(path: Path) -> str:
    """Advice for a damaged file. One in the Hub's cache has to be deleted, because the client would use it again."""
    return f"delete {os.path.realpath(path)} and load it again" if path.is_symlink() else "fetch the bundle again"


def stamp(path: Path) -> tuple[int, int, int]:
    """Size, modification time and inode of a file, one of which changes if somebody writes to it or replaces it."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _check_numbers(digests: Mapping[str, str]) -> None:
    names = shard_names(digests)
    expected = [f"mapper-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    if not names or names != expected:
        found = ", ".join(names[:3]) or "none"
        raise BundleError(
            f"file {MANIFEST}: weight files {found}, needed mapper-00001-of-0000N to mapper-0000N-of-0000N, all of them"
        )
