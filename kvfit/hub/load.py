"""Load a mapper from a folder, from a repository of the Hub, or for a pair of models that is looked up in the registry."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfit.bundle import manifest
from kvfit.bundle.bundle import Bundle
from kvfit.bundle.records import one_line
from kvfit.errors import BundleError, GateError, KvfitError, MismatchError, RefError
from kvfit.hub.refs import is_path, is_repository, is_version, published_versions, split_ref
from kvfit.hub.registry import find_mapper

if TYPE_CHECKING:
    import torch

    from kvfit.runtime.mapper import Mapper

# Names of a bundle's files. Other files of a repository are not fetched.
PATTERNS = [
    manifest.MANIFEST,
    "mapper.json",
    "mapper-*.safetensors",
    "recipe.json",
    "solve.json",
    "evaluation.json",
    "evaluation.md",
    "evaluation.html",
    "fit.yaml",
    "README.md",
    "LICENSE",
    "*.png",
    "*.svg",
]


def load_mapper(
    ref: str | Path | None = None,
    *,
    source: str | None = None,
    target: str | None = None,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    local_files_only: bool = False,
    require: Literal["pass", "any"] = "pass",
    registry: str | Path | None = None,
    verify: Literal["digest", "size"] = "digest",
) -> Mapper:
    """Load a mapper.

    Args:
        ref: a folder, or ``org/name`` or ``org/name@revision`` on the Hub. None to look up `source` and `target`.
        source: ref of the source model, for the registry.
        target: ref of the target model, for the registry.
        revision: tag, branch or commit hash; for a folder of published versions, the version. By default, the latest numbered
            version (v2, 1.1) of a folder; if its bundles have other names, a revision is needed.
        device: device of the weights; the CPU by default.
        dtype: dtype of the weights in memory; as stored by default.
        local_files_only: never ask the Hub. What was fetched before is found by tag and by hash, as with
            ``HF_HUB_OFFLINE=1``.
        require: ``pass`` refuses a mapper whose evaluation failed; ``any`` loads it.
        registry: folder of your own registry in which `source` and `target` are looked up.
        verify: ``digest`` compares the SHA-256 of every file with the manifest; for weight files, on other threads while the
            weights are read. ``size`` checks only sizes and shapes of the weight files, for a large bundle whose digests were
            verified before on the same disk.

    Raises:
        RefError: nothing is found under the ref, or it cannot be reached; says which.
        BundleError: the bundle is torn, altered or hostile.
        GateError: the mapper's verdict is ``fail``.
        MismatchError: `require` or `verify` has another value, or the device or dtype is not available.
    """
    for name, word, words in (("require", require, ("pass", "any")), ("verify", verify, ("digest", "size"))):
        if word not in words:
            raise MismatchError(f"{name}: found {word!r}, needed {words[0]!r} or {words[1]!r}")
    pinned = None
    if ref is None:
        if source is None or target is None:
            raise RefError("load_mapper: found no ref, needed a ref, or both source= and target=")
        for name, value, kinds in (("source", source, str), ("target", target, str), ("registry", registry, str | Path | None)):
            if not isinstance(value, kinds):
                raise RefError(
                    f"load_mapper: found {name}={value!r}, needed a name such as org/name, or a folder for registry="
                )
        entry = find_mapper(source, target, folder=None if registry is None else Path(registry).expanduser())
        ref = entry.location
        pinned = entry.weights_digest if revision is None else None
        revision = revision or entry.pin
    elif source is not None or target is not None or registry is not None:
        raise RefError(f"load_mapper: found both the ref {str(ref)!r} and source=, target= or registry=, needed one of the two")
    bundle = Bundle.open(resolve(ref, revision, local_files_only), verify=False)
    if pinned is not None and bundle.weights_digest != pinned:
        raise BundleError(
            f"mapper {ref}@{revision}: weights digest {bundle.weights_digest[:19]}, the registry says {pinned[:19]};"
            " report it to the registry, or load it by its ref"
        )
    check_verdict(bundle, str(ref), require)
    from kvfit.runtime.mapper import Mapper

    if verify == "size":
        return Mapper.from_bundle(bundle, device=device, dtype=dtype)
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(bundle.check_weight_files)
        try:
            return Mapper.from_bundle(bundle, device=device, dtype=dtype)
        finally:
            # The digests are checked before the caller gets the mapper. If damaged weights have caused an error, this one
            # explains it.
            check.result()


def check_verdict(bundle: Bundle, ref: str, require: Literal["pass", "any"] = "pass") -> None:
    """Refuse a bundle whose evaluation failed, and warn about one without an evaluation.

    Raises:
        GateError: the verdict is ``fail`` and `require` is ``pass``.
    """
    if bundle.verdict == "fail" and require == "pass":
        raise GateError(
            f"mapper {ref}: its evaluation failed (verdict fail in evaluation.json); read {bundle.folder / 'README.md'},"
            " or load it anyway with require='any'"
        )
    if bundle.verdict == "unknown":
        reason = "was not evaluated" if bundle.evaluation is None else "was evaluated with other weights or without a verdict"
        # The message contains the digest, so that Python's own filter shows it once per bundle and call site.
        warnings.warn(
            f"mapper {ref} {reason} ({bundle.weights_digest[:19]}): run kvfit evaluate before you rely on it", stacklevel=3
        )


def resolve(ref: str | Path, revision: str | None = None, local_files_only: bool = False) -> Path:
    """The local folder of a bundle, which is fetched from the Hub if necessary.

    Args:
        ref: a bundle's folder, a folder of published versions, or ``org/name``; the latter two may end in ``@revision``.
        revision: the revision, if `ref` does not end in one.
        local_files_only: never ask the Hub.

    Raises:
        RefError: there is no such folder, repository or revision; or the Hub refuses access or cannot be reached.
    """
    if not isinstance(ref, str | Path) or not str(ref).strip():
        raise RefError(f"ref: found {ref!r}, needed a folder, or org/name or org/name@revision on the Hub")
    if isinstance(ref, Path) or Path(ref).expanduser().is_dir():
        return _resolve_folder(Path(ref).expanduser(), revision)
    name, found = split_ref(ref)
    if found is not None and revision is not None and found != revision:
        raise RefError(f"{ref}: found revision {revision!r} as well, needed one of the two")
    revision = found or revision
    if is_path(name) or Path(name).is_dir():
        return _resolve_folder(Path(name).expanduser(), revision)
    if not is_repository(name):
        raise RefError(f"{ref!r}: needed a folder that exists, or org/name or org/name@revision on the Hub")
    return _resolve_repository(name, revision, local_files_only)


def _resolve_folder(folder: Path, revision: str | None) -> Path:
    if not folder.is_dir():
        raise RefError(f"{folder}: no such folder; needed a bundle, or a folder that bundles were published to")
    if (folder / "mapper.json").exists():
        if revision is not None:
            raise RefError(f"{folder}: is one bundle, so it has no revision {revision!r}; leave the revision out")
        return folder
    tags = published_versions(folder)
    if not tags:
        raise RefError(f"{folder}: no mapper.json and no published versions in it; needed a bundle")
    if revision is not None and revision not in tags:
        raise RefError(f"{folder}: no version {revision!r}; there are {', '.join(tags)}")
    versions = [tag for tag in tags if is_version(tag)]
    if revision is None and not versions:
        raise RefError(
            f"{folder}: found bundles whose names are not versions ({', '.join(tags)}), needed the name of one:"
            f" {folder / tags[0]}, or revision={tags[0]!r}"
        )
    return folder / (revision or versions[-1])


def _resolve_repository(name: str, revision: str | None, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=PATTERNS, local_files_only=local_files_only)
    except Exception as error:
        raise _explain_absence(error, name, revision, local_files_only) from error
    if not Path(found, "mapper.json").exists():
        raise RefError(f"{name}: found a repository without mapper.json, needed a kvfit mapper: check the name")
    return Path(found)


def _explain_absence(error: Exception, name: str, revision: str | None, local_files_only: bool) -> KvfitError:
    """Our error for an error of the Hub's client, if the caller may have meant a folder."""
    from huggingface_hub import errors

    found = explain(error, name, revision, local_files_only)
    absent = isinstance(error, errors.RepositoryNotFoundError | errors.LocalEntryNotFoundError) and revision is None
    return RefError(f"{name}: found no such folder; and on the Hub: {found}") if absent else found


