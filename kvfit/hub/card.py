"""The card of a bundle, its ``README.md`` on the Hub: what it maps, how it was made, how good it is, how to use it.

A pure function of the bundle, so that the same bundle gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.bundle.records import value_at
from kvfit.errors import BundleError
from kvfit.hub.refs import is_repository
from kvfit.spec import KINDS, Kind, ModelSpec

# A card that ends so was made by kvfit and is made anew when a bundle is pushed; one without the line is its author's.
MARK = "<!-- made by kvfit from the files of this folder; remove this line to keep your own text -->"

_LEVELS = " ▁▂▃▄▅▆▇█"
_ARMS = {
    "native": "the target prefills the whole prefix itself: the ceiling",
    "transfer": "mapped cache alone",
    "handoff": "mapped cache with {handoff}, as in use: what is judged",
    "source": "the source goes on by itself: what moving has to beat",
    "raw": "control: the source's cache, unmapped",
    "mean": "control: the mean cache, no context",
    "shuffled": "control: another document's mapped cache",
    "no_context": "the target without the prefix",
}
_METRICS = {"nll": "NLL", "kl": "KL to native", "kl_p95": "KL, 95th percentile", "top1": "top-1 agreement", "recall": "recall"}


def render_card(bundle: Bundle, *, ref: str | None = None, license: str | None = None) -> str:
    """The card's text.

    Args:
        bundle: the bundle.
        ref: where it is or will be published, ``org/name``; None to speak of a folder.
        license: licence id of the Hub; None where none is stated.
    """
    parts = [
        _front_matter(bundle, license),
        _title(bundle),
        _usage(bundle, ref),
        _pair(bundle),
        _recipe(bundle),
        _fit(bundle),
        _quality(bundle),
        _limits(bundle, license),
        MARK,
    ]
    return "\n\n".join(parts) + "\n"


def write_card(folder: str | Path, *, ref: str | None = None, license: str | None = None) -> None:
    """Make the card of a bundle anew, unless its author wrote one.

    Raises:
        BundleError: the bundle cannot be read or written.
    """
    readme = Path(folder) / "README.md"
    if readme.exists() and not is_generated(readme.read_bytes().decode("utf-8", "replace")):
        return
    add_files(folder, {"README.md": render_card(Bundle.open(folder), ref=ref, license=license).encode("utf-8")})


def metadata(bundle: Bundle, license: str | None = None) -> dict[str, Any]:
    """The card's metadata. Only names of the Hub get into ``base_model`` and ``datasets``, never local paths."""
    spec = bundle.spec
    found: dict[str, Any] = {"library_name": "kvfit"}
    if license is not None:
        found["license"] = license
    base = [model.ref for model in (spec.source, spec.target) if is_repository(model.ref)]
    if base:
        found["base_model"] = base
    named = [value_at(text, "dataset") for text in _parts(value_at(bundle.recipe, "text"))]
    datasets = [name for name in dict.fromkeys(map(str, named)) if is_repository(name)]
    if datasets:
        found["datasets"] = datasets
    found["tags"] = ["kvfit", "kv-cache", "kv-cache-transfer", *dict.fromkeys((spec.source.family, spec.target.family))]
    return found


def is_generated(text: str) -> bool:
    """Whether kvfit made a card, so that it may make it anew."""
    return text.rstrip().endswith(MARK)


def check_metadata(text: str, name: str) -> dict[str, Any]:
    """The metadata of any card, after the checks that need no network.

    Raises:
        BundleError: the metadata cannot be read, or hold a path where the Hub wants a name.
    """
    from huggingface_hub import ModelCard

    try:
        found: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    except Exception as error:  # the client raises YAML's own errors, ValueError and TypeError
        raise BundleError(f"card of {name}, metadata: {' '.join(str(error).split())[:200]}") from None
    for field, plural in (("base_model", True), ("datasets", True), ("license", False)):
        value = found.get(field)
        for item in value if plural and isinstance(value, list) else [value]:
            right = item is None or (isinstance(item, str) and (is_repository(item) if plural else item.isprintable()))
            # A data set without an organisation is an old one of the Hub, such as squad.
            if field == "datasets" and isinstance(item, str) and item.replace("-", "").replace("_", "").isalnum():
                right = True
            if not right:
                raise BundleError(
                    f"card of {name}, metadata field {field}: found {item!r}, needed a name on the Hub; correct README.md"
                )
    if found.get("library_name") != "kvfit":
        raise BundleError(f"card of {name}, metadata field library_name: found {found.get('library_name')!r}, needed 'kvfit'")
    return found


