"""The commands that make statistics or say what that takes: inspect, plan, capture, merge."""

from __future__ import annotations

import json
from typing import Any

import click

from kvfit.cli.arguments import (
    DTYPE,
    json_option,
    lags,
    loading_from,
    loading_options,
    numbers,
    path,
    ref,
    seconds,
    size_or_auto,
    text_from,
    text_options,
    top_k,
)
from kvfit.cli.console import Verb, say, say_text
from kvfit.errors import GateError


def _texts(values: dict[str, Any]) -> Any:
    """The texts of a capture, each with its share."""
    from kvfit.fit.capture.text import DEFAULT_MIX, mix

    words = values["dataset"] or DEFAULT_MIX
    return mix(words, text_from(values))


@click.command(cls=Verb)
@click.argument("model", type=ref)
@click.option("--dtype", type=DTYPE, default="auto", help="Dtype of the model; auto: as stored.")
@click.option("--device", help="Device to load the model on; default: the first GPU, else the CPU.")
@click.option("--device-map", help="Spread the model over devices with accelerate, for example auto.")
@click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the model's repository.")
@json_option
def inspect(model: str, as_json: bool, **values: Any) -> None:
    """Print what kvfit finds in MODEL, and whether it can map its cache. The model is loaded and run on a few tokens.

    Exits with 3 if it cannot.
    """
    from kvfit.fit.capture import inspect as verb
    from kvfit.fit.capture.models import Options

    found = verb.inspect_model(model, options=Options(**values))
    say(found, as_json)
    if not found.supported:
        raise GateError(f"{model}: found a model whose cache kvfit cannot map, needed a supported one: see the reason")


@click.command(cls=Verb)
@click.argument("source", type=ref)
@click.argument("target", type=ref)
@click.option("--num-sequences", default=500, help="Number of sequences to run.")
@click.option("--seq-len", default=1024, help="Tokens per sequence.")
@click.option("--token-stride", default=4, help="Keep every Nth token.")
@click.option("--skip-tokens", default=1, help="Number of first tokens of each sequence to leave out.")
@click.option("--top-k", callback=top_k, metavar="N|all", default="all", help="Source layers that each target layer reads.")
@click.option(
    "--support", type=click.Choice(["full", "head"]), default="full", help="Read all source heads, or the matching one."
)
@click.option(
    "--inputs", type=click.Choice(["same", "both"]), default="both", help="both: predict each kind from keys and values."
)
@click.option("--lexical", callback=lags, metavar="LAGS", default="auto", help="Lags of lexical inputs, as for capture.")
@click.option("--stats-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Dtype of the stored sums.")
@click.option(
    "--memory-budget", callback=size_or_auto, metavar="SIZE|auto", default="auto", help="Memory for statistics, as for capture."
)
@click.option("--batch-size", default=8, help="Sequences per forward pass.")
@click.option(
    "--hardware",
    type=click.Choice(["this", "h100", "h200", "a100", "l40s"]),
    default="this",
    help="Machine for the estimated times: a card, at half of its published peaks, or this machine, measured.",
)
@click.option("--gpus", type=click.IntRange(1), default=1, help="Number of cards that share capture and evaluation.")
@click.option("--device", default=None, help="Device of this machine to measure; default: the first GPU, else the CPU.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories to read configurations.")
@json_option
def plan(source: str, target: str, as_json: bool, device: str | None, hardware: str, **values: Any) -> None:
    """Print what capture and solve will take for SOURCE and TARGET, and from which context length on a map will pay.

    No weights are read. SOURCE and TARGET may also be names of geometries: qwen3-8b, qwen3-14b, qwen3-32b, llama-3.1-8b,
    llama-3.1-70b, ministral-3-3b, ministral-3-8b, ministral-3-14b.
    """
    from kvfit.fit import hardware as machines
    from kvfit.fit import plan as verb
    from kvfit.fit.capture.capture import Options as CaptureOptions
    from kvfit.fit.solve.options import Options as SolveOptions
    from kvfit.fit.stats.budget import free_share

    if values["memory_budget"] == "auto":
        values["memory_budget"] = free_share()
    running = {name: values.pop(name) for name in ("memory_budget", "batch_size", "gpus", "trust_remote_code")}
    solving = SolveOptions(top_k=values.pop("top_k"), support=values.pop("support"))
    options = verb.Options(capture=CaptureOptions(**values), solve=solving, **running)
    verb.plan(source, target, options)  # refuse wrong options before the machine is timed
    rates = machines.measure_rates(device) if hardware == "this" else machines.published_rates(hardware)
    say(verb.plan(source, target, options, rates), as_json)


