"""Publish a release: one commit and a tag on the Hub, or a folder that appears complete or not at all.

The Hub's client uploads files and creates the commit and the tag. This module adds two guarantees. A commit counts only after
every file has been found in it with the right digest, whoever pushed it and whatever answer the client got. A version that
exists with other content is never overwritten.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvfit.bundle import manifest
from kvfit.bundle.bundle import Bundle
from kvfit.bundle.files import require_writable, sync_file, whole_folder, write_file
from kvfit.bundle.records import one_line
from kvfit.errors import BundleError, MismatchError, RefError
from kvfit.hub.load import explain
from kvfit.hub.refs import next_version, published_versions
from kvfit.hub.release import Release, ReleaseFile

Status = Literal["pushed", "unchanged", "proposed", "checked"]


@dataclass(frozen=True)
class Published:
    """The outcome for a release. The fields are those of `kvfit.hub.push.PushResult`, and `tags` has all versions there."""

    status: Status
    tag: str | None
    commit: str | None
    url: str
    tags: tuple[str, ...]
    changed: tuple[str, ...]


def publish_to_folder(release: Release, home: Path, tag: str | None, dry_run: bool) -> Published:
    """Publish a release to a folder, as a version in a subfolder of that name.

    Args:
        release: the release.
        home: the folder of versions; created if it does not exist.
        tag: the version; by default the last one if it is the same release, else the next.
        dry_run: change nothing.

    Raises:
        MismatchError: the folder holds something else, or the version with other content.
        BundleError: the copy went wrong.
    """
    if (home / "mapper.json").exists() or (home.exists() and not home.is_dir()):
        raise MismatchError(f"push: {home} is itself a bundle or a file, needed a folder that holds one subfolder per version")
    tags = published_versions(home) if home.is_dir() else []
    if tag is None:
        last = tags[-1] if tags else None
        tag = last if last is not None and _holds(home / last, release) else next_version(tags)
    changed: tuple[str, ...] = ()
    if not os.path.lexists(home / tag):
        changed = tuple(file.name for file in release.files)
        require_writable(home / tag)
        if not dry_run:
            _copy(release, home / tag)
    if os.path.lexists(home / tag) and not _holds(home / tag, release):
        raise MismatchError(
            f"push: version {tag} exists in {home} with other content, and versions never change;"
            f" use --tag {next_version(tags)}"
        )
    status: Status = "checked" if dry_run else "pushed" if changed else "unchanged"
    return Published(status, tag, None, str(home / tag), (*tags, tag), changed)


def _copy(release: Release, destination: Path) -> None:
    try:
        with whole_folder(destination) as scratch:
            for file in release.files:
                if isinstance(file.content, bytes):
                    write_file(scratch / file.name, file.content)
                else:
                    shutil.copyfile(file.content, scratch / file.name)
                    sync_file(scratch / file.name)
            Bundle.open(scratch)  # checks the digests of the copies
    except BundleError:
        if not os.path.lexists(destination):
            raise
        # Somebody else has created the version meanwhile. The caller checks whether it is the same.


def _holds(folder: Path, release: Release) -> bool:
    return dict(Bundle.open(folder).digests) == release.digests


class HubRepository:
    """One repository of the Hub. Every error names it."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi

        self.name = name
        self.api = HfApi(library_name="kvfit")

    def publish(self, release: Release, tag: str | None, private: bool, create_pr: bool, dry_run: bool) -> Published:
        """Publish a release to the repository: one commit, and the tag after the commit was verified.

        Raises:
            BundleError: the Hub refuses the card, or the files that arrived are not those that were sent.
            MismatchError: the version exists with other content, or somebody else pushed meanwhile.
            RefError: the repository cannot be reached or written; says why.
        """
        self._require_connection()
        self._validate_card(release)
        head = self._head()
        if head is None:
            if dry_run:
                self._require_login()
                return self._published("checked", tag, None, [tag] if tag else [], [file.name for file in release.files])
            with self._explained():
                self.api.create_repo(self.name, private=private, exist_ok=True)
            head = self._head()
            if head is None:
                raise RefError(f"{self.name}: found no commit in the repository that was just created, needed one: try again")
        tags = self._tags()
        if tag in tags:
            self._require_same(release, str(tag), tags)
            return self._published("checked" if dry_run else "unchanged", tag, tags[str(tag)], list(tags), [])
        changed = self._difference(release, head)
        names, versions = sorted(changed), [*tags, *([tag] if tag else [])]
        if dry_run:
            if changed or tag is not None:
                self._require_login()
            return self._published("checked", tag, head, versions, names)
        if create_pr and changed:
            commit, url = self._commit(release, changed, head, create_pr=True)
            return self._published("proposed", None, commit, list(tags), names, url)
        commit = self._commit(release, changed, head)[0] if changed else head
        missing = sorted(self._difference(release, commit))
        if missing:
            raise BundleError(f"{self.name}, commit {commit[:12]}: file {missing[0]} did not arrive as it was sent; push again")
        tagged = tag is not None and self._tag(release, tag, commit)
        return self._published("pushed" if changed or tagged else "unchanged", tag, commit, versions, names)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the client into ours."""
        try:
            yield
        except Exception as error:
            raise explain(error, self.name) from error

    def _require_connection(self) -> None:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise RefError(
                f"{self.name}: found offline mode (HF_HUB_OFFLINE), needed a connection to push to the Hub: unset it, or "
                f"push to a folder: ./{self.name}"
            )

    def _require_login(self) -> None:
        from huggingface_hub import get_token

        if get_token() is None:
            raise RefError(f"{self.name}: missing, or private, and you are not logged in; needed `hf auth login` or HF_TOKEN")

    def _validate_card(self, release: Release) -> None:
        from huggingface_hub import ModelCard

        with self._explained():
            try:
                ModelCard(release.card).validate(repo_type="model")
            except ValueError as error:
                raise BundleError(
                    f"card of {release.bundle.folder}: the Hub refuses its metadata ({one_line(error)}); correct README.md"
                ) from None

    def _head(self) -> str | None:
        """The commit of the main branch; None if there is no repository."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._explained():
            try:
                sha = self.api.repo_info(self.name).sha
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None
        if sha is None:
            raise RefError(f"{self.name}: the Hub names no commit; try again")
        return str(sha)

    def _tags(self) -> dict[str, str]:
        """Commits by tag."""
        with self._explained():
            return {ref.name: ref.target_commit for ref in self.api.list_repo_refs(self.name).tags}

    def _difference(self, release: Release, revision: str) -> dict[str, ReleaseFile | None]:
        """The files to add or replace in a revision, and None for those to remove, by name."""
        from huggingface_hub.hf_api import RepoFile

        with self._explained():
            entries = list(self.api.list_repo_tree(self.name, recursive=True, revision=revision))
        tree = {entry.path: entry for entry in entries if isinstance(entry, RepoFile) and not entry.path.startswith(".")}
        foreign = sorted(name for name in tree if not _is_of_bundle(name))
        if foreign:
            raise MismatchError(
                f"{self.name}: found {foreign[0]}, which does not belong to a bundle, needed a repository of bundles only: "
                "push to another one"
            )
        names = {file.name for file in release.files}
        return {file.name: file for file in release.files if not _same(file, tree.get(file.name))} | dict.fromkeys(
            tree.keys() - names
        )

    def _require_same(self, release: Release, tag: str, tags: dict[str, str]) -> None:
        if self._difference(release, tag):
            raise MismatchError(
                f"{self.name}: version {tag} exists with other content, and versions never change;"
                f" use --tag {next_version(list(tags))}"
            )

    def _commit(
        self, release: Release, changed: dict[str, ReleaseFile | None], head: str, *, create_pr: bool = False
    ) -> tuple[str, str]:
        """Make a commit; returns its hash and address. After an error, look whether the files have arrived anyway."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations = [
            CommitOperationDelete(name) if file is None else CommitOperationAdd(name, file.content)
            for name, file in changed.items()
        ]
        spec = release.bundle.spec
        try:
            info = self.api.create_commit(
                self.name,
                operations,
                commit_message=f"Mapper {spec.source.ref} to {spec.target.ref}",
                commit_description=f"Weights {release.bundle.weights_digest}",
                parent_commit=head,
                create_pr=create_pr,
            )
            return info.oid, info.pr_url or info.commit_url
        except Exception as error:
            # The commit may exist although the answer got lost, and another push of the same bundle may have been faster.
            landed = None if create_pr else self._head()
            if landed is None or landed == head:
                raise explain(error, self.name) from error
            if self._difference(release, landed):
                raise MismatchError(
                    f"{self.name}: somebody else pushed commit {landed[:12]} meanwhile; look at it, then push again"
                ) from error
            return landed, f"{self.api.endpoint}/{self.name}/commit/{landed}"

    def _tag(self, release: Release, tag: str, commit: str) -> bool:
        """Make a tag; False if somebody else has made the same one meanwhile."""
        try:
            self.api.create_tag(self.name, tag=tag, revision=commit)
            return True
        except Exception as error:
            tags = self._tags()
            if tag not in tags:
                raise explain(error, self.name) from error
            self._require_same(release, tag, tags)
            return False

    def _published(
        self, status: Status, tag: str | None, commit: str | None, tags: list[str], changed: list[str], url: str | None = None
    ) -> Published:
        address = url or f"{self.api.endpoint}/{self.name}" + (f"/tree/{tag}" if tag else "")
        return Published(status, tag, commit, address, tuple(tags), tuple(changed))


def _same(file: ReleaseFile, found: Any) -> bool:
    """Whether a file of the Hub has the same content: by SHA-256 for large files, by the git hash for others."""
    from huggingface_hub.utils.sha import git_hash

    if found is None or found.size != file.size:
        return False
    if found.lfs is not None:
        return bool(found.lfs.sha256 == file.sha256)
    return bool(found.blob_id == git_hash(file.content if isinstance(file.content, bytes) else file.content.read_bytes()))


def _is_of_bundle(name: str) -> bool:
    return name == manifest.MANIFEST or name in manifest.REQUIRED or manifest.is_meaning(name) or manifest.is_extra(name)