def _front_matter(bundle: Bundle, license: str | None) -> str:
    lines = ["---"]
    for key, value in metadata(bundle, license).items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {_yaml(item)}" for item in value)]
        else:
            lines.append(f"{key}: {_yaml(value)}")
    return "\n".join([*lines, "---"])


def _title(bundle: Bundle) -> str:
    source, target = bundle.spec.source, bundle.spec.target
    return (
        f"# {_name(source)} → {_name(target)}\n\n"
        f"A [kvfit](https://pypi.org/project/kvfit-mappers/) mapper: it turns the KV cache of `{source.ref}`\n"
        f"into one for `{target.ref}`, so that the target goes on with a conversation without prefilling it.\n"
        "A linear map per layer; no model was trained or changed.\n\n"
        f"Verdict of the evaluation: **{bundle.verdict}**."
    )


def _usage(bundle: Bundle, ref: str | None) -> str:
    source, target = bundle.spec.source, bundle.spec.target
    place = json.dumps(ref) if ref is not None else '"path/to/this/folder"'
    return (
        "## Use\n\n```bash\npip install kvfit-mappers\n```\n\n"
        "```python\nfrom kvfit import handoff, load_mapper\n\n"
        f"mapper = load_mapper({place})\n"
        f"# source_cache: the cache of {source.ref} over input_ids[:, :-1]; target_model: {target.ref}\n"
        f"moved = handoff(mapper, target_model, input_ids, source_cache, {_judged(bundle)})\n"
        "target_model.generate(input_ids, past_key_values=moved.cache)\n```"
    )


def _judged(bundle: Bundle) -> str:
    """The arguments of `handoff` that the evaluation judged: with others the verdict says little."""
    evaluation = bundle.evaluation
    options = None if evaluation is None else value_at(evaluation, "options")
    found = dict(options) if isinstance(options, dict) else {}
    numbers = {name: value for name, value in found.items() if type(value) in (int, float)}
    arguments = [f"exact_head={numbers.get('exact_head', 1)}"]
    if numbers.get("exact_tail"):
        arguments.append(f"exact_tail={numbers['exact_tail']}")
    if numbers.get("recompute"):
        arguments.append(f"recompute={numbers['recompute']}, guide=source_model")
    return ", ".join(arguments)


def _pair(bundle: Bundle) -> str:
    spec = bundle.spec
    rows: list[tuple[str, Any, Any]] = []
    for label, name in (
        ("model", "ref"),
        ("commit", "revision"),
        ("family", "family"),
        ("layers", "n_layers"),
        ("key/value heads", "n_heads"),
        ("head size", "head_dim"),
        ("activations", "dtype"),
        ("quantisation", "quantisation"),
        ("weight fingerprint", "weight_fingerprint"),
        ("tokenizer fingerprint", "tokenizer_fingerprint"),
    ):
        rows.append((label, getattr(spec.source, name), getattr(spec.target, name)))
    return (
        "## Pair\n\n"
        + _table(("", "source", "target"), rows)
        + ("\n\nThe mapper refuses other weights, another tokenizer and another rotary description than these.")
    )


