"""The command line: parse, call one verb, print one result."""

from __future__ import annotations

import json
import sys
from typing import Any

from kvfit import __version__
from kvfit.errors import GateError

try:
    import click
except ModuleNotFoundError:  # the runtime alone has no command line
    sys.exit("kvfit: found no click, needed the extra `fit` for the command line: pip install 'kvfit-mappers[fit]'")

from kvfit.cli.arguments import (
    DTYPE,
    evaluate_options,
    json_option,
    lags,
    loading_options,
    numbers,
    path,
    ref,
    seconds,
    size_or_auto,
    solve_options,
    text_options,
    top_k,
)
from kvfit.cli.console import Verbs, run, say, say_text


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
)
@click.version_option(__version__, prog_name="kvfit")
def cli() -> None:
    """Let one language model continue from another model's KV cache.

    The usual order is: capture, solve, evaluate, push. `kvfit demo` does the first three on a built-in pair.
    """


def _loading(values: dict[str, Any]) -> tuple[Any, Any]:
    from kvfit.fit.capture import models

    shared = {name: values.pop(name) for name in ("dtype", "device_map", "attn_implementation", "trust_remote_code")}
    source, target = values.pop("source_device"), values.pop("target_device")
    return models.Options(device=source, **shared), models.Options(device=target, **shared)


def _text(values: dict[str, Any]) -> Any:
    from kvfit.fit.capture.text import TextOptions

    names = ("dataset", "dataset_config", "dataset_revision", "split", "text_column")
    return TextOptions(*(values.pop(name) for name in names))


def _texts(values: dict[str, Any]) -> Any:
    """The texts of a capture, each with its share."""
    from kvfit.fit.capture.text import DEFAULT_MIX, mix

    words = values["dataset"] or DEFAULT_MIX
    return mix(words, _text(values))


@cli.command()
@click.option("--out", default="demo-out", type=path, help="Folder for the store, the bundle and the picture; must not exist.")
@json_option
def demo(out: str, as_json: bool) -> None:
    """Capture, solve, evaluate and hand over on the built-in pair, offline."""
    from kvfit.cli.demo import run_demo

    say(run_demo(out), as_json)


@cli.command()
@click.argument("source", type=ref)
@click.argument("target", type=ref)
@click.option("--out", required=True, type=path, help="The store to write, by habit NAME.zarr.")
@text_options(None)
@click.option("--num-sequences", default=500, help="Sequences to run, both splits together.")
@click.option("--seq-len", default=1024, help="Tokens of a sequence.")
@click.option("--token-stride", default=4, help="Keep one token of this many for the statistics.")
@click.option("--skip-tokens", default=1, help="First tokens of each sequence to leave out.")
@click.option("--holdout", default=0.1, help="Share of the sequences for choosing and reporting.")
@click.option("--seed", default=0, help="Shifts which sequences those are.")
@click.option("--pack", is_flag=True, help="Join documents and cut them; default: one sequence per document.")
@click.option("--inputs", type=click.Choice(["same", "both"]), default="both", help="both: also keep keys by values.")
@click.option(
    "--lexical", callback=lags, metavar="LAGS", default="auto",
    help="0,1,2: the target's first layer of a token and of the two before as inputs; none; auto: where it can.",
)  # fmt: skip
@click.option("--stats-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Of the stored sums.")
@click.option(
    "--memory-budget", callback=size_or_auto, metavar="SIZE|auto", default="auto",
    help="Memory for statistics, beyond the models; auto: half of what is free. What fits stays in memory.",
)  # fmt: skip
@click.option("--snapshot-every", callback=seconds, metavar="TIME", default="10min", help="Between writes of such statistics.")
@click.option("--stats-device", help="Device that sums the statistics; default: the source's.")
@click.option("--batch-size", default=8, help="Sequences per forward pass.")
@click.option("--source-revision", help="Commit, tag or branch of the source.")
@click.option("--target-revision", help="Commit, tag or branch of the target.")
@loading_options
@click.option("--resume", is_flag=True, help="Go on with an interrupted store; begin if there is none.")
@json_option
def capture(source: str, target: str, out: str, as_json: bool, **values: Any) -> None:
    """Run SOURCE and TARGET over the same text and accumulate their statistics in a store."""
    from kvfit.fit.capture import capture as verb
    from kvfit.fit.capture.ranks import Ranks

    text, loading = _texts(values), _loading(values)
    revisions = (values.pop("source_revision"), values.pop("target_revision"))
    rest = {name: values.pop(name) for name in ("memory_budget", "batch_size", "resume", "stats_device")}
    rest["snapshot_seconds"] = values.pop("snapshot_every")
    done = verb.capture(
        source, target, out, text=text, options=verb.Options(**values), loading=loading, revisions=revisions, **rest
    )
    if Ranks.from_environment().rank == 0:  # of the processes that torchrun started one has the word
        say(done, as_json)


