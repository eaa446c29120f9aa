"""The commands that make a bundle: solve and refine."""

from __future__ import annotations

from typing import Any

import click

from kvfit.cli.arguments import (
    cost,
    json_option,
    lags,
    loading_from,
    loading_options,
    path,
    penalty,
    rank,
    ref,
    size_or_auto,
    top_k,
)
from kvfit.cli.console import Verb, say


@click.command(cls=Verb)
@click.argument("store", type=path)
@click.argument("grid", nargs=-1)
@click.option("--out", required=True, type=path, help="The bundle's folder; must not exist.")
@click.option(
    "--top-k", callback=top_k, metavar="N|all|auto", default="all", help="Source layers that each target layer reads."
)
@click.option(
    "--select", type=click.Choice(["independent", "greedy"]), default="independent", help="How the source layers are chosen."
)
@click.option("--shared-layers", is_flag=True, help="Let keys and values read the same source layers.")
@click.option(
    "--penalty",
    callback=penalty,
    metavar="NUMBER|auto",
    default="auto",
    help="Ridge penalty; auto: chosen per kind and layer on the holdout split.",
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
    "--inputs",
    type=click.Choice(["auto", "same", "both"]),
    default="auto",
    help="both: predict each kind from keys and values; auto: both if the store has it.",
)
@click.option(
    "--lexical",
    callback=lags,
    metavar="LAGS|auto|none",
    default="auto",
    help="0,1,2: also read the target's first layer at a token and at the two before it; auto: all lags that the store has.",
)
@click.option(
    "--rank",
    callback=rank,
    metavar="N|auto|none",
    default="auto",
    help="Rank of a basis that all target layers share; none: a separate map for every layer.",
)
@click.option(
    "--cost",
    callback=cost,
    metavar="SHARE|none",
    default="0.05",
    help="Limit on the cost per token of everything that auto chooses, as a share of the target's prefill.",
)
@click.option(
    "--gain",
    type=click.Choice(["variance", "head", "none"]),
    default="variance",
    help="Scale predictions to the target's variance, per feature or per head.",
)
@click.option(
    "--gain-split",
    type=click.Choice(["auto", "fit", "holdout"]),
    default="auto",
    help="Split for the gain's variances; auto: holdout if it has at least 2,048 tokens.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Dtype of the stored weights; auto: bfloat16 if the target is a 16-bit model.",
)
@click.option(
    "--recipe",
    type=click.Choice(["heo2026"]),
    help="A recipe from the literature; it replaces the defaults of the options above.",
)
@click.option("--device", default="cpu", help="Device for the linear algebra.")
@click.option(
    "--memory-budget", callback=size_or_auto, default="auto", metavar="SIZE|auto", help="Memory for the linear algebra."
)
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
    help="Write a table of R2, size and speed instead, over top_k, penalty, gain, support or select. More may follow.",
)
@click.option("--plots", is_flag=True, help="Also draw the R2 map and the per-layer curves into the bundle.")
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
    context = click.get_current_context()
    defaults = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    given = {name for name in context.params if context.get_parameter_source(name) not in defaults}
    if sweep and (plots or ("cost" in given and values["cost"] is not None)):
        found = "--plots" if plots else "--cost"
        raise click.UsageError(f"found {found} with --sweep, which draws its own picture and has no limit: leave {found} out")
    if recipe:
        values = {name: value for name, value in values.items() if name in given}
    options = dataclasses.replace(verb.RECIPES[recipe] if recipe else verb.Options(), **values)
    if sweep:
        from kvfit.fit.solve import sweep as sweeping

        wanted = sweeping.parse_grid([*sweep, *grid])
        say(sweeping.sweep(store, out, wanted, options=options, **running), as_json)
        return
    say(verb.solve(store, out, options=options, plots=plots, **running), as_json)


@click.command(cls=Verb)
@click.argument("bundle", type=path)
@click.option("--out", required=True, type=path, help="The refined bundle's folder; must not exist.")
@click.option("--source", type=ref, help="Ref of the source; default: the ref in the bundle.")
@click.option("--target", type=ref, help="Ref of the target; default: the ref in the bundle.")
@click.option("--dataset", "datasets", multiple=True, type=ref, help="Text to train on, REF or REF=SHARE; may be repeated.")
@click.option("--text-column", default="text", help="Column that holds the text.")
@click.option("--num-sequences", default=64, help="Number of sequences, training and holdout together.")
@click.option("--seq-len", default=512, help="Tokens per sequence.")
@click.option(
    "--holdout", default=0.25, help="Share of the sequences that decides when to stop and whether the result is better."
)
@click.option("--rank", default=2048, help="Largest rank of each map's correction.")
@click.option("--steps", default=200, help="Largest number of training steps.")
@click.option(
    "--learning-rate",
    default=0.016,
    help="Learning rate of Adam: the largest change of an output per step, in its standard deviations.",
)
@click.option("--batch-size", default=4, help="Sequences per step.")
@click.option("--seed", default=0, help="Seed of batches and lengths.")
@loading_options
@json_option
def refine(
    bundle: str, out: str, source: str | None, target: str | None, datasets: tuple[str, ...], as_json: bool, **values: Any
) -> None:
    """Train BUNDLE's maps through the frozen target for a few hundred steps. A new bundle is written only if it is better."""
    from kvfit.cli.job import local_refs
    from kvfit.fit.capture.text import DEFAULT_MIX, TextOptions, mix
    from kvfit.fit.refine import refine as verb

    column, loading = values.pop("text_column"), loading_from(values)
    texts = mix(datasets or DEFAULT_MIX, TextOptions(column=column))
    training = {name: values.pop(name) for name in ("steps", "learning_rate", "batch_size", "seed")}
    options = verb.Options(**values, schedule=verb.Schedule(**training))
    remembered = local_refs(bundle)
    source, target = source or remembered[0], target or remembered[1]
    say(verb.refine(bundle, out, texts=texts, source=source, target=target, options=options, loading=loading), as_json)
