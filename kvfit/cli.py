"""The command line: parse, call one verb, print one line. The only place where errors become exit codes.

Exit 0; 1 a kvfit error; 2 usage; 3 refused by a gate. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from kvfit import __version__
from kvfit.errors import GateError, KvfitError

try:
    import click
except ModuleNotFoundError:  # the runtime alone has no command line
    sys.exit("kvfit: found no click, needed the extra `fit` for the command line: pip install 'kvfit-mappers[fit]'")

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", start=1)
    for name, base in ((letter, 1000), (f"{letter}b", 1000), (f"{letter}ib", 1024))
}


def _size(_context: click.Context, _option: click.Parameter, value: str) -> int:
    """Bytes, written as ``64MiB``, ``2GiB`` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise click.BadParameter(f"found {value!r}, needed a size such as 64MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _top_k(_context: click.Context, _option: click.Parameter, value: str) -> int | str:
    if value in ("all", "auto"):
        return value
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f"found {value!r}, needed a number of 1 or more, all or auto")
    return int(value)


def _penalty(_context: click.Context, _option: click.Parameter, value: str) -> float | str:
    if value == "auto":
        return value
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise click.BadParameter(f"found {value!r}, needed a number of 0 or more, or auto")
    return number


def _lengths(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() and int(part) > 1 for part in parts):
        raise click.BadParameter(f"found {value!r}, needed numbers of 2 or more with commas between, such as 256,1024")
    return tuple(int(part) for part in parts)


