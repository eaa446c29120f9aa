"""Make the card of a bundle, its ``README.md`` on the Hub: what it maps, how good it is, how to use it, how it was made.

The template ``card.jinja`` has the text; this module computes the values. A card is a pure function of the bundle, so that the
same bundle gives the same text. The values come from records without a schema, so a value that is missing or has an unexpected
form is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.bundle.records import one_line, value_at
from kvfit.errors import BundleError
from kvfit.hub.quality import cost_text, judged_arguments, quality_table, verdict_reasons, where_measured
from kvfit.hub.refs import is_repository
from kvfit.spec import KINDS, Kind, ModelSpec

# A card that ends with this line was made by kvfit and is made again when a bundle is pushed. Other cards are never replaced.
MARK = "<!-- made by kvfit from the files of this folder; remove this line to keep your own text -->"
TEMPLATE = Path(__file__).with_name("card.jinja")

_LEVELS = " ▁▂▃▄▅▆▇█"
_OF_MODEL = {
    "model": "ref",
    "commit": "revision",
    "family": "family",
    "layers": "n_layers",
    "key/value heads": "n_heads",
    "head size": "head_dim",
    "activations": "dtype",
    "quantisation": "quantisation",
    "weight fingerprint": "weight_fingerprint",
    "tokenizer fingerprint": "tokenizer_fingerprint",
}


class _Raw(str):
    """Text made by kvfit, which is printed without escaping."""


def render_card(bundle: Bundle, *, ref: str | None = None, license: str | None = None) -> str:
    """The card's text.

    Args:
        bundle: the bundle.
        ref: where it is or will be published, ``org/name``; None for a local folder.
        license: licence id of the Hub; None if none is stated.
    """
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, finalize=cell
    )
    environment.filters["raw"] = _Raw
    spec, evaluation = bundle.spec, _evaluation(bundle)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=_front_matter(bundle, license),
        source=spec.source,
        target=spec.target,
        verdict=bundle.verdict,
        place=json.dumps(ref or "path/to/this/folder"),
        judged=judged_arguments(evaluation),
        evaluated=evaluation is not None,
        reasons=verdict_reasons(evaluation),
        quality=quality_table(evaluation),
        moved_tokens=_moved_tokens(evaluation),
        cost=cost_text(value_at(bundle.solve, "cost")),
        text=where_measured(evaluation),
        pair=[(label, *(_of_model(model, name) for model in (spec.source, spec.target))) for label, name in _OF_MODEL.items()],
        recipe=[row for row in _recipe(bundle) if row[1] is not None],
        fit=[_fit(bundle, kind) for kind in KINDS],
        r2_maps=[(kind, lines) for kind in KINDS if (lines := _r2_map(bundle, kind))],
        pictures=[name for name in sorted(bundle.digests) if name.endswith((".png", ".svg"))],
        license=license,
        mark=MARK,
    )


def cell(value: Any) -> str:
    """Text for a cell of a Markdown table: one line, numbers shortened, without cell borders, HTML or control characters."""
    if isinstance(value, _Raw):
        return value
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)).split(" "))
    return one_line(text, len(text)).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def write_card(folder: str | Path, *, ref: str | None = None, license: str | None = None) -> None:
    """Make the card of a bundle again, unless its author has written one.

    Raises:
        BundleError: the bundle cannot be read or written.
    """
    readme = Path(folder) / "README.md"
    if readme.exists() and not is_generated(readme.read_bytes().decode("utf-8", "replace")):
        return
    add_files(folder, {"README.md": render_card(Bundle.open(folder, verify=False), ref=ref, license=license).encode("utf-8")})


def metadata(bundle: Bundle, license: str | None = None) -> dict[str, Any]:
    """The card's metadata. ``base_model`` and ``datasets`` contain names of the Hub only, never local paths."""
    spec = bundle.spec
    named = [value_at(text, "dataset") for text in _parts(value_at(bundle.recipe, "text"))]
    found: dict[str, Any] = {
        "base_model": [model.ref for model in (spec.source, spec.target) if is_repository(model.ref)],
        "datasets": [name for name in dict.fromkeys(map(str, named)) if is_repository(name)],
        "library_name": "kvfit",
        "license": license,
        "tags": ["kvfit", "kv-cache", "kv-cache-transfer", *dict.fromkeys((spec.source.family, spec.target.family))],
    }
    return {name: value for name, value in found.items() if value}


def is_generated(text: str) -> bool:
    """Whether kvfit made a card, so that it may replace it."""
    return text.rstrip().endswith(MARK)


def check_metadata(text: str, name: str) -> dict[str, Any]:
    """The metadata of a card, after all checks that need no network.

    Raises:
        BundleError: the metadata cannot be read, or contain a path where the Hub expects a name.
    """
    from huggingface_hub import ModelCard

    try:
        found: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    except Exception as error:  # the client raises YAML's own errors, ValueError and TypeError
        raise BundleError(f"card of {name}, metadata: {one_line(error, 200)}") from None
    for field in ("base_model", "datasets", "license"):
        value = found.get(field)
        for item in value if field != "license" and isinstance(value, list) else [value]:
            if not _is_fit(field, item):
                raise BundleError(
                    f"card of {name}, metadata field {field}: found {item!r}, needed a name on the Hub; correct README.md"
                )
    if found.get("library_name") != "kvfit":
        raise BundleError(f"card of {name}, metadata field library_name: found {found.get('library_name')!r}, needed 'kvfit'")
    return found


