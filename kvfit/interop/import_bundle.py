"""The verb `import`: a folder in semantic-router's layout becomes a bundle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvfit import __version__
from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.bundle.files import require_free, require_writable
from kvfit.errors import BundleError, MismatchError, UnsupportedModelError
from kvfit.fit.capture.inspect import inspect_model
from kvfit.fit.capture.models import Options, check_tokenizers, load, load_tokenizer
from kvfit.hub.card import write_card
from kvfit.interop.artifact import Artifact
from kvfit.interop.semantic_router import PRECISIONS
from kvfit.model.identity import describe_model
from kvfit.spec import FORMAT_VERSION, KINDS, LayerMap, MapperSpec, ModelSpec

FORMAT = "semantic-router"


@dataclass(frozen=True)
class Imported:
    """What `import_bundle` wrote.

    Attributes:
        folder: what was read.
        out: the bundle.
        mapper_id: what the folder's author called the mapper.
        source: ref of the source model.
        target: ref of the target model.
        verdict: ``unknown``: whatever was measured elsewhere, kvfit has not evaluated it.
        weights_digest: of the bundle.
        nbytes: bytes of its weights.
    """

    folder: str
    out: str
    mapper_id: str
    source: str
    target: str
    verdict: str
    weights_digest: str
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.out}: {self.mapper_id}, {self.source} -> {self.target}, {self.nbytes / 1e6:.1f} MB, verdict {self.verdict};"
            f" next: kvfit evaluate {self.out}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def import_bundle(
    folder: str | Path,
    out: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    options: Options | None = None,
) -> Imported:
    """Make a bundle of a folder in semantic-router's layout, whole or not at all.

    A folder that kvfit exported describes both models. One that others made names them only, so that they have to be
    loaded: `source` and `target` say from where.

    Args:
        folder: what to read.
        out: the bundle; must not exist.
        source: ref of the source model, for a folder that others made.
        target: ref of the target model.
        options: how they are loaded; the dtype is the one that the folder was fitted in.

    Raises:
        BundleError: the folder is not sound, says too little or contradicts itself; names the file and the field.
        MismatchError: the models are not those that the folder names; names the field.
        UnsupportedModelError: kvfit cannot describe a model or prove that it does.
        RefError: a model cannot be found.
    """
    require_free(out)
    require_writable(out)
    artifact = Artifact.open(folder)
    spec = artifact.own_spec()
    if spec is None:
        if source is None or target is None:
            raise BundleError(
                f"{FORMAT} folder {folder}: field kvfit: found nothing, needed rotary tables and fingerprints of both models;"
                " name the models with --source and --target, to read them from there"
            )
        spec = _foreign_spec(artifact, (source, target), options or Options())
        origin = {"format": FORMAT, "mapper_id": artifact.statement.mapper_id}
        recipe = {"imported": origin | {"calibration": artifact.calibration}}
        names = ("topk", "ridge_alpha", "centered_inputs", "evaluation_report")
        solve = {"imported": origin | {name: getattr(artifact.statement, name) for name in names}}
    else:
        if source is not None or target is not None:
            raise MismatchError(
                f"{FORMAT} folder {folder}: field kvfit: describes both models, needed no --source and --target; leave them out"
            )
        assert artifact.own is not None
        recipe, solve = artifact.calibration, artifact.own["solve"]
        spec = replace(spec, format_version=FORMAT_VERSION)  # version 2 has all that version 1 has
    write_bundle(out, spec, artifact.weights(spec), recipe=recipe, solve=solve)
    write_card(out)
    bundle = Bundle.open(out)
    return Imported(
        folder=str(folder),
        out=str(out),
        mapper_id=artifact.statement.mapper_id,
        source=spec.source.ref,
        target=spec.target.ref,
        verdict=bundle.verdict,
        weights_digest=bundle.weights_digest,
        nbytes=bundle.nbytes,
    )


def _foreign_spec(artifact: Artifact, refs: tuple[str, str], options: Options) -> MapperSpec:
    """The spec of a folder that names its models only, with the rest read from the models themselves."""
    said = artifact.statement
    revisions = (
        _revision(refs[0], said.compatibility.source_model, said.compatibility.source_revision),
        _revision(refs[1], said.compatibility.target_model, said.compatibility.target_revision),
    )
    tokenizers = [
        load_tokenizer(ref, revision, trust_remote_code=options.trust_remote_code)
        for ref, revision in zip(refs, revisions, strict=True)
    ]
    check_tokenizers(*tokenizers)
    dtype = next(name for name, short in PRECISIONS.items() if short == said.compatibility.precision)
    options = replace(options, dtype=dtype)
    # One after the other: only one of the two needs to fit.
    models = [
        _describe(artifact, role, ref, revision, options, tokenizer)
        for role, ref, revision, tokenizer in zip(("source", "target"), refs, revisions, tokenizers, strict=True)
    ]
    lists = said.source_layers_per_target
    _compare(artifact, "target_model", "layers", models[1].n_layers, len(lists), "by source_layers_per_target")
    highest = max(map(max, lists))
    if highest >= models[0].n_layers:
        raise MismatchError(
            f"{FORMAT} folder {artifact.folder}: field source_layers_per_target: found layer {highest}, needed one of the"
            f" {models[0].n_layers} of {models[0].ref}; name the models that the mapper was fitted on"
        )
    return MapperSpec(
        format_version=FORMAT_VERSION,
        kvfit_version=__version__,
        source=models[0],
        target=models[1],
        keys_rotated=not said.rope_stripped_on_keys,
        support="full",
        inputs="same",
        gain="none",
        dtype="float32",
        # Penalty and R2 are not known in kvfit's terms: docs/reference/semantic-router.md.
        layers=tuple(
            LayerMap(kind, index, tuple(sorted(chosen)), 0.0, 0.0, 0.0) for index, chosen in enumerate(lists) for kind in KINDS
        ),
    )


def _describe(artifact: Artifact, role: str, ref: str, revision: str | None, options: Options, tokenizer: Any) -> ModelSpec:
    loaded = load(ref, revision, options, tokenizer=tokenizer)
    wanted = artifact.statement.compatibility
    commit = getattr(wanted, f"{role}_revision")
    if loaded.revision not in (None, commit):  # a folder has none, and its user answers for it
        _compare(artifact, f"{role}_revision", "commit", loaded.revision, commit, "by compatibility")
    seen = inspect_model(loaded)  # the proof that a capture would have given
    if not seen.supported:
        raise UnsupportedModelError(str(seen.reason))
    spec = describe_model(loaded.model, tokenizer, ref=loaded.ref, revision=loaded.revision)
    for name, found, needed in (
        ("num_kv_heads", spec.n_heads, wanted.num_kv_heads),
        ("head_dim", spec.head_dim, wanted.head_dim),
        ("precision", PRECISIONS.get(spec.dtype, spec.dtype), wanted.precision),
    ):
        _compare(artifact, name, f"{role} model {spec.ref} with", found, needed, "by compatibility")
    return spec


def _revision(ref: str, name: str, commit: str) -> str | None:
    """The commit to load: the folder's, where a model of the Hub is given by the folder's own name for it."""
    return commit if ref == name and not Path(ref).is_dir() else None


def _compare(artifact: Artifact, field: str, what: str, found: object, needed: object, reason: str) -> None:
    if found != needed:
        raise MismatchError(
            f"{FORMAT} folder {artifact.folder}: field {field}: found {what} {found}, needed {needed} {reason};"
            " name the models that the mapper was fitted on"
        )
