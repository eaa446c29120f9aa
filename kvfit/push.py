"""The verb `push`: publish a bundle to the Hub or to a folder, whole or not at all.

Everything is validated first; then one commit; then, once every file is seen there with its digest, the tag. A version
is never overwritten, and pushing the same bundle again changes nothing and succeeds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvfit.bundle import Bundle
from kvfit.errors import BundleError, GateError, MismatchError, RefError
from kvfit.folders import whole_folder, write_file
from kvfit.hub import explain
from kvfit.refs import is_path, is_repository, is_tag, next_version, published_versions
from kvfit.registry import entry_file, make_entry, render_entry
from kvfit.release import Release, ReleaseFile

T = TypeVar("T")


@dataclass(frozen=True)
class PushResult:
    """What `push` did.

    Attributes:
        to: the repository or the folder.
        status: ``pushed``; ``unchanged``: all of it was there already; ``proposed``: a pull request was opened; ``checked``: a dry
            run.
        tag: the version, None where none was asked for.
        commit: the commit that holds it, None for a folder.
        url: where to look at it.
        next_version: the tag that the next version would get.
        weights_digest: of the bundle.
        files: how many files the bundle has.
        nbytes: their bytes.
        changed: names of the files that were, or in a dry run would be, added, replaced or removed.
        registry: the registry file that was written.
    """

    to: str
    status: Literal["pushed", "unchanged", "proposed", "checked"]
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
        at = f"{self.to}@{self.tag}" if self.tag else self.to
        size = f"{self.files} files, {self.nbytes / 1e6:.1f} MB"
        text = {
            "pushed": f"pushed {at} ({size})",
            "unchanged": f"{at} already holds this bundle ({size})",
            "proposed": f"opened {self.url} ({size})",
            "checked": f"{at} would change {len(self.changed)} of {size}",
        }[self.status]
        return text if self.tag else f"{text}; no version was made, the next is --tag {self.next_version}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
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
        to: ``org/name`` on the Hub, made if it is not there; or a folder (``./name``, ``/name``), where each version gets a subfolder.
        tag: the version, such as ``v1``. Without one, a repository gets a commit only, and a folder gets the next version.
        private: make a new repository private.
        create_pr: open a pull request instead of committing.
        dry_run: check everything and change nothing.
        registry: the folder to write the registry's entry to, to be proposed.
        license: licence id for the card, such as ``apache-2.0``.
        require: ``any`` publishes a bundle whose evaluation failed.

    Raises:
        BundleError: the bundle or its card is not fit to be published, or what arrived is not what was sent.
        GateError: the evaluation failed and `require` is ``pass``.
        MismatchError: the version exists with other content, somebody else pushed meanwhile, or the place holds something else.
        RefError: the repository cannot be reached or written; says why.
    """
    name = str(to)
    local = isinstance(to, Path) or is_path(name) or (Path(name).is_dir() and not is_repository(name))
    if not local and not is_repository(name):
        raise RefError(f"push: found --to {name!r}, needed org/name or a folder such as ./name")
    if tag is not None and not is_tag(tag):
        raise MismatchError(f"push: found tag {tag!r}, needed letters, digits, '.', '_' and '-', such as v1")
    if create_pr and (tag is not None or registry is not None or local):
        raise MismatchError(
            "push: a pull request is no version yet, needed no tag, registry or folder with --create-pr; tag once merged"
        )
    home = _registry_home(registry, Path(name) if local else None)
    release = Release.of(folder, ref=None if local else name, license=license)
    if release.bundle.verdict == "fail" and require == "pass":
        raise GateError(f"bundle {folder}: its evaluation failed; improve it, or publish it anyway with require='any'")
    if local:
        result = _publish_folder(release, Path(name).expanduser(), tag, dry_run)
    else:
        result = _Repository(name).publish(release, tag, private, create_pr, dry_run)
    if home is None or dry_run:
        return result
    return _register(result, release, home, local)


def _registry_home(registry: str | Path | None, folder: Path | None) -> Path | None:
    if registry is None:
        return None
    home = Path(registry)
    if not home.is_dir():
        raise RefError(f"registry {home}: no such folder")
    if folder is not None and os.path.realpath(folder.parent) != os.path.realpath(home):
        raise MismatchError(f"push: found --to {folder}, needed a folder inside the registry {home}, or a repository")
    return home


def _register(result: PushResult, release: Release, home: Path, local: bool) -> PushResult:
    place = {"folder": Path(result.to).name} if local else {"repo": result.to}
    if result.tag is None:
        raise MismatchError(
            f"push: {result.to} is pushed, but a registry entry needs a version: add --tag {result.next_version}"
        )
    entry = make_entry(release.bundle, revision=result.tag, commit=result.commit, license=release.license, **place)
    path = home / entry_file(entry)
    path.write_text(render_entry(entry), encoding="utf-8")
    return PushResult(**(asdict(result) | {"registry": str(path)}))


