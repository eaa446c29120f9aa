"""A repository of the Hub that holds a mapper, and how a release gets into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvfit.bundle import manifest
from kvfit.errors import BundleError, MismatchError, RefError
from kvfit.hub.load import explain
from kvfit.hub.refs import next_version
from kvfit.hub.release import Published, Release, ReleaseFile, Status

T = TypeVar("T")


class Repository:
    """One repository of the Hub, and what kvfit does with it. Errors name it."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi

        self.name = name
        self.api = HfApi(library_name="kvfit")

    def publish(self, release: Release, tag: str | None, private: bool, create_pr: bool, dry_run: bool) -> Published:
        """Make the repository hold the release: one commit, seen to have arrived, then the tag.

        Raises:
            BundleError: the Hub refuses the card, or what arrived is not what was sent.
            MismatchError: the version exists with other content, or somebody else pushed meanwhile.
            RefError: the repository cannot be reached or written; says why.
        """
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise RefError(
                f"{self.name}: found offline mode (HF_HUB_OFFLINE), needed a connection to push to the Hub: unset it, or "
                f"push to a folder: ./{self.name}"
            )
        self._validate_card(release)
        head = self._head()
        if head is None:
            if dry_run:
                if get_token() is None:
                    raise RefError(
                        f"{self.name}: missing, or private, and you are not logged in; needed `hf auth login` or HF_TOKEN"
                    )
                names = [file.name for file in release.files]
                return self._published("checked", tag, None, [tag] if tag else [], names)
            self._call(lambda: self.api.create_repo(self.name, private=private, exist_ok=True))
            head = self._head()
            if head is None:
                raise RefError(f"{self.name}: made, but not there; try again")
        tags = self._tags()
        if tag in tags:
            self._require_same(release, str(tag), tags)
            return self._published("checked" if dry_run else "unchanged", tag, tags[str(tag)], list(tags), [])
        changed = self._difference(release, head)
        if dry_run:
            return self._published("checked", tag, head, [*tags, *([tag] if tag else [])], sorted(changed))
        if create_pr and changed:
            commit, url = self._commit(release, changed, head, create_pr=True)
            return self._published("proposed", None, commit, list(tags), sorted(changed), url)
        commit = self._commit(release, changed, head)[0] if changed else head
        missing = sorted(self._difference(release, commit))
        if missing:
            raise BundleError(f"{self.name}, commit {commit[:12]}: file {missing[0]} did not arrive as it was sent; push again")
        tagged = tag is not None and self._tag(release, tag, commit)
        status: Status = "pushed" if changed or tagged else "unchanged"
        return self._published(status, tag, commit, [*tags, *([tag] if tag else [])], sorted(changed))

    def _validate_card(self, release: Release) -> None:
        from huggingface_hub import ModelCard

        readme = next(file for file in release.files if file.name == "README.md")
        text = readme.content if isinstance(readme.content, bytes) else readme.content.read_bytes()
        try:
            ModelCard(text.decode("utf-8")).validate(repo_type="model")
        except ValueError as error:
            raise BundleError(
                f"card of {release.bundle.folder}: the Hub refuses its metadata ({_line(error)}); correct README.md"
            ) from None
        except Exception as error:
            raise explain(error, self.name) from error

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
                f"{self.name}: version {tag} exists with other content, and versions never change;"
                f" use --tag {next_version(list(tags))}"
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

    def _published(
        self, status: Status, tag: str | None, commit: str | None, tags: list[str], changed: list[str], url: str | None = None
    ) -> Published:
        address = url or f"{self.api.endpoint}/{self.name}" + (f"/tree/{tag}" if tag else "")
        return Published(status, tag, commit, address, tuple(tags), tuple(changed))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:
            raise explain(error, self.name) from error


def _same(file: ReleaseFile, found: Any) -> bool:
    if found is None or found.size != file.size:
        return False
    if found.lfs is not None:
        return bool(found.lfs.sha256 == file.sha256)
    return bool(found.blob_id == file.git_id())


def _content(file: ReleaseFile) -> bytes | str:
    return file.content if isinstance(file.content, bytes) else str(file.content)


def _is_of_bundle(name: str) -> bool:
    return name == manifest.MANIFEST or name in manifest.REQUIRED or manifest.is_meaning(name) or manifest.is_extra(name)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