@click.command(cls=Verb)
@click.argument("source", type=ref)
@click.argument("target", type=ref)
@click.option("--out", required=True, type=path, help="The store to write, usually NAME.zarr.")
@text_options(None)
@click.option("--num-sequences", default=500, help="Number of sequences to run, both splits together.")
@click.option("--seq-len", default=1024, help="Tokens per sequence.")
@click.option("--token-stride", default=4, help="Keep every Nth token for the statistics.")
@click.option("--skip-tokens", default=1, help="Number of first tokens of each sequence to leave out.")
@click.option("--holdout", default=0.1, help="Share of the sequences in the holdout split, for choosing and reporting.")
@click.option("--seed", default=0, help="Changes which sequences are in the holdout split.")
@click.option("--pack", is_flag=True, help="Join documents and cut them into sequences; default: one sequence per document.")
@click.option(
    "--inputs", type=click.Choice(["same", "both"]), default="both", help="both: also keep the products of keys and values."
)
@click.option(
    "--lexical", callback=lags, metavar="LAGS", default="auto",
    help="0,1,2: the target's first layer at a token and the two before it as inputs; none; auto: if the pair allows it.",
)  # fmt: skip
@click.option("--stats-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Dtype of the stored sums.")
@click.option(
    "--memory-budget", callback=size_or_auto, metavar="SIZE|auto", default="auto",
    help="Memory for statistics, besides the models; auto: half of the free memory. Statistics that fit stay in memory.",
)  # fmt: skip
@click.option(
    "--snapshot-every",
    callback=seconds,
    metavar="TIME",
    default="10min",
    help="Time between writes of statistics that stay in memory.",
)
@click.option("--stats-device", help="Device that sums the statistics; default: the source's.")
@click.option("--batch-size", default=8, help="Sequences per forward pass.")
@click.option("--source-revision", help="Commit, tag or branch of the source.")
@click.option("--target-revision", help="Commit, tag or branch of the target.")
@loading_options
@click.option("--resume", is_flag=True, help="Continue an interrupted store; start one if there is none.")
@json_option
def capture(source: str, target: str, out: str, as_json: bool, **values: Any) -> None:
    """Run SOURCE and TARGET on the same text and accumulate their statistics in a store."""
    from kvfit.fit.capture import capture as verb
    from kvfit.fit.capture.ranks import Ranks

    text, loading = _texts(values), loading_from(values)
    revisions = (values.pop("source_revision"), values.pop("target_revision"))
    running = {name: values.pop(name) for name in ("memory_budget", "batch_size", "resume", "stats_device")}
    running["snapshot_seconds"] = values.pop("snapshot_every")
    done = verb.capture(
        source, target, out, text=text, options=verb.Options(**values), loading=loading, revisions=revisions, **running
    )
    if Ranks.from_environment().rank == 0:  # of the processes that torchrun started, only the first prints
        say(done, as_json)


@click.command(cls=Verb)
@click.argument("stores", nargs=-1, required=True, type=path)
@click.option("--out", required=True, type=path, help="The merged store; must not exist.")
@click.option(
    "--weights", callback=numbers, metavar="W,W,...", help="Weight of each store, relative to the largest; default: 1 each."
)
@json_option
def merge(stores: tuple[str, ...], out: str, weights: tuple[float, ...] | None, as_json: bool) -> None:
    """Merge STORES that were captured with the same recipe into one store."""
    from kvfit.fit.stats import merge as verb

    merged = verb.merge(stores, out, weights)
    tokens = {split: merged.count(split) for split in ("fit", "holdout")}
    if as_json:
        say_text(json.dumps({"store": out, "stores": list(stores), "tokens": tokens}, allow_nan=False))
    else:
        say_text(f"{out}: {tokens['fit']} fit and {tokens['holdout']} holdout tokens from {len(stores)} stores")