def explain(error: Exception, name: str, revision: str | None = None, local_files_only: bool = False) -> KvfitError:
    """Our error for an error of the Hub's client about one repository."""
    if isinstance(error, KvfitError):
        return error
    from huggingface_hub import constants, errors, get_token

    ref = f"{name}@{revision}" if revision else name
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    token = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        return explain(error.__cause__, name, revision)  # the client fell back to its cache because the Hub refused
    if isinstance(error, errors.GatedRepoError):
        return RefError(f"{name}: gated; accept its conditions at https://huggingface.co/{name}, then {token}")
    if isinstance(error, errors.RevisionNotFoundError):
        return RefError(f"{name}: has no revision {revision or 'main'!r}; look at the tags and branches of {name}")
    if isinstance(error, errors.RepositoryNotFoundError):
        # The Hub also answers 401 if a repository does not exist, so that names of private ones stay secret.
        seen = "your token may not read it" if get_token() is not None else "you are not logged in"
        return RefError(f"{name}: missing, or private and {seen}; check the spelling, or {token}")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        offline = "local_files_only forbids asking the Hub" if local_files_only else "the Hub cannot be reached"
        offline = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else offline
        return RefError(f"{ref}: not in the local cache and {offline}; fetch it once with a connection")
    if status in (401, 403):
        return RefError(f"{name}: not authorised (HTTP {status}); {token} with rights for {name}")
    return RefError(f"{ref}: the Hub cannot be reached or refused ({type(error).__name__}: {one_line(error)}); try again")