def _recipe(bundle: Bundle) -> str:
    spec, recipe, solve = bundle.spec, bundle.recipe, bundle.solve
    rows: list[tuple[str, Any]] = [
        *(
            (label, _joined(value_at(text, name) for text in _parts(value_at(recipe, "text"))))
            for label, name in (("text", "dataset"), ("its configuration", "config"), ("its revision", "revision"))
        ),
        *(
            (name.replace("_", " "), _joined(_parts(value_at(recipe, "options", name))))
            for name in ("num_sequences", "seq_len", "token_stride", "skip_tokens", "seed")
        ),
        ("tokens to fit", value_at(solve, "tokens", "fit")),
        ("tokens held out", value_at(solve, "tokens", "holdout")),
        ("source layers per target layer", value_at(solve, "options", "top_k")),
        ("penalty", value_at(solve, "options", "penalty")),
        ("support", spec.support),
        ("inputs", spec.inputs),
        ("gain", spec.gain),
        ("dtype of the weights", spec.dtype),
        ("size", f"{bundle.nbytes / 1e6:.1f} MB"),
        ("weights digest", f"`{bundle.weights_digest}`"),
        ("made with kvfit", spec.kvfit_version),
    ]
    return (
        "## Recipe\n\n"
        + _table(("", ""), [row for row in rows if row[1] is not None])
        + ("\n\nAll of it is in `recipe.json` and `solve.json`.")
    )


def _fit(bundle: Bundle) -> str:
    rows = []
    for kind in KINDS:
        layers = [layer for layer in bundle.spec.layers if layer.kind == kind]
        single = value_at(bundle.solve, "r2", kind, "single", "holdout")
        fit, holdout = (sum(getattr(layer, name) for layer in layers) / len(layers) for name in ("r2_fit", "r2_holdout"))
        worst = min(layers, key=lambda layer: layer.r2_holdout)
        rows.append((kind, single, holdout, fit, f"{worst.r2_holdout:.3f} (layer {worst.layer_index})"))
    header = ("", "best single source layer", "chosen layers", "chosen layers, fit split", "worst target layer")
    text = "## Fit\n\nR2, mean over target layers, on the holdout split unless it says otherwise.\n\n" + _table(header, rows)
    for kind in KINDS:
        text += _r2_map(bundle, kind)
    for name in sorted(bundle.digests):
        if name.endswith((".png", ".svg")):
            text += f"\n\n![{name.rsplit('.', 1)[0]}]({name})"
    return text


def _r2_map(bundle: Bundle, kind: Kind) -> str:
    """R2 of every single source layer for every target layer, one character each; nothing where it was not recorded."""
    values = value_at(bundle.solve, "probe", kind, "holdout")
    n_source, n_target = bundle.spec.source.n_layers, bundle.spec.target.n_layers
    if not (isinstance(values, list) and len(values) == n_target):
        return ""
    lines = []
    for layer_index, row in enumerate(values):
        if not (isinstance(row, list) and len(row) == n_source and all(isinstance(value, int | float) for value in row)):
            return ""
        cells = "".join(_LEVELS[min(8, max(0, int(9 * value)))] for value in row)
        lines.append(f"{layer_index:3d} |{cells}| best {max(range(n_source), key=row.__getitem__)}")
    return (
        f"\n\nR2 of single source layers for the {kind}: a row per target layer, a column per source layer,"
        " from 0 (blank) to 1 (full).\n\n```text\n" + "\n".join(lines) + "\n```"
    )


