"""Resolve a model's ref to a folder or to one commit on the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfit.demo import MODELS, demo_path
from kvfit.errors import RefError
from kvfit.hub import refs
from kvfit.hub.load import explain
from kvfit.spec import MapperSpec

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Located:
    """A model that was found.

    Attributes:
        location: where to load it from: a folder, or ``org/name``.
        name: the name to record: ``org/name``, ``demo:source``, or the name of the folder.
        revision: commit hash; None for folders.
        folder: the folder of its files, or the one that they will be fetched to.
        reached: whether the Hub answered, so that missing files can be fetched.
    """

    location: str
    name: str
    revision: str | None
    folder: Path
    reached: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for ``from_pretrained``. If the Hub did not answer, it must not ask: it would retry for 23 s per file."""
        return {"revision": self.revision, "local_files_only": not self.reached}


def locate(ref: str, revision: str | None = None) -> Located:
    """Find a model and fetch its configuration.

    A branch or tag is resolved to its commit once, before anything is read, so that all files come from the same commit.

    Raises:
        RefError: the model does not exist, cannot be reached, or is not a model.
    """
    import transformers  # noqa: F401  if the extra is missing, say so before asking the Hub

    location, name, revision = split_ref(ref, revision)
    if Path(location).is_dir():
        return Located(location, name, revision, Path(location))
    from huggingface_hub import HfApi, errors, hf_hub_download

    unreached: Exception | None = None
    try:
        HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS)  # unlike a download, this does not retry
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, ValueError) as error:
        raise _not_found(error, name, revision) from error
    except Exception as error:  # no connection, no answer or offline mode: use what was fetched before
        unreached = error
    try:
        config = hf_hub_download(name, "config.json", revision=revision, local_files_only=unreached is not None)
    except errors.LocalEntryNotFoundError as error:
        refused = isinstance(unreached, errors.HfHubHTTPError)
        raise _not_found(unreached if refused and unreached else error, name, revision) from error
    except errors.EntryNotFoundError as error:
        raise RefError(f"{name}: found no config.json there, needed a model that transformers can load") from error
    except (OSError, ValueError) as error:
        raise _not_found(error, name, revision) from error
    folder = Path(config).parent  # .../snapshots/COMMIT in the client's cache
    return Located(name, name, folder.name, folder, unreached is None)


def _not_found(error: Exception, name: str, revision: str | None) -> RefError:
    return RefError(f"{name}: found no such folder; and on the Hub: {explain(error, name, revision)}")


def split_ref(ref: str, revision: str | None = None) -> tuple[str, str, str | None]:
    """Split a ref into where to load from, the name to record, and the revision.

    Raises:
        RefError: the ref is empty or an unknown ``demo:`` ref, a folder has a revision, or there are two different revisions.
    """
    demo = demo_path(ref)
    if demo is not None:
        if ref not in MODELS:
            raise RefError(f"{ref}: found a text, needed a model: {' or '.join(MODELS)}")
        if revision:
            raise RefError(f"{ref}: found revision {revision} beside a built-in model, needed none")
        return str(demo), ref, None
    folder = Path(ref)
    if ref and folder.is_dir():
        if revision:
            raise RefError(f"{ref}: found revision {revision} beside a folder, needed none: a folder has no revisions")
        return str(folder), folder.resolve().name, None
    if not ref or ref.startswith((".", "/", "~")) or ref.count("/") != 1:
        raise RefError(f"{ref!r}: found no such folder, needed a folder, org/name[@revision] or {' or '.join(MODELS)}")
    name, pinned = refs.split_ref(ref)
    if pinned and revision and pinned != revision:
        raise RefError(f"{ref}: found revision {pinned} in the ref and {revision} beside it, needed one")
    return name, name, pinned or revision


def recorded_refs(spec: MapperSpec, source: str | None, target: str | None) -> tuple[tuple[str, str | None], ...]:
    """Ref and revision of source and target: those that the caller passed, else those that a mapper records.

    Raises:
        RefError: a model was a local folder, of which a mapper records only the name, and there is no folder of that name.
    """
    found = []
    for role, given, model in (("source", source, spec.source), ("target", target, spec.target)):
        local = model.revision is None and "/" not in model.ref and demo_path(model.ref) is None
        if given is None and local and not Path(model.ref).is_dir():
            raise RefError(
                f"{role}: found only the name {model.ref!r} of a local folder in the bundle, needed the folder itself: "
                f"pass --{role} FOLDER"
            )
        found.append((model.ref, model.revision) if given is None else (given, None))
    return tuple(found)