def _names(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(part.strip() for part in value.split(","))


def _named(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, given any number of times."""
    found: dict[str, str] = {}
    for value in values:
        name, _, rest = value.partition("=")
        if not name or not rest:
            raise click.BadParameter(f"found {value!r}, needed {option.metavar}")
        if name in found:
            raise click.BadParameter(f"found {name} twice, needed a name of its own for each")
        found[name] = rest
    return found


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110})
@click.version_option(__version__, prog_name="kvfit")
def cli() -> None:
    """Let one language model continue from another model's KV cache.

    The usual order is: capture, solve, evaluate, push. `kvfit demo` does the first three on a built-in pair.
    """


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of a line.")


def _say(result: Any, as_json: bool) -> None:
    click.echo(json.dumps(result.to_json(), allow_nan=False) if as_json else str(result))


def _loading_options(function: F) -> F:
    for option in (
        click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories."),
        click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own."),
        click.option("--device-map", help="Spread each model over devices with accelerate, for example auto."),
        click.option("--target-device", help="Device of the target; default: the first GPU, else the CPU."),
        click.option("--source-device", help="Device of the source; default: the first GPU, else the CPU."),
        click.option("--dtype", default="auto", help="auto (as stored), float32, bfloat16, float16."),
    ):
        function = option(function)
    return function


def _loading(values: dict[str, Any]) -> tuple[Any, Any]:
    from kvfit.fit import models

    shared = {name: values.pop(name) for name in ("dtype", "device_map", "attn_implementation", "trust_remote_code")}
    source, target = values.pop("source_device"), values.pop("target_device")
    return models.Options(device=source, **shared), models.Options(device=target, **shared)


def _text_options(default: str) -> Callable[[F], F]:
    def add(function: F) -> F:
        for option in (
            click.option("--text-column", default="text", help="Column that holds the text."),
            click.option("--split", default="train", help="Split of the dataset."),
            click.option("--dataset-revision", help="Commit, tag or branch of a Hub dataset."),
            click.option("--dataset-config", help="Configuration of a Hub dataset."),
            click.option(
                "--dataset",
                default=default,
                help="Hub dataset, or .jsonl, .parquet, .txt file or folder, or demo:text, demo:heldout.",
            ),
        ):
            function = option(function)
        return function

    return add


def _text(values: dict[str, Any]) -> Any:
    from kvfit.fit.text import TextOptions

    return TextOptions(
        values.pop("dataset"),
        values.pop("dataset_config"),
        values.pop("dataset_revision"),
        values.pop("split"),
        values.pop("text_column"),
    )


@cli.command()
@click.option(
    "--out", default="demo-out", type=click.Path(), help="Folder for the store, the bundle and the picture; must not exist."
)
@json_option
def demo(out: str, as_json: bool) -> None:
    """Capture, solve, evaluate and hand over on the built-in pair, offline."""
    from kvfit.demo.run import run_demo

    _say(run_demo(out), as_json)


@cli.command()
@click.argument("source")
@click.argument("target")
@click.option("--out", required=True, type=click.Path(), help="The store to write, by habit NAME.zarr.")
@_text_options("HuggingFaceFW/fineweb-edu")
@click.option("--num-sequences", default=500, help="Sequences to run, both splits together.")
@click.option("--seq-len", default=1024, help="Tokens of a sequence.")
@click.option("--token-stride", default=4, help="Keep one token of this many for the statistics.")
@click.option("--skip-tokens", default=0, help="First tokens of each sequence to leave out.")
@click.option("--holdout", default=0.1, help="Share of the sequences for choosing and reporting.")
@click.option("--seed", default=0, help="Shifts which sequences those are.")
@click.option("--pack", is_flag=True, help="Join documents and cut them; default: one sequence per document.")
@click.option("--inputs", type=click.Choice(["same", "both"]), default="same", help="both: also keep keys by values.")
@click.option("--stats-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Of the stored sums.")
@click.option(
    "--memory-budget", callback=_size, metavar="SIZE", default="2GiB", help="Memory for statistics, beyond the models."
)
@click.option("--batch-size", default=8, help="Sequences per forward pass.")
@click.option("--source-revision", help="Commit, tag or branch of the source.")
@click.option("--target-revision", help="Commit, tag or branch of the target.")
@_loading_options
@click.option("--resume", is_flag=True, help="Go on with an interrupted store.")
@json_option
def capture(source: str, target: str, out: str, as_json: bool, **values: Any) -> None:
    """Run SOURCE and TARGET over the same text and accumulate their statistics in a store."""
    from kvfit.fit import capture as verb

    text, loading = _text(values), _loading(values)
    revisions = (values.pop("source_revision"), values.pop("target_revision"))
    rest = {name: values.pop(name) for name in ("memory_budget", "batch_size", "resume")}
    _say(
        verb.capture(
            source, target, out, text=text, options=verb.Options(**values), loading=loading, revisions=revisions, **rest
        ),
        as_json,
    )


@cli.command()
@click.argument("source")
@click.argument("target")
@click.option("--num-sequences", default=500, help="Sequences to run.")
@click.option("--seq-len", default=1024, help="Tokens of a sequence.")
@click.option("--token-stride", default=4, help="Keep one token of this many.")
@click.option("--skip-tokens", default=0, help="First tokens of each sequence to leave out.")
@click.option("--top-k", callback=_top_k, metavar="N|all", default="all", help="Source layers that each target layer reads.")
@click.option(
    "--support", type=click.Choice(["full", "head"]), default="full", help="Read all source heads, or the matching one."
)
@click.option(
    "--inputs", type=click.Choice(["same", "both"]), default="same", help="both: predict each kind from keys and values."
)
@click.option("--stats-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Of the stored sums.")
@click.option(
    "--memory-budget", callback=_size, metavar="SIZE", default="2GiB", help="Memory for statistics, beyond the models."
)
@click.option("--batch-size", default=8, help="Sequences per forward pass.")
@click.option("--device", default=None, help="Where bare products are timed, for the times; the first GPU, else the CPU.")
@click.option("--trust-remote-code", is_flag=True, help="Read configurations that carry code.")
@json_option
def plan(source: str, target: str, as_json: bool, device: str | None, **values: Any) -> None:
    """Print what capturing and solving SOURCE to TARGET will take. Reads configurations only, and times a few products.

    SOURCE and TARGET may also be geometries by name: qwen3-8b, qwen3-14b, qwen3-32b, llama-3.1-8b, llama-3.1-70b,
    ministral-3-3b, ministral-3-8b, ministral-3-14b.
    """
    from kvfit.fit import plan as verb

    _say(replace(verb.plan(source, target, **values), rates=verb.measure_rates(device)), as_json)


@cli.command()
@click.argument("stores", nargs=-1, required=True, type=click.Path())
@click.option("--out", required=True, type=click.Path(), help="The merged store; must not exist.")
def merge(stores: tuple[str, ...], out: str) -> None:
    """Merge STORES that were captured with one recipe into one."""
    from kvfit.fit import merge as verb

    merged = verb.merge(stores, out)
    click.echo(f"{out}: {merged.count('fit')} fit and {merged.count('holdout')} holdout tokens from {len(stores)} stores")


@cli.command()
@click.argument("store", type=click.Path())
@click.argument("grid", nargs=-1)
@click.option("--out", required=True, type=click.Path(), help="The bundle's folder; must not exist.")
@click.option(
    "--top-k", callback=_top_k, metavar="N|all|auto", default="all", help="Source layers that each target layer reads."
)
@click.option("--select", type=click.Choice(["independent", "greedy"]), default="independent", help="How they are chosen.")
@click.option("--shared-layers", is_flag=True, help="Keys and values read the same source layers.")
@click.option(
    "--penalty",
    callback=_penalty,
    metavar="NUMBER|auto",
    default="auto",
    help="Ridge penalty; auto chooses per kind and layer on the holdout split.",
)
@click.option(
    "--penalty-scale",
    type=click.Choice(["mean-variance", "covariance", "scatter"]),
    default="mean-variance",
    help="What the penalty multiplies.",
)
@click.option(
    "--support", type=click.Choice(["full", "head"]), default="full", help="Read all source heads, or the matching one."
)
@click.option(
    "--inputs", type=click.Choice(["same", "both"]), default="same", help="both: predict each kind from keys and values."
)
@click.option(
    "--gain",
    type=click.Choice(["variance", "head", "none"]),
    default="variance",
    help="Give predictions the target's variance.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", help="Of the stored weights."
)
@click.option(
    "--recipe",
    type=click.Choice(["heo2026"]),
    help="A recipe of the literature, in place of the defaults of the options above.",
)
@click.option("--device", default="cpu", help="Where the linear algebra runs.")
@click.option("--memory-budget", callback=_size, default="4GiB", metavar="SIZE", help="Memory for the linear algebra.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "float64", "mixed"]),
    default="auto",
    help="mixed: float32 factors, float64 refinement; auto: mixed on GPUs that are slow at float64.",
)
@click.option(
    "--sweep",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Write a table of R2, size and speed instead: top_k, penalty, gain, support, select; more of them may follow it.",
)
@click.option("--plots", is_flag=True, help="Also draw the R2 map and the curves per layer into the bundle.")
@json_option
def solve(
    store: str,
    grid: tuple[str, ...],
    out: str,
    recipe: str | None,
    sweep: tuple[str, ...],
    plots: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Solve a map from the statistics in STORE and write it as a bundle. No model runs.

    With --sweep, solve every combination and write a table and its picture into the folder --out:
    kvfit solve pair.zarr --out sweep --sweep top_k=1,2,4,8,all penalty=1e-4,1e-3,1e-2,1e-1
    """
    import dataclasses

    from kvfit.fit import solve as verb

    if grid and not sweep:
        raise click.UsageError(f"found {' '.join(grid)} after STORE, needed nothing there: only --sweep takes more")
    running = {name: values.pop(name) for name in ("device", "memory_budget", "precision")}
    if recipe:
        context = click.get_current_context()
        defaults = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
        values = {name: value for name, value in values.items() if context.get_parameter_source(name) not in defaults}
    options = dataclasses.replace(verb.RECIPES[recipe] if recipe else verb.Options(), **values)
    if sweep:
        from kvfit.fit import sweep as sweeping

        try:
            wanted = sweeping.parse_grid([*sweep, *grid])
        except KvfitError as error:
            raise click.UsageError(str(error)) from None
        _say(sweeping.sweep(store, out, wanted, options=options, **running), as_json)
        return
    _say(verb.solve(store, out, options=options, plots=plots, **running), as_json)


@cli.command()
@click.argument("bundle", type=click.Path())
@click.option("--source", help="Ref of the source; default: the one that the bundle names.")
@click.option("--target", help="Ref of the target; default: the one that the bundle names.")
@_text_options("demo:heldout")
@click.option(
    "--text",
    "texts",
    multiple=True,
    callback=_named,
    metavar="NAME=DATASET",
    help="A further text of another kind, reported apart; may be given several times.",
)
@click.option(
    "--prefix", default="384", callback=_lengths, metavar="N[,N...]", help="Tokens of context; several lengths in turn."
)
@click.option("--continuation", default=128, help="Tokens scored after it.")
@click.option("--documents", default=48, help="Documents to use.")
@click.option("--probes", default=40, help="Recall questions of each kind; 0 for none.")
@click.option(
    "--probe-kinds", callback=_names, metavar="KIND[,KIND...]", help="Of names, list, sentence, two-hop; default: all."
)
@click.option("--greedy", default=64, help="Tokens of the greedy continuation that are compared; 0 for none.")
@click.option("--diagnose", default=8, help="Documents on which layers and heads are diagnosed; 0 for none.")
@click.option("--turns", default=0, help="Turns of the target in a conversation that goes back and forth; 0 for none.")
@click.option("--exact-head", default=1, help="First tokens that the target runs itself, in the arm that is judged.")
@click.option("--exact-tail", default=0, help="Last tokens of the prefix that it runs itself.")
@click.option("--recompute", default=0.0, help="Share of the prefix that it recomputes, guided by the source.")
@click.option("--repeats", default=30, help="Timed runs after 10 that are not counted; 0 for no times.")
@click.option("--threshold", "thresholds", multiple=True, callback=_named, metavar="NAME=NUMBER", help="Another threshold.")
@click.option("--batch-size", default=8, help="Documents per forward pass.")
@_loading_options
@json_option
def evaluate(bundle: str, source: str | None, target: str | None, as_json: bool, **values: Any) -> None:
    """Measure BUNDLE on held-out text, with controls, and write the verdict into it. Exit 3 on fail."""
    from kvfit.fit import evaluate as verb
    from kvfit.fit.text import TextOptions

    text, loading = _text(values), _loading(values)
    texts = {name: TextOptions(dataset) for name, dataset in values.pop("texts").items()}
    values["thresholds"] = verb.Thresholds.changed(values["thresholds"])
    values = {name: value for name, value in values.items() if value is not None}
    options = verb.Options(**values)
    found = verb.evaluate(bundle, source=source, target=target, text=text, texts=texts, options=options, loading=loading)
    _say(found, as_json)
    if found.verdict == "fail":
        raise GateError(f"{bundle}: found verdict fail, needed pass or unknown: see evaluation.json for the reasons")


@cli.command()
@click.argument("bundle", type=click.Path())
@click.option("--to", required=True, help="org/name on the Hub, or a local folder written ./folder.")
@click.option("--tag", help="Version, such as v1; default: the next one.")
@click.option("--private", is_flag=True, help="Create the repository as private.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--license", "license_", metavar="ID", help="Licence of the mapper, such as apache-2.0, for the card.")
@click.option("--registry", type=click.Path(), help="Also write the registry entry to propose into this folder.")
@click.option("--any", "any_", is_flag=True, help="Push a bundle whose verdict is fail, too.")
@click.option("--dry-run", is_flag=True, help="Check everything and print what would happen.")
@json_option
def push(bundle: str, license_: str | None, any_: bool, as_json: bool, registry: str | None, **values: Any) -> None:
    """Publish BUNDLE: everything checked first, one commit, then the tag. Safe to repeat. Exit 3 when its verdict is fail."""
    from pathlib import Path

    from kvfit import push as verb

    place = None if registry is None else Path(registry)
    _say(verb.push(bundle, license=license_, require="any" if any_ else "pass", registry=place, **values), as_json)


@cli.command()
@click.argument("bundle")
@click.option("--format", type=click.Choice(["semantic-router"]), required=True, help="The layout to write.")
@click.option("--out", required=True, type=click.Path(), help="The folder to write; must not exist.")
@click.option("--bundle-version", default=1, help="Number of this fit of the pair, the end of its mapper id.")
@click.option("--any", "any_", is_flag=True, help="Export a bundle whose verdict is fail, too.")
@json_option
def export(bundle: str, out: str, any_: bool, as_json: bool, **values: Any) -> None:
    """Write BUNDLE in the layout of another program. Exit 3 when its verdict is fail."""
    from kvfit import export_bundle as verb

    _say(verb.export_bundle(bundle, out, require="any" if any_ else "pass", **values), as_json)


@cli.command("import")
@click.argument("folder", type=click.Path())
@click.option("--out", required=True, type=click.Path(), help="The bundle's folder; must not exist.")
@click.option("--source", help="The source model, for a folder that kvfit did not write.")
@click.option("--target", help="The target model, for a folder that kvfit did not write.")
@click.option("--device", help="Where a model is loaded; default: the first GPU, else the CPU.")
@click.option("--device-map", help="Spread it over devices with accelerate, for example auto.")
@click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories.")
@json_option
def import_(folder: str, out: str, source: str | None, target: str | None, as_json: bool, **values: Any) -> None:
    """Make a bundle of FOLDER, a mapper in semantic-router's layout. Its verdict is unknown until it is evaluated.

    A folder that kvfit did not write only names its two models: --source and --target say where to load them from.
    """
    from kvfit.fit import import_bundle as verb
    from kvfit.fit.models import Options

    if (source is None) != (target is None):
        raise click.UsageError("found one of --source and --target, needed both or neither")
    _say(verb.import_bundle(folder, out, source=source, target=target, options=Options(**values)), as_json)


@cli.command("list")
@click.option("--source", help="Only mappers from this model.")
@click.option("--target", help="Only mappers to this model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array on stdout instead of lines.")
def list_(source: str | None, target: str | None, as_json: bool) -> None:
    """List the published mappers in the registry."""
    from kvfit.registry import list_mappers

    entries = list_mappers(source, target)
    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in entries], allow_nan=False))
    else:
        click.echo("\n".join(map(str, entries)) or "no such mapper is registered")