def _quality(bundle: Bundle) -> str:
    evaluation = bundle.evaluation
    if evaluation is None or evaluation["weights_digest"] != bundle.weights_digest:
        return "## Quality\n\nNot evaluated yet: run `kvfit evaluate` on this folder before you rely on it."
    arms = value_at(evaluation, "arms")
    arms = {name: row for name, row in arms.items() if isinstance(row, dict)} if isinstance(arms, dict) else {}
    order = [name for name in _ARMS if name in arms] + sorted(set(arms) - set(_ARMS))
    metrics = [name for name in _METRICS if any(row.get(name) is not None for row in arms.values())]
    meanings = _ARMS | {"handoff": _ARMS["handoff"].format(handoff=f"`{_judged(bundle)}`")}
    rows = [
        (f"`{name}`", *(arms[name].get(metric) for metric in metrics), _share(arms[name]), meanings.get(name)) for name in order
    ]
    header = ("arm", *(_METRICS[metric] for metric in metrics), "share of gap", "what it is")
    text = f"## Quality\n\nVerdict **{bundle.verdict}**{_reasons(evaluation)}.\n\n" + _table(header, rows)
    text += (
        "\n\nShare of gap: `(source - arm) / (source - native)` of NLL, in nats per token,"
        " with its paired bootstrap 95 % interval."
    )
    tokens, where = value_at(evaluation, "tokens"), value_at(evaluation, "text")
    if isinstance(tokens, dict):
        counts = ", ".join(f"{tokens[name]} {name}" for name in sorted(tokens))
        text += f"\n\nText: {_cell(where)} ({counts}). {_overlap(evaluation)}"
    transfer, prefill = value_at(evaluation, "milliseconds", "transfer"), value_at(evaluation, "milliseconds", "prefill")
    if isinstance(transfer, int | float) and isinstance(prefill, int | float) and transfer > 0:
        times = prefill / transfer
        text += f"\n\nLatency, median: transfer {transfer:.1f} ms, prefill {prefill:.1f} ms ({times:.1f} times as long)."
    return text


def _overlap(evaluation: dict[str, Any]) -> str:
    """Whether the mapper was fitted on what it was measured on: claimed only where it was looked up."""
    if value_at(evaluation, "overlap", "checked") is not True:
        return "Whether the mapper was fitted on some of it is not known: there is no record of the documents."
    left_out = value_at(evaluation, "overlap", "left_out")
    more = f"; {left_out} documents that they did see were left out" if type(left_out) is int and left_out else ""
    return f"Neither fit nor selection saw any of these documents{more}."


def _limits(bundle: Bundle, license: str | None) -> str:
    source, target = bundle.spec.source, bundle.spec.target
    lines = [
        "The mapped cache is an estimate: exact strings (numbers, names, code) from the moved context are recalled less"
        " reliably than after a prefill; `handoff(..., exact_tail=..., recompute=...)` buys them back.",
        "It holds for exactly these two models. Fine-tuned, merged or re-quantised versions need a fit of their own.",
        "Text unlike the calibration text, and contexts much longer than its sequences, were not measured here.",
    ]
    if license is None:
        lines.append(
            f"No licence is stated. The licences of {source.ref} and {target.ref} apply to what was computed from them."
        )
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _share(row: dict[str, Any]) -> str | None:
    share, interval = row.get("share_of_gap"), row.get("interval")
    if not isinstance(share, int | float):
        return None
    if isinstance(interval, list) and len(interval) == 2 and all(isinstance(value, int | float) for value in interval):
        return f"{share:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{share:.3f}"


def _reasons(evaluation: dict[str, Any]) -> str:
    reasons = evaluation.get("reasons")
    return ": " + "; ".join(map(_cell, reasons)) if isinstance(reasons, list) and reasons else ""


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Text for a table: numbers short, and nothing that would end a cell or begin HTML."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _yaml(text: str) -> str:
    plain = text.replace("-", "").replace("_", "").replace("/", "").replace(".", "")
    return (
        text
        if plain.isascii() and plain.isalpha() and text.lower() not in _YAML_WORDS
        else json.dumps(text, ensure_ascii=False)
    )


_YAML_WORDS = ("yes", "no", "true", "false", "on", "off", "null", "y", "n")


def _name(model: ModelSpec) -> str:
    return model.ref.rsplit("/", 1)[-1]


def _parts(value: Any) -> list[Any]:
    """A value of a recipe, or those of the captures that were merged."""
    merged = value_at(value, "merged")
    return merged if isinstance(merged, list) else [value]


def _joined(values: Iterable[Any]) -> Any:
    """One value as it is, several with commas between, None for none."""
    known = [value for value in values if value is not None]
    return ", ".join(map(str, known)) if len(known) > 1 else known[0] if known else None