# -- a folder --------------------------------------------------------------------------------------------------


def _publish_folder(release: Release, home: Path, tag: str | None, dry_run: bool) -> PushResult:
    if (home / "mapper.json").exists() or (home.exists() and not home.is_dir()):
        raise MismatchError(f"push: {home} is itself a bundle or a file, needed a folder that holds one subfolder per version")
    tags = published_versions(home) if home.is_dir() else []
    if tag is None:
        last = tags[-1] if tags else None
        tag = last if last is not None and _same_folder(release, home / last) else next_version(tags)
    changed: tuple[str, ...] = ()
    if not os.path.lexists(home / tag):
        changed = tuple(file.name for file in release.files)
        if not dry_run:
            _copy(release, home / tag)
    if os.path.lexists(home / tag) and not _same_folder(release, home / tag):
        raise MismatchError(
            f"push: version {tag} exists in {home} with other content, and versions never change; use --tag {next_version(tags)}"
        )
    status: Literal["checked", "pushed", "unchanged"] = "checked" if dry_run else "pushed" if changed else "unchanged"
    return _result(release, str(home), status, tag, None, str(home / tag), [*tags, tag], changed)


def _copy(release: Release, destination: Path) -> None:
    try:
        with whole_folder(destination) as temporary:
            for file in release.files:
                if isinstance(file.content, bytes):
                    write_file(temporary / file.name, file.content)
                else:
                    shutil.copyfile(file.content, temporary / file.name)
                    _sync_file(temporary / file.name)
            Bundle.open(temporary)  # what arrived has its digests
    except BundleError:
        if not os.path.lexists(destination):
            raise
        # Somebody else made the version meanwhile; whether it is the same is looked at next.