@cli.command()
@click.argument("ref")
@click.option("--revision", help="Commit, tag or branch of a Hub repository.")
@click.option("--local-files-only", is_flag=True, help="Never ask the Hub.")
@json_option
def verify(ref: str, as_json: bool, **values: Any) -> None:
    """Check all of the bundle REF: files, digests, spec, shapes, and that every weight is finite."""
    from kvfit import verify as verb

    _say(verb.verify(ref, **values), as_json)


@cli.command()
@click.argument("model")
@click.option("--dtype", default="auto", help="auto (as stored), float32, bfloat16, float16.")
@click.option("--device", help="Where to load it; default: the first GPU, else the CPU.")
@click.option("--device-map", help="Spread it over devices with accelerate, for example auto.")
@click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the model's repository.")
@json_option
def inspect(model: str, as_json: bool, **values: Any) -> None:
    """Print what kvfit sees in MODEL, and whether it can map it. The model is loaded and run on a few tokens."""
    from kvfit.fit import inspect as verb
    from kvfit.fit.models import Options

    _say(verb.inspect_model(model, options=Options(**values)), as_json)


@cli.command()
@json_option
def env(as_json: bool) -> None:
    """Print versions and devices, to paste into a bug report."""
    from kvfit.environment import environment

    _say(environment(), as_json)


def main() -> None:
    """The command ``kvfit``."""
    if not sys.stderr.isatty():
        # Bars are for people. tqdm reads this when it is first imported, also for the bars of the libraries that use it.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except GateError as error:
        click.echo(f"kvfit: {error}", err=True)
        sys.exit(3)
    except KvfitError as error:
        click.echo(f"kvfit: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("kvfit: interrupted", err=True)
        sys.exit(130)