@cli.command()
@click.argument("source", type=ref)
@click.argument("target", type=ref)
@click.option("--num-sequences", default=500, help="Sequences to run.")
@click.option("--seq-len", default=1024, help="Tokens of a sequence.")
@click.option("--token-stride", default=4, help="Keep one token of this many.")
@click.option("--skip-tokens", default=1, help="First tokens of each sequence to leave out.")
@click.option("--top-k", callback=top_k, metavar="N|all", default="all", help="Source layers that each target layer reads.")
@click.option(
    "--support", type=click.Choice(["full", "head"]), default="full", help="Read all source heads, or the matching one."
)
@click.option(
    "--inputs", type=click.Choice(["same", "both"]), default="both", help="both: predict each kind from keys and values."
)
@click.option("--lexical", callback=lags, metavar="LAGS", default="auto", help="Lags of lexical inputs, as for capture.")
@click.option("--stats-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Of the stored sums.")
@click.option(
    "--memory-budget", callback=size_or_auto, metavar="SIZE|auto", default="auto", help="For statistics, as for capture."
)
@click.option("--batch-size", default=8, help="Sequences per forward pass.")
@click.option(
    "--hardware",
    type=click.Choice(["this", "h100", "h200", "a100", "l40s"]),
    default="this",
    help="Whose times: half of a card's published peaks, or this machine's, measured.",
)
@click.option("--gpus", type=click.IntRange(1), default=1, help="Cards that share capture and evaluation.")
@click.option("--device", default=None, help="What is timed of this machine; the first GPU, else the CPU.")
@click.option("--trust-remote-code", is_flag=True, help="Read configurations that carry code.")
@json_option
def plan(source: str, target: str, as_json: bool, device: str | None, hardware: str, **values: Any) -> None:
    """Print what capturing and solving SOURCE to TARGET will take, and from which length on a map will pay.

    Reads no weights. SOURCE and TARGET may also be geometries by name: qwen3-8b, qwen3-14b, qwen3-32b, llama-3.1-8b,
    llama-3.1-70b, ministral-3-3b, ministral-3-8b, ministral-3-14b.
    """
    from kvfit.fit import hardware as machines
    from kvfit.fit import plan as verb
    from kvfit.fit.capture.capture import Options as CaptureOptions
    from kvfit.fit.solve.options import Options as SolveOptions
    from kvfit.fit.stats.accumulate import free_share

    if values["memory_budget"] == "auto":
        values["memory_budget"] = free_share()
    rest = {name: values.pop(name) for name in ("memory_budget", "batch_size", "gpus", "trust_remote_code")}
    solving = SolveOptions(top_k=values.pop("top_k"), support=values.pop("support"))
    options = verb.Options(capture=CaptureOptions(**values), solve=solving, **rest)
    verb.plan(source, target, options)  # what is refused is refused before anything is timed
    rates = machines.measure_rates(device) if hardware == "this" else machines.published_rates(hardware)
    say(verb.plan(source, target, options, rates), as_json)


