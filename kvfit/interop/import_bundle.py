"""The verb `import`: make a bundle of a folder in semantic-router's layout."""

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
    """The result of `import_bundle`.

    Attributes:
        folder: the folder that was read.
        out: folder of the bundle.
        mapper_id: the mapper's name in the folder.
        source: ref of the source model.
        target: ref of the target model.
        verdict: ``unknown``, because kvfit has not evaluated it.
        weights_digest: digest of the bundle's spec and weights.
        nbytes: size of its weight files in bytes.
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
        """The result as JSON values."""
        return asdict(self)


def import_bundle(
    folder: str | Path,
    out: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    options: Options | None = None,
) -> Imported:
    """Make a bundle of a folder in semantic-router's layout, completely or not at all.

    A folder that kvfit exported describes both models. A folder of another program only contains their names, so the models
    are loaded from `source` and `target`.

    Args:
        folder: the folder to read.
        out: folder of the bundle, which must not exist.
        source: ref of the source model, for a folder of another program.
        target: ref of the target model, for a folder of another program.
        options: how the models are loaded; the folder determines the dtype.

    Raises:
        BundleError: the folder is damaged, incomplete or contradicts itself; names the file and the field.
        MismatchError: the models are not those that the folder names; names the field.
        UnsupportedModelError: kvfit cannot describe a model, or cannot verify the description.
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
        spec = replace(spec, format_version=FORMAT_VERSION)  # every version 1 spec is a valid version 2 spec
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
    """The spec for a folder that only names its models. Everything else is read from the models."""
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
    # The models are loaded in turn, so that only one of them has to fit into memory.
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
        # Penalty and R2 have no equivalents in the layout; see docs/reference/semantic-router.md.
        layers=tuple(
            LayerMap(kind, index, tuple(sorted(chosen)), 0.0, 0.0, 0.0) for index, chosen in enumerate(lists) for kind in KINDS
        ),
    )


def _describe(opened: RouterFolder, role: str, ref: str, revision: str | None, options: Options, tokenizer: Any) -> ModelSpec:
    loaded = load(ref, revision, options, tokenizer=tokenizer)
    wanted = opened.manifest.compatibility
    commit = getattr(wanted, f"{role}_revision")
    if loaded.revision not in (None, commit):  # a local folder has no commit to compare
        _compare(opened, f"{role}_revision", "commit", loaded.revision, commit, "by compatibility")
    seen = inspect_model(loaded)  # the same checks as in a capture
    if not seen.supported:
        raise UnsupportedModelError(str(seen.reason))
    spec = describe_model(loaded.model, tokenizer, ref=loaded.ref, revision=loaded.revision)
    if spec.geometry is not None:
        _compare(
            opened, "head_dim", f"{role} model {spec.ref} with", "heads that differ by layer", "the same in all layers", ""
        )
    for name, found, needed in (
        ("num_kv_heads", spec.n_heads, wanted.num_kv_heads),
        ("head_dim", spec.head_dim, wanted.head_dim),
        ("precision", PRECISIONS.get(spec.dtype, spec.dtype), wanted.precision),
    ):
        _compare(opened, name, f"{role} model {spec.ref} with", found, needed, "by compatibility")
    return spec


def _revision(ref: str, name: str, commit: str) -> str | None:
    """The commit to load: that of the manifest if `ref` is the manifest's name of the model, else None."""
    return commit if ref == name and not Path(ref).is_dir() else None


def _compare(opened: RouterFolder, field: str, what: str, found: object, needed: object, reason: str) -> None:
    if found != needed:
        raise MismatchError(
            f"{FORMAT} folder {opened.folder}: field {field}: found {what} {found}, needed {needed} {reason};"
            " name the models that the mapper was fitted on"
        )
