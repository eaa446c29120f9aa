"""The registry: one TOML file per published mapper, shipped with kvfit.

``docs/reference/registry.md`` describes the files. An entry pins a mapper by its commit and by the digest of its weights, so
that loading through the registry gives exactly the mapper that was registered.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvfit.bundle import records
from kvfit.bundle.bundle import Bundle
from kvfit.bundle.records import from_json
from kvfit.errors import BundleError, RefError, SpecError
from kvfit.hub.quality import ways
from kvfit.hub.refs import is_repository, is_tag, split_ref
from kvfit.spec import FORMAT_VERSION, KINDS

SCHEMA = 1
MAX_ENTRY = 64 << 10
SCORES = ("share_of_gap", "kl", "top1", "recall", "speed", "share_of_work")
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)
_OPTIONAL = ("repo", "folder", "commit")
_log = logging.getLogger("kvfit")


@dataclass(frozen=True)
class ModelPin:
    """One model of a pair: ref, commit hash (empty for none) and family."""

    ref: str
    revision: str
    family: str


@dataclass(frozen=True)
class _Pinned:
    schema: int
    repo: str | None
    folder: str | None
    revision: str
    commit: str | None
    format_version: int
    weights_digest: str
    nbytes: int
    license: str
    verdict: Literal["pass", "fail", "unknown"]
    source: ModelPin
    target: ModelPin

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise SpecError("schema", str(self.schema), str(SCHEMA))
        if (self.repo is None) == (self.folder is None):
            raise SpecError("repo", "both or neither of repo and folder", "exactly one")
        if self.repo is not None and not is_repository(self.repo):
            raise SpecError("repo", repr(self.repo)[:80], "org/name")
        if self.folder is not None and not is_tag(self.folder):
            raise SpecError("folder", repr(self.folder)[:80], "a folder next to this file, named as a repository is")
        if (self.commit is None) != (self.repo is None) or (self.commit is not None and not _COMMIT.fullmatch(self.commit)):
            raise SpecError("commit", repr(self.commit)[:80], "40 hexadecimal digits with repo, nothing with folder")
        if not is_tag(self.revision):
            raise SpecError("revision", repr(self.revision)[:80], "a version such as v1")
        if not 1 <= self.format_version <= FORMAT_VERSION:
            raise SpecError("format_version", str(self.format_version), f"1 to {FORMAT_VERSION}")
        if not _DIGEST.fullmatch(self.weights_digest):
            raise SpecError("weights_digest", repr(self.weights_digest)[:80], "sha256: and 64 hexadecimal digits")


@dataclass(frozen=True)
class MapperEntry(_Pinned):
    """A published mapper.

    Attributes:
        schema: version of the registry's schema, 1.
        repo: ``org/name`` on the Hub, or None.
        folder: a folder of published bundles next to the registry's files, or None.
        revision: the version (tag).
        commit: commit hash of the version on the Hub; None for a folder.
        format_version: format version of the bundle.
        weights_digest: digest of the bundle's spec and weights.
        nbytes: size of the weight files in bytes.
        license: licence id, as on the Hub.
        verdict: verdict of the evaluation.
        source: the source model.
        target: the target model.
        scores: the evaluation's scores, by name.
        home: the folder that holds the entry's file; it is not part of the file.
    """

    scores: tuple[tuple[str, float], ...] = ()
    home: Path = field(default=Path("."), compare=False)

    @property
    def location(self) -> str:
        """The ref for `load_mapper`: the repository, or the folder."""
        return self.repo if self.repo is not None else str(self.home / str(self.folder))

    @property
    def pin(self) -> str:
        """A revision that never changes: the commit, or a folder's version."""
        return self.commit or self.revision

    @property
    def name(self) -> str:
        """``org/name@v1``, or ``folder@v1``."""
        return f"{self.repo or self.folder}@{self.revision}"

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values, for ``kvfit list --json`` and the catalogue."""
        document = dataclasses.asdict(self)
        del document["home"]
        return document | {"scores": dict(self.scores), "location": self.location}

    def __str__(self) -> str:
        found = dict(self.scores)
        scores = " ".join(f"{name}={found[name]:.4g}" for name in ("recall", "share_of_gap", "kl", "speed") if name in found)
        pair = f"{self.source.ref} -> {self.target.ref}"
        return f"{self.name}  {pair}  {self.verdict}  {self.nbytes / 1e6:.1f} MB  {scores}".rstrip()


def registry_folder() -> Path | None:
    """The folder of the registry, inside an installed kvfit or next to it in a checkout; None if there is none."""
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "_registry"]
    if (package.parent / "pyproject.toml").is_file():
        candidates.append(package.parent / "registry")
    return next((folder for folder in candidates if folder.is_dir()), None)


def list_mappers(source: str | None = None, target: str | None = None, *, folder: Path | None = None) -> list[MapperEntry]:
    """The registered mappers, best first for each pair.

    A file that does not follow the schema is left out with a warning in the log, so that it does not hide the others.

    Args:
        source: list only mappers from this model, ``org/name`` or ``org/name@commit``.
        target: list only mappers to this model.
        folder: the registry; the one that came with kvfit by default.

    Raises:
        RefError: `folder` does not exist.
    """
    home = folder or registry_folder()
    if home is None:
        return []
    if not home.is_dir():
        raise RefError(f"registry {home}: no such folder")
    entries = []
    for path in sorted(home.glob("*.toml")):
        try:
            entries.append(read_entry(path))
        except RefError as error:
            _log.warning("%s; left out", error)
    chosen = [entry for entry in entries if _matches(entry.source, source) and _matches(entry.target, target)]
    return sorted(chosen, key=_rank)


def find_mapper(source: str, target: str, *, folder: Path | None = None) -> MapperEntry:
    """The best registered mapper of a pair: one that passed its evaluation if possible, with the largest share of gap.

    Raises:
        RefError: there is none; lists the mappers from that source and to that target.
    """
    found = list_mappers(source, target, folder=folder)
    if found:
        return found[0]
    near = []
    for text, entries in (
        (f"from {source}", list_mappers(source, None, folder=folder)),
        (f"to {target}", list_mappers(None, target, folder=folder)),
    ):
        pairs = ", ".join(f"{entry.name} ({entry.source.ref} -> {entry.target.ref})" for entry in entries) or "none"
        near.append(f"{text}: {pairs}")
    raise RefError(
        f"no mapper from {source} to {target} in the registry; {'; '.join(near)}; fit one with: kvfit capture {source} {target}"
    )


def read_entry(path: Path) -> MapperEntry:
    """Read one entry.

    Raises:
        RefError: the file is not a regular file of at most 64 KiB, or does not follow the schema; names the field.
    """
    try:
        document = records.parse_toml(records.read_capped(path, MAX_ENTRY))
    except (OSError, ValueError) as error:
        raise RefError(f"registry file {path.name!r}: cannot be read as TOML ({records.one_line(error, 200)})") from None
    scores = document.pop("scores", {})
    if not isinstance(scores, dict) or not all(
        _NAME.fullmatch(name) and type(value) in (int, float) for name, value in scores.items()
    ):
        raise RefError(f"registry file {path.name!r}, field scores: needed a table of finite numbers")
    pairs = tuple((name, float(value)) for name, value in scores.items())
    try:
        # TOML has no null, so optional fields that are absent are added as None.
        entry = from_json(_Pinned, dict.fromkeys(_OPTIONAL) | document)
        return MapperEntry(
            **{item.name: getattr(entry, item.name) for item in dataclasses.fields(entry)}, scores=pairs, home=path.parent
        )
    except SpecError as error:
        raise RefError(f"registry file {path.name!r}, {records.one_line(error)}") from None


def make_entry(
    bundle: Bundle,
    *,
    repo: str | None = None,
    folder: str | None = None,
    revision: str,
    commit: str | None = None,
    license: str,
) -> MapperEntry:
    """The entry of a published bundle.

    Raises:
        BundleError: a value of the bundle is not allowed in an entry; names the field.
    """
    spec = bundle.spec
    try:
        return MapperEntry(
            schema=SCHEMA,
            repo=repo,
            folder=folder,
            revision=revision,
            commit=commit,
            format_version=spec.format_version,
            weights_digest=bundle.weights_digest,
            nbytes=bundle.nbytes,
            license=license,
            verdict=bundle.verdict,
            source=ModelPin(spec.source.ref, spec.source.revision or "", spec.source.family),
            target=ModelPin(spec.target.ref, spec.target.revision or "", spec.target.family),
            scores=scores(bundle),
        )
    except SpecError as error:
        raise BundleError(f"registry entry of {bundle.folder}, {error}") from None


def scores(bundle: Bundle) -> tuple[tuple[str, float], ...]:
    """The evaluation's scores of the way of moving that its verdict is about, and the mean holdout R2 of keys and values."""
    found: list[tuple[str, float]] = []
    # If the verdict is unknown, the evaluation is missing or belongs to other weights.
    judged = {} if bundle.verdict == "unknown" else ways(bundle.evaluation).get("handoff", {})
    for name in SCORES:
        value = judged.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):  # strict JSON has finite numbers only
            found.append((name, round(float(value), 6)))
    for kind in KINDS:
        values = [entry.r2_holdout for entry in bundle.spec.layers if entry.kind == kind]
        found.append((f"r2_{kind}", round(sum(values) / len(values), 6)))
    return tuple(found)


