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
from kvfit.interop.router_folder import RouterFolder
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
        mapper_id: the mapper's name in the folder.
        source: ref of the source model.
        target: ref of the target model.
        verdict: ``unknown``, because kvfit has not evaluated it.
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
    """Make a bundle from a folder in semantic-router's layout, whole or not at all.

    A folder that kvfit exported describes both models. One that another program wrote only names them, so they are loaded
    from `source` and `target`.

    Args:
        folder: what to read.
        out: the bundle; must not exist.
        source: ref of the source model, for a folder that another program wrote.
        target: ref of the target model.
        options: how they are loaded; the dtype is taken from the folder.

    Raises:
        BundleError: the folder is damaged, incomplete or contradicts itself; names the file and the field.
        MismatchError: the models are not those that the folder names; names the field.
        UnsupportedModelError: kvfit cannot describe a model, or cannot check its description.
        RefError: a model cannot be found.
    """
    require_free(out)
    require_writable(out)
    opened = RouterFolder.open(folder)
    spec = opened.own_spec()
    if spec is None:
        if source is None or target is None:
            raise BundleError(
                f"{FORMAT} folder {folder}: field kvfit: found nothing, needed rotary tables and fingerprints of both models;"
                " name the models with --source and --target, to read them from there"
            )
        spec = _foreign_spec(opened, (source, target), options or Options())
        origin = {"format": FORMAT, "mapper_id": opened.manifest.mapper_id}
        recipe = {"imported": origin | {"calibration": opened.calibration}}
        names = ("topk", "ridge_alpha", "centered_inputs", "evaluation_report")
        solve = {"imported": origin | {name: getattr(opened.manifest, name) for name in names}}
    else:
        if source is not None or target is not None:
            raise MismatchError(
                f"{FORMAT} folder {folder}: field kvfit: describes both models, needed no --source and --target; leave them out"
            )
        assert opened.own is not None
        recipe, solve = opened.calibration, opened.own["solve"]
        spec = replace(spec, format_version=FORMAT_VERSION)  # version 2 has all that version 1 has
    write_bundle(out, spec, opened.weights(spec), recipe=recipe, solve=solve)
    write_card(out)
    bundle = Bundle.open(out)
    return Imported(
        folder=str(folder),
        out=str(out),
        mapper_id=opened.manifest.mapper_id,
        source=spec.source.ref,
        target=spec.target.ref,
        verdict=bundle.verdict,
        weights_digest=bundle.weights_digest,
        nbytes=bundle.nbytes,
    )


def _foreign_spec(opened: RouterFolder, refs: tuple[str, str], options: Options) -> MapperSpec:
    """The spec of a folder that only names its models; the rest is read from the models themselves."""
    manifest = opened.manifest
    revisions = (
        _revision(refs[0], manifest.compatibility.source_model, manifest.compatibility.source_revision),
        _revision(refs[1], manifest.compatibility.target_model, manifest.compatibility.target_revision),
    )
    tokenizers = [
        load_tokenizer(ref, revision, trust_remote_code=options.trust_remote_code)
        for ref, revision in zip(refs, revisions, strict=True)
    ]
    check_tokenizers(*tokenizers)
    dtype = next(name for name, short in PRECISIONS.items() if short == manifest.compatibility.precision)
    options = replace(options, dtype=dtype)
    # One after the other, so that only one of them has to fit into memory.
    models = [
        _describe(opened, role, ref, revision, options, tokenizer)
        for role, ref, revision, tokenizer in zip(("source", "target"), refs, revisions, tokenizers, strict=True)
    ]
    lists = manifest.source_layers_per_target
    _compare(opened, "target_model", "layers", models[1].n_layers, len(lists), "by source_layers_per_target")
    highest = max(map(max, lists))
    if highest >= models[0].n_layers:
        raise MismatchError(
            f"{FORMAT} folder {opened.folder}: field source_layers_per_target: found layer {highest}, needed one of the"
            f" {models[0].n_layers} of {models[0].ref}; name the models that the mapper was fitted on"
        )
    return MapperSpec(
        format_version=FORMAT_VERSION,
        kvfit_version=__version__,
        source=models[0],
        target=models[1],
        keys_rotated=not manifest.rope_stripped_on_keys,
        support="full",
        inputs="same",
        gain="none",
        dtype="float32",
        # Penalty and R2 are not known in kvfit's terms: docs/reference/semantic-router.md.
        layers=tuple(
            LayerMap(kind, index, tuple(sorted(chosen)), 0.0, 0.0, 0.0) for index, chosen in enumerate(lists) for kind in KINDS
        ),
    )


def _describe(opened: RouterFolder, role: str, ref: str, revision: str | None, options: Options, tokenizer: Any) -> ModelSpec:
    loaded = load(ref, revision, options, tokenizer=tokenizer)
    wanted = opened.manifest.compatibility
    commit = getattr(wanted, f"{role}_revision")
    if loaded.revision not in (None, commit):  # a local folder has no commit, so its user vouches for it
        _compare(opened, f"{role}_revision", "commit", loaded.revision, commit, "by compatibility")
    seen = inspect_model(loaded)  # the checks that a capture would have made
    if not seen.supported:
        raise UnsupportedModelError(str(seen.reason))
    spec = describe_model(loaded.model, tokenizer, ref=loaded.ref, revision=loaded.revision)
    for name, found, needed in (
        ("num_kv_heads", spec.n_heads, wanted.num_kv_heads),
        ("head_dim", spec.head_dim, wanted.head_dim),
        ("precision", PRECISIONS.get(spec.dtype, spec.dtype), wanted.precision),
    ):
        _compare(opened, name, f"{role} model {spec.ref} with", found, needed, "by compatibility")
    return spec


def _revision(ref: str, name: str, commit: str) -> str | None:
    """The commit to load: the manifest's, where `ref` is the name that the manifest gives the model."""
    return commit if ref == name and not Path(ref).is_dir() else None


def _compare(opened: RouterFolder, field: str, what: str, found: object, needed: object, reason: str) -> None:
    if found != needed:
        raise MismatchError(
            f"{FORMAT} folder {opened.folder}: field {field}: found {what} {found}, needed {needed} {reason};"
            " name the models that the mapper was fitted on"
        )