@cli.command()
@click.argument("stores", nargs=-1, required=True, type=path)
@click.option("--out", required=True, type=path, help="The merged store; must not exist.")
@click.option("--weights", callback=numbers, metavar="W,W,...", help="How much each store counts; default: 1 each.")
@json_option
def merge(stores: tuple[str, ...], out: str, weights: tuple[float, ...] | None, as_json: bool) -> None:
    """Merge STORES that were captured with one recipe into one."""
    from kvfit.fit.stats import merge as verb

    merged = verb.merge(stores, out, weights)
    tokens = {split: merged.count(split) for split in ("fit", "holdout")}
    if as_json:
        say_text(json.dumps({"store": out, "stores": list(stores), "tokens": tokens}, allow_nan=False))
    else:
        say_text(f"{out}: {tokens['fit']} fit and {tokens['holdout']} holdout tokens from {len(stores)} stores")


@cli.command()
@click.argument("store", type=path)
@click.argument("grid", nargs=-1)
@click.option("--out", required=True, type=path, help="The bundle's folder; must not exist.")
@solve_options
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

    from kvfit.fit.solve import solve as verb

    if grid and not sweep:
        raise click.UsageError(f"found {' '.join(grid)} after STORE, needed nothing there: only --sweep takes more")
    running = {name: values.pop(name) for name in ("device", "memory_budget", "precision")}
    if recipe:
        context = click.get_current_context()
        defaults = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
        values = {name: value for name, value in values.items() if context.get_parameter_source(name) not in defaults}
    options = dataclasses.replace(verb.RECIPES[recipe] if recipe else verb.Options(), **values)
    if sweep:
        from kvfit.fit.solve import sweep as sweeping

        wanted = sweeping.parse_grid([*sweep, *grid])
        say(sweeping.sweep(store, out, wanted, options=options, **running), as_json)
        return
    say(verb.solve(store, out, options=options, plots=plots, **running), as_json)


@cli.command()
@click.argument("bundle", type=path)
@click.option("--out", required=True, type=path, help="The refined bundle's folder; must not exist.")
@click.option("--source", type=ref, help="Ref of the source; default: the one that the bundle names.")
@click.option("--target", type=ref, help="Ref of the target; default: the one that the bundle names.")
@click.option("--dataset", "datasets", multiple=True, type=ref, help="REF or REF=SHARE, text to learn from; may be repeated.")
@click.option("--text-column", default="text", help="Column that holds the text.")
@click.option("--num-sequences", default=64, help="Sequences to learn from and to stop by.")
@click.option("--seq-len", default=512, help="Tokens of a sequence.")
@click.option("--holdout", default=0.25, help="Share of the sequences that says when to stop and whether the result is better.")
@click.option("--rank", default=2048, help="Most directions of its inputs that each map's correction reads.")
@click.option("--steps", default=200, help="Most steps of training.")
@click.option(
    "--learning-rate", default=0.02, help="Of Adam: the most that a step moves an output, in its standard deviations."
)
@click.option("--batch-size", default=4, help="Sequences of a step.")
@click.option("--seed", default=0, help="Of batches and lengths.")
@loading_options
@json_option
def refine(
    bundle: str, out: str, source: str | None, target: str | None, datasets: tuple[str, ...], as_json: bool, **values: Any
) -> None:
    """Train BUNDLE's maps through the frozen target for a few hundred steps. Writes a new bundle only if it is better."""
    from kvfit.cli.fit import local_refs
    from kvfit.fit.capture.text import DEFAULT_MIX, TextOptions, mix
    from kvfit.fit.refine import refine as verb

    column, loading = values.pop("text_column"), _loading(values)
    texts = mix(datasets or DEFAULT_MIX, TextOptions(column=column))
    training = {name: values.pop(name) for name in ("steps", "learning_rate", "batch_size", "seed")}
    options = verb.Options(**values, schedule=verb.Schedule(**training))
    remembered = local_refs(bundle)
    source, target = source or remembered[0], target or remembered[1]
    say(verb.refine(bundle, out, texts=texts, source=source, target=target, options=options, loading=loading), as_json)