def render_entry(entry: MapperEntry) -> str:
    """The entry as TOML, which `read_entry` reads back."""
    lines = []
    for item in dataclasses.fields(_Pinned):
        value = getattr(entry, item.name)
        if value is not None and item.name not in ("source", "target"):
            lines.append(f"{item.name} = {_toml(value)}")
    for role in ("source", "target"):
        lines += ["", f"[{role}]"]
        lines += [f"{name} = {_toml(value)}" for name, value in dataclasses.asdict(getattr(entry, role)).items()]
    lines += ["", "[scores]"]
    lines += [f"{name} = {_toml(value)}" for name, value in entry.scores]
    return "\n".join(lines) + "\n"


def entry_file(entry: MapperEntry) -> str:
    """The file name of an entry."""
    return (entry.repo or str(entry.folder)).replace("/", "--") + ".toml"


def _toml(value: str | int | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has JSON's escapes, except for DEL
    return repr(value)


def _matches(pin: ModelPin, ref: str | None) -> bool:
    if ref is None:
        return True
    name, revision = split_ref(ref)
    return pin.ref.casefold() == name.casefold() and revision in (None, pin.revision)


def _rank(entry: MapperEntry) -> tuple[str, str, int, float, str]:
    score, pair = dict(entry.scores).get("share_of_gap", -math.inf), (entry.source.ref.casefold(), entry.target.ref.casefold())
    return *pair, ("pass", "unknown", "fail").index(entry.verdict), -score, entry.name