def _of_model(model: ModelSpec, name: str) -> Any:
    """A field of a spec; of heads that differ by layer the range."""
    if name not in ("n_heads", "head_dim") or model.geometry is None:
        return getattr(model, name)
    found = [number for heads in model.geometry for number in (heads[:1] if name == "n_heads" else heads[1:])]
    return f"{min(found)} to {max(found)}, by layer" if len(set(found)) > 1 else found[0]


def _is_fit(field: str, item: Any) -> bool:
    if item is None or not isinstance(item, str):
        return item is None
    if field == "license":
        return item.isprintable()
    # Old datasets of the Hub, such as squad, have no organisation.
    old_name = field == "datasets" and item.replace("-", "").replace("_", "").isalnum()
    return is_repository(item) or old_name


def _front_matter(bundle: Bundle, license: str | None) -> str:
    from huggingface_hub import ModelCardData

    return str(ModelCardData(**metadata(bundle, license)).to_yaml()).rstrip()


def _evaluation(bundle: Bundle) -> dict[str, Any] | None:
    """The evaluation of these weights; None without one."""
    evaluation = bundle.evaluation
    return evaluation if evaluation is not None and evaluation["weights_digest"] == bundle.weights_digest else None


def _moved_tokens(evaluation: dict[str, Any] | None) -> int | None:
    """Tokens that are moved in each row of the quality table: the prefix without its last token."""
    prefix = value_at(evaluation, "tokens", "prefix")
    return prefix - 1 if type(prefix) is int else None


def _recipe(bundle: Bundle) -> Iterator[tuple[str, Any]]:
    """Rows of the recipe table. A value is None if the record does not have it."""
    spec, recipe, solve = bundle.spec, bundle.recipe, bundle.solve
    for label, name in (("text", "dataset"), ("its configuration", "config"), ("its revision", "revision")):
        yield label, _joined(value_at(text, name) for text in _parts(value_at(recipe, "text")))
    for name in ("num_sequences", "seq_len", "token_stride", "skip_tokens", "seed"):
        yield name.replace("_", " "), _joined(_parts(value_at(recipe, "options", name)))
    yield "tokens to fit", value_at(solve, "tokens", "fit")
    yield "tokens held out", value_at(solve, "tokens", "holdout")
    yield "source layers per target layer", value_at(solve, "options", "top_k")
    yield "penalty", value_at(solve, "options", "penalty")
    yield "support", spec.support
    yield "inputs", spec.inputs
    yield "lexical inputs", ", ".join(f"lag {lag}" for lag in spec.lexical_lags) or None
    yield "rank of the shared basis", spec.rank
    before, after = (value_at(solve, "refine", name) for name in ("kl_before", "kl_after"))
    if isinstance(before, float) and isinstance(after, float):
        yield "refined", f"KL to the target's own cache {before:.3f} before, {after:.3f} after; R2 is that of the map before"
    yield "gain", spec.gain
    yield "dtype of the weights", spec.dtype
    yield "size", f"{bundle.nbytes / 1e6:.1f} MB"
    yield "weights digest", _Raw(f"`{bundle.weights_digest}`")
    yield "made with kvfit", spec.kvfit_version


def _fit(bundle: Bundle, kind: Kind) -> tuple[Any, ...]:
    layers = [layer for layer in bundle.spec.layers if layer.kind == kind]
    single = value_at(bundle.solve, "r2", kind, "single", "holdout")
    fit, holdout = (sum(getattr(layer, name) for layer in layers) / len(layers) for name in ("r2_fit", "r2_holdout"))
    worst = min(layers, key=lambda layer: layer.r2_holdout)
    return kind, single, holdout, fit, f"{worst.r2_holdout:.3f} (layer {worst.layer_index})"


def _r2_map(bundle: Bundle, kind: Kind) -> str:
    """R2 of every single source layer for every target layer, one character each; empty if it was not recorded."""
    values = value_at(bundle.solve, "probe", kind, "holdout")
    n_source, layers = bundle.spec.source.n_layers, bundle.spec.mapped_layers
    if not (isinstance(values, list) and len(values) in (len(layers), bundle.spec.target.n_layers)):
        return ""
    lines = []
    for layer_index, row in enumerate(values, bundle.spec.target.n_layers - len(values)):
        if not (isinstance(row, list) and len(row) == n_source and all(isinstance(value, int | float) for value in row)):
            return ""
        cells = "".join(_LEVELS[min(8, max(0, int(9 * value)))] for value in row)
        lines.append(f"{layer_index:3d} |{cells}| best {max(range(n_source), key=row.__getitem__)}")
    return "\n".join(lines)


def _parts(value: Any) -> list[Any]:
    """A value of a recipe, or the values of all captures that were merged."""
    merged = value_at(value, "merged")
    return merged if isinstance(merged, list) else [value]


def _joined(values: Iterable[Any]) -> Any:
    """One value as it is, several values separated by commas, None if there is none."""
    known = [value for value in values if value is not None]
    return ", ".join(map(str, known)) if len(known) > 1 else known[0] if known else None