@cli.command()
@click.argument("bundle", type=path)
@click.option("--source", type=ref, help="Ref of the source; default: the one that the bundle names.")
@click.option("--target", type=ref, help="Ref of the target; default: the one that the bundle names.")
@text_options("demo:heldout")
@evaluate_options
@loading_options
@json_option
def evaluate(bundle: str, source: str | None, target: str | None, as_json: bool, **values: Any) -> None:
    """Measure BUNDLE on held-out text, with controls, and write the verdict into it. Exit 3 on fail."""
    from kvfit.cli.fit import local_refs
    from kvfit.fit.capture.text import TextOptions
    from kvfit.fit.evaluate import evaluate as verb

    text, loading = _text(values), _loading(values)
    remembered = local_refs(bundle)
    source, target = source or remembered[0], target or remembered[1]
    texts = {name: TextOptions(dataset, column=text.column) for name, dataset in values.pop("texts").items()}
    values["thresholds"] = verb.Thresholds.changed(values["thresholds"])
    values = {name: value for name, value in values.items() if value is not None}
    options = verb.Options(**values)
    found = verb.evaluate(bundle, source=source, target=target, text=text, texts=texts, options=options, loading=loading)
    say(found, as_json)
    if found.verdict == "fail":
        raise GateError(f"{bundle}: found verdict fail, needed pass or unknown: see evaluation.json for the reasons")


@cli.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True})
@click.argument(
    "words",
    nargs=-1,
    metavar="SOURCE TARGET [OPTIONS OF THE PARTS]",
    type=click.UNPROCESSED,
    shell_complete=path.shell_complete,
)
@click.option("--out", type=path, help="The bundle's folder. The store is kept beside it, in OUT.fit; default: fit-out/bundle.")
@click.option("--config", type=path, help="A fit.yaml with models and options; what is given here too goes before it.")
@json_option
def fit(words: tuple[str, ...], out: str | None, config: str | None, as_json: bool) -> None:
    """Capture, solve, evaluate and, with --to, push: the whole job for SOURCE and TARGET. Run it again to go on.

    Takes every option of these commands. A name that several have means capture's; write --solve-NAME, --evaluate-NAME or
    --push-NAME for the others, for example --evaluate-dataset heldout.jsonl. Models are loaded for evaluate as for capture.
    The description of the job travels in the bundle as fit.yaml: kvfit fit --config bundle/fit.yaml repeats it.
    """
    from kvfit.cli import fit as verb

    commands = {name: cli.commands[name] for name in (*verb.PARTS, "plan")}
    say(verb.run_fit(verb.described(words, config, commands), out or "fit-out/bundle", commands), as_json)


@cli.command()
@click.argument("bundle", type=path)
@click.option("--to", required=True, type=ref, help="org/name on the Hub, or a local folder written ./folder.")
@click.option("--tag", help="Version, such as v1; default: the next one.")
@click.option("--private", is_flag=True, help="Create the repository as private.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--license", "license_", metavar="ID", help="Licence of the mapper, such as apache-2.0, for the card.")
@click.option("--registry", type=path, help="Also write the registry's entry into this folder, made if missing.")
@click.option("--any", "any_", is_flag=True, help="Push a bundle whose verdict is fail, too.")
@click.option("--dry-run", is_flag=True, help="Check everything and print what would happen.")
@json_option
def push(bundle: str, license_: str | None, any_: bool, as_json: bool, registry: str | None, **values: Any) -> None:
    """Publish BUNDLE: everything checked first, one commit, then the tag. Safe to repeat. Exit 3 when its verdict is fail."""
    from pathlib import Path

    from kvfit.hub import push as verb

    place = None if registry is None else Path(registry)
    say(verb.push(bundle, license=license_, require="any" if any_ else "pass", registry=place, **values), as_json)