def _sync_file(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def _same_folder(release: Release, folder: Path) -> bool:
    return dict(Bundle.open(folder).digests) == release.digests


# -- a repository ----------------------------------------------------------------------------------------------


class _Repository:
    """One repository of the Hub, and what kvfit does with it. Errors name it."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi

        self.name = name
        self.api = HfApi(library_name="kvfit")

    def publish(self, release: Release, tag: str | None, private: bool, create_pr: bool, dry_run: bool) -> PushResult:
        self._validate_card(release)
        head = self._head()
        if head is None:
            if dry_run:
                names = [file.name for file in release.files]
                return self._result(release, "checked", tag, None, [tag] if tag else [], names)
            self._call(lambda: self.api.create_repo(self.name, private=private, exist_ok=True))
            head = self._head()
            if head is None:
                raise RefError(f"{self.name}: made, but not there; try again")
        tags = self._tags()
        if tag in tags:
            self._require_same(release, str(tag), tags)
            return self._result(release, "checked" if dry_run else "unchanged", tag, tags[str(tag)], list(tags), [])
        changed = self._difference(release, head)
        if dry_run:
            return self._result(release, "checked", tag, head, [*tags, *([tag] if tag else [])], sorted(changed))
        if create_pr and changed:
            commit, url = self._commit(release, changed, head, create_pr=True)
            return self._result(release, "proposed", None, commit, list(tags), sorted(changed), url)
        commit = self._commit(release, changed, head)[0] if changed else head
        missing = sorted(self._difference(release, commit))
        if missing:
            raise BundleError(f"{self.name}, commit {commit[:12]}: file {missing[0]} did not arrive as it was sent; push again")
        tagged = tag is not None and self._tag(release, tag, commit)
        status: Literal["pushed", "unchanged"] = "pushed" if changed or tagged else "unchanged"
        return self._result(release, status, tag, commit, [*tags, *([tag] if tag else [])], sorted(changed))

    def _validate_card(self, release: Release) -> None:
        from huggingface_hub import ModelCard

        readme = next(file for file in release.files if file.name == "README.md")
        text = readme.content if isinstance(readme.content, bytes) else readme.content.read_bytes()
        try:
            self._call(lambda: ModelCard(text.decode("utf-8")).validate(repo_type="model"))
        except ValueError as error:
            if isinstance(error, RefError):
                raise
            raise BundleError(
                f"card of {release.bundle.folder}: the Hub refuses its metadata ({_line(error)}); correct README.md"
            ) from None

    def _head(self) -> str | None:
        """The commit of the main branch, None where there is no repository."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            sha = self.api.repo_info(self.name).sha
        except GatedRepoError as error:
            raise explain(error, self.name) from error
        except RepositoryNotFoundError:
            return None
        except Exception as error:
            raise explain(error, self.name) from error
        if sha is None:
            raise RefError(f"{self.name}: the Hub names no commit; try again")
        return sha

    def _tags(self) -> dict[str, str]:
        """Commits by tag."""
        return {ref.name: ref.target_commit for ref in self._call(lambda: self.api.list_repo_refs(self.name)).tags}

    def _tree(self, revision: str) -> dict[str, Any]:
        """The repository's files at a revision, without those whose name begins with a dot."""
        from huggingface_hub.hf_api import RepoFile

        entries = self._call(lambda: list(self.api.list_repo_tree(self.name, recursive=True, revision=revision)))
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile) and not entry.path.startswith(".")}

    def _difference(self, release: Release, revision: str) -> dict[str, ReleaseFile | None]:
        """Files that a revision lacks or has otherwise, and None for those that it has too many."""
        tree = self._tree(revision)
        foreign = sorted(name for name in tree if not _is_of_bundle(name))
        if foreign:
            raise MismatchError(
                f"{self.name}: holds {foreign[0]}, which is no part of a bundle; push to a repository of its own"
            )
        difference: dict[str, ReleaseFile | None] = {
            file.name: file for file in release.files if not _same(file, tree.get(file.name))
        }
        names = {file.name for file in release.files}
        return difference | {name: None for name in tree if name not in names}

    def _require_same(self, release: Release, tag: str, tags: dict[str, str]) -> None:
        if self._difference(release, tag):
            raise MismatchError(
                f"{self.name}: version {tag} exists with other content, and versions never change; use --tag {next_version(list(tags))}"
            )

    def _commit(
        self, release: Release, changed: dict[str, ReleaseFile | None], head: str, *, create_pr: bool = False
    ) -> tuple[str, str]:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations = [
            CommitOperationDelete(name) if file is None else CommitOperationAdd(name, _content(file))
            for name, file in changed.items()
        ]
        spec = release.bundle.spec
        message = f"Mapper {spec.source.ref} to {spec.target.ref}"
        try:
            info = self.api.create_commit(
                self.name,
                operations,
                commit_message=message,
                commit_description=f"Weights {release.bundle.weights_digest}",
                parent_commit=head,
                create_pr=create_pr,
            )
            return info.oid, info.pr_url or info.commit_url
        except Exception as error:
            # The commit may have landed although the answer got lost, and another push of the same bundle may have won.
            landed = None if create_pr else self._head()
            if landed is not None and landed != head:
                if not self._difference(release, landed):
                    return landed, f"{self.api.endpoint}/{self.name}/commit/{landed}"
                raise MismatchError(
                    f"{self.name}: somebody else pushed commit {landed[:12]} meanwhile; look at it, then push again"
                ) from error
            raise explain(error, self.name) from error

    def _tag(self, release: Release, tag: str, commit: str) -> bool:
        """Make a tag; False where somebody else made the same one meanwhile."""
        try:
            self.api.create_tag(self.name, tag=tag, revision=commit)
            return True
        except Exception as error:
            tags = self._tags()
            if tag not in tags:
                raise explain(error, self.name) from error
            self._require_same(release, tag, tags)
            return False

    def _result(
        self,
        release: Release,
        status: Literal["pushed", "unchanged", "proposed", "checked"],
        tag: str | None,
        commit: str | None,
        tags: list[str],
        changed: list[str],
        url: str | None = None,
    ) -> PushResult:
        address = url or f"{self.api.endpoint}/{self.name}" + (f"/tree/{tag}" if tag else "")
        return _result(release, self.name, status, tag, commit, address, tags, tuple(changed))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except ValueError:
            raise
        except Exception as error:
            raise explain(error, self.name) from error


def _result(
    release: Release,
    to: str,
    status: Literal["pushed", "unchanged", "proposed", "checked"],
    tag: str | None,
    commit: str | None,
    url: str,
    tags: list[str],
    changed: tuple[str, ...],
) -> PushResult:
    return PushResult(
        to=to,
        status=status,
        tag=tag,
        commit=commit,
        url=url,
        next_version=next_version(tags),
        weights_digest=release.bundle.weights_digest,
        files=len(release.files),
        nbytes=release.nbytes,
        changed=changed,
    )


def _same(file: ReleaseFile, found: Any) -> bool:
    if found is None or found.size != file.size:
        return False
    if found.lfs is not None:
        return bool(found.lfs.sha256 == file.sha256)
    return bool(found.blob_id == file.git_id())


def _content(file: ReleaseFile) -> bytes | str:
    return file.content if isinstance(file.content, bytes) else str(file.content)


def _is_of_bundle(name: str) -> bool:
    from kvfit import manifest

    return name == manifest.MANIFEST or name in manifest.REQUIRED or manifest.is_meaning(name) or manifest.is_extra(name)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
