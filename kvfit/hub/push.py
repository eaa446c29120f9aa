"""The verb `push`: publish a bundle to the Hub or to a folder, completely or not at all.

Everything is validated before anything is sent. Then follows one commit and, after every file was found in it with its digest,
the tag. A version is never overwritten. Pushing the same bundle again changes nothing and succeeds.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvfit.bundle.files import require_writable, write_file
from kvfit.errors import GateError, MismatchError, OptionError, RefError
from kvfit.hub.publish import HubRepository, Status, publish_to_folder
from kvfit.hub.refs import is_path, is_repository, is_tag, is_version, next_version, version_key
from kvfit.hub.registry import MapperEntry, entry_file, make_entry, read_entry, render_entry
from kvfit.hub.release import Release

_log = logging.getLogger("kvfit")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*", re.ASCII)


@dataclass(frozen=True)
class PushResult:
    """What `push` did.

    Attributes:
        to: the repository or the folder.
        status: ``pushed``; ``unchanged`` if everything was already there; ``proposed`` if a pull request was opened;
            ``checked`` after a dry run.
        tag: the version; None if none was requested.
        commit: the commit that holds it; None for a folder.
        url: address of the result.
        next_version: the tag that the next version would get.
        weights_digest: digest of the bundle's spec and weights.
        files: number of files of the bundle.
        nbytes: size of these files in bytes.
        changed: names of the files that were, or in a dry run would be, added, replaced or removed.
        registry: the registry file that was written; None if there is none, or if it keeps a newer version.
    """

    to: str
    status: Status
    tag: str | None
    commit: str | None
    url: str
    next_version: str
    weights_digest: str
    files: int
    nbytes: int
    changed: tuple[str, ...]
    registry: str | None = None

    def __str__(self) -> str:
        place = f"{self.to}@{self.tag}" if self.tag else self.to
        size = f"{self.files} files, {self.nbytes / 1e6:.1f} MB"
        text = {
            "pushed": f"pushed {place} ({size})",
            "unchanged": f"{place} already holds this bundle ({size})",
            "proposed": f"opened {self.url} ({size})",
            "checked": f"{place} would change {len(self.changed)} of {size}",
        }[self.status]
        return text if self.tag else f"{text}; no version was made, the next is --tag {self.next_version}"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self) | {"changed": list(self.changed)}


def push(
    folder: str | Path,
    to: str | Path,
    *,
    tag: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    dry_run: bool = False,
    registry: str | Path | None = None,
    license: str | None = None,
    require: Literal["pass", "any"] = "pass",
) -> PushResult:
    """Publish a bundle.

    Args:
        folder: the bundle; it is not changed.
        to: ``org/name`` on the Hub, or a folder (``./name``, ``/name``) that gets a subfolder per version; created if
            necessary.
        tag: the version, such as ``v1``. Without one, a repository gets a commit only, and a folder gets the next version.
        private: make a new repository private.
        create_pr: open a pull request instead of committing.
        dry_run: check everything and change nothing.
        registry: folder to write the registry entry to, created if necessary: the one in a checkout of kvfit, to propose the
            entry, or your own, for ``load_mapper(registry=...)``. An entry of a newer version is kept.
        license: licence id for the card, such as ``apache-2.0``.
        require: ``any`` publishes a bundle whose evaluation failed.

    Raises:
        BundleError: the bundle or its card is not fit to be published, or the files that arrived are not those that were sent.
        GateError: the evaluation failed and `require` is ``pass``.
        OptionError: an option has a wrong value, or two options exclude each other.
        MismatchError: the version exists with other content, somebody else pushed meanwhile, or the destination holds something
            else.
        RefError: the repository cannot be reached or written; says why.
    """
    name = str(to)
    local = isinstance(to, Path) or is_path(name) or (name != "" and Path(name).is_dir() and not is_repository(name))
    if not local and not is_repository(name):
        raise RefError(f"push: found --to {name!r}, needed org/name or a folder such as ./name")
    if tag is not None and not is_tag(tag):
        raise OptionError(f"--tag: found {tag!r}, needed letters, digits, '.', '_' and '-', such as v1")
    if create_pr and (tag is not None or registry is not None or local):
        raise OptionError(
            "push: found --create-pr with a tag, a registry or a folder, needed none of them: a pull request gets its"
            " version once it is merged"
        )
    if registry is not None and tag is None and not local:
        raise OptionError(
            "push: found --registry without a tag, but a registry entry needs a version; add --tag v1 or the next one"
        )
    if license is not None and _LICENSE.fullmatch(license) is None:
        raise OptionError(f"--license: found {license!r}, needed an id of the Hub's list such as apache-2.0, or other")
    place = Path(os.path.abspath(Path(name).expanduser())) if local else None
    home = _registry_home(registry, place)
    release = Release.of(folder, ref=None if local else name, license=license)
    if release.bundle.verdict == "fail" and require == "pass":
        raise GateError(f"bundle {folder}: its evaluation failed; improve it, or publish it anyway with --any (require='any')")
    entry = None if home is None else _entry(release, name, place, home)
    if local:
        published = publish_to_folder(release, Path(name).expanduser(), tag, dry_run)
    else:
        published = HubRepository(name).publish(release, tag, private, create_pr, dry_run)
    result = PushResult(
        to=name,
        status=published.status,
        tag=published.tag,
        commit=published.commit,
        url=published.url,
        next_version=next_version(list(published.tags)),
        weights_digest=release.bundle.weights_digest,
        files=len(release.files),
        nbytes=release.nbytes,
        changed=published.changed,
    )
    if entry is None or dry_run:
        return result
    return replace(result, registry=_register(replace(entry, revision=str(result.tag), commit=result.commit), published.status))


def _registry_home(registry: str | Path | None, folder: Path | None) -> Path | None:
    if registry is None:
        return None
    home = Path(registry)
    if home.exists() and not home.is_dir():
        raise RefError(f"registry {home}: found a file, needed a folder or a new name")
    require_writable(home / "entry.toml")
    if folder is not None and os.path.realpath(folder.parent) != os.path.realpath(home):
        raise MismatchError(f"push: found --to {folder}, needed a folder inside the registry {home}, or a repository")
    if folder is not None and not is_tag(folder.name):
        raise MismatchError(
            f"push: found --to {folder}, needed a folder whose name has only letters, digits, '.', '_' and '-', as the"
            " registry's names do: rename it, or leave --registry out"
        )
    return home


def _entry(release: Release, name: str, folder: Path | None, home: Path) -> MapperEntry:
    """The entry, made before anything is published so that a wrong one stops the push. Its version and commit follow later."""
    where = {"folder": folder.name} if folder is not None else {"repo": name, "commit": "0" * 40}
    entry = replace(make_entry(release.bundle, revision="v1", license=release.license, **where), home=home)
    path = home / entry_file(entry)
    if os.path.lexists(path) and not path.is_file():
        raise RefError(f"registry {home}: found {path.name}, which is not a file, needed the entry of {name} or nothing there")
    return entry


def _register(entry: MapperEntry, status: Status) -> str | None:
    """Write the entry unless the registry has one of a newer version; returns its file."""
    path = entry.home / entry_file(entry)
    try:
        held = read_entry(path).revision
    except RefError:  # there is none, or none that anybody can read
        held = entry.revision
    # Numbers have an order. A version with another name is the newest when it is made.
    numbered = is_version(held) and is_version(entry.revision)
    older = version_key(entry.revision) < version_key(held) if numbered else status == "unchanged"
    if older and held != entry.revision:
        _log.warning(
            "registry file %s: found %s, which is newer than %s, and kept it; to go back, delete the file and push again",
            path,
            held,
            entry.revision,
        )
        return None
    entry.home.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    write_file(unfinished, render_entry(entry).encode("utf-8"))
    os.replace(unfinished, path)
    return str(path)