@cli.command()
@click.argument("bundle", type=ref)
@click.option("--format", type=click.Choice(["semantic-router"]), required=True, help="The layout to write.")
@click.option("--out", required=True, type=path, help="The folder to write; must not exist.")
@click.option("--bundle-version", default=1, help="Number of this fit of the pair, the end of its mapper id.")
@click.option("--any", "any_", is_flag=True, help="Export a bundle whose verdict is fail, too.")
@json_option
def export(bundle: str, out: str, any_: bool, as_json: bool, **values: Any) -> None:
    """Write BUNDLE in the layout of another program. Exit 3 when its verdict is fail."""
    from kvfit.interop import export_bundle as verb

    say(verb.export_bundle(bundle, out, require="any" if any_ else "pass", **values), as_json)


@cli.command("import")
@click.argument("folder", type=path)
@click.option("--out", required=True, type=path, help="The bundle's folder; must not exist.")
@click.option("--source", type=ref, help="The source model, for a folder that kvfit did not write.")
@click.option("--target", type=ref, help="The target model, for a folder that kvfit did not write.")
@click.option("--device", help="Where a model is loaded; default: the first GPU, else the CPU.")
@click.option("--device-map", help="Spread it over devices with accelerate, for example auto.")
@click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories.")
@json_option
def import_(folder: str, out: str, source: str | None, target: str | None, as_json: bool, **values: Any) -> None:
    """Make a bundle of FOLDER, a mapper in semantic-router's layout. Its verdict is unknown until it is evaluated.

    A folder that kvfit did not write only names its two models: --source and --target say where to load them from.
    """
    from kvfit.fit.capture.models import Options
    from kvfit.interop import import_bundle as verb

    if (source is None) != (target is None):
        raise click.UsageError("found one of --source and --target, needed both or neither")
    say(verb.import_bundle(folder, out, source=source, target=target, options=Options(**values)), as_json)


@cli.command("list")
@click.option("--source", help="Only mappers from this model.")
@click.option("--target", help="Only mappers to this model.")
@click.option("--registry", type=path, help="The folder of a registry of your own; default: the one that came with kvfit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array on stdout instead of lines.")
def list_(source: str | None, target: str | None, registry: str | None, as_json: bool) -> None:
    """List the published mappers in the registry."""
    from pathlib import Path

    from kvfit.hub.registry import list_mappers

    entries = list_mappers(source, target, folder=None if registry is None else Path(registry))
    if as_json:
        say_text(json.dumps([entry.to_json() for entry in entries], allow_nan=False))
    else:
        say_text("\n".join(map(str, entries)) or "no such mapper is registered")


@cli.command()
@click.argument("ref", type=ref)
@click.option("--revision", help="Commit, tag or branch of a Hub repository.")
@click.option("--local-files-only", is_flag=True, help="Never ask the Hub.")
@json_option
def verify(ref: str, as_json: bool, **values: Any) -> None:
    """Check all of the bundle REF: files, digests, spec, shapes, and that every weight is finite."""
    from kvfit.hub import verify as verb

    say(verb.verify(ref, **values), as_json)


@cli.command()
@click.argument("model", type=ref)
@click.option("--dtype", type=DTYPE, default="auto", help="auto: as stored.")
@click.option("--device", help="Where to load it; default: the first GPU, else the CPU.")
@click.option("--device-map", help="Spread it over devices with accelerate, for example auto.")
@click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the model's repository.")
@json_option
def inspect(model: str, as_json: bool, **values: Any) -> None:
    """Print what kvfit sees in MODEL, and whether it can map it. The model is loaded and run on a few tokens.

    Exit 3 when it cannot.
    """
    from kvfit.fit.capture import inspect as verb
    from kvfit.fit.capture.models import Options

    found = verb.inspect_model(model, options=Options(**values))
    say(found, as_json)
    if not found.supported:
        raise GateError(f"{model}: found a model whose cache kvfit cannot map, needed a supported one: see the reason")


@cli.command()
@json_option
def env(as_json: bool) -> None:
    """Print versions and devices, to paste into a bug report."""
    from kvfit.cli.environment import environment

    say(environment(), as_json)


def main() -> None:
    """The command ``kvfit``."""
    run(cli)
