"""The command that evaluates a bundle: evaluate."""

from __future__ import annotations

from typing import Any

import click

from kvfit.cli.arguments import (
    json_option,
    lengths,
    loading_from,
    loading_options,
    named,
    names,
    path,
    ref,
    text_from,
    text_options,
)
from kvfit.cli.console import Verb, say
from kvfit.errors import GateError
from kvfit.runtime import EXACT_HEAD


@click.command(cls=Verb)
@click.argument("bundle", type=path)
@click.option("--source", type=ref, help="Ref of the source; default: the ref in the bundle.")
@click.option("--target", type=ref, help="Ref of the target; default: the ref in the bundle.")
@text_options("demo:heldout")
@click.option(
    "--text",
    "texts",
    multiple=True,
    callback=named,
    metavar="NAME=DATASET",
    help="Another text, which is reported separately; may be repeated.",
)
@click.option(
    "--prefix",
    default="384",
    callback=lengths,
    metavar="N[,N...]",
    help="Tokens of context; with several lengths, each is evaluated.",
)
@click.option("--continuation", default=128, help="Tokens after the context that are scored.")
@click.option("--documents", default=48, help="Number of documents.")
@click.option("--probes", default=40, help="Number of recall questions of each kind; 0 for none.")
@click.option(
    "--probe-kinds",
    callback=names,
    metavar="KIND[,KIND...]",
    help="Kinds of recall questions: names, list, sentence, item, reworded, two-hop; default: all.",
)
@click.option("--greedy", default=64, help="Tokens of the greedy continuation that are compared; 0 for none.")
@click.option("--diagnose", default=8, help="Number of documents to diagnose layers and heads on; 0 for none.")
@click.option("--turns", default=0, help="The target's turns in a conversation that moves back and forth; 0 for none.")
@click.option(
    "--exact-head", default=EXACT_HEAD, help="Number of first tokens that the target runs itself in the judged handoff."
)
@click.option("--exact-tail", default=0, help="Number of last tokens of the prefix that it runs itself.")
@click.option("--recompute", default=0.0, help="Share of the mapped tokens that it recomputes, guided by the source.")
@click.option("--transcripts", default=10, help="Number of documents whose continuations the HTML page shows; 0 for none.")
@click.option("--seconds", default=60.0, help="Time for all timings together; 0 for no timings.")
@click.option("--time-tokens", default=0, help="Longest context to time; default: the longest prefix.")
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    callback=named,
    metavar="NAME=NUMBER",
    help="Change a threshold of the verdict; may be repeated.",
)
@click.option("--batch-size", default=8, help="Documents per forward pass.")
@loading_options
@json_option
def evaluate(bundle: str, source: str | None, target: str | None, as_json: bool, **values: Any) -> None:
    """Measure BUNDLE on held-out text, with controls, and write the verdict into it. Exits with 3 if the verdict is fail."""
    from kvfit.cli.job import local_refs
    from kvfit.fit.capture.text import TextOptions
    from kvfit.fit.evaluate import evaluate as verb

    text, loading = text_from(values), loading_from(values)
    remembered = local_refs(bundle)
    source, target = source or remembered[0], target or remembered[1]
    texts = {name: TextOptions(dataset, column=text.column) for name, dataset in values.pop("texts").items()}
    values["thresholds"] = verb.Thresholds.changed(values["thresholds"])
    values = {name: value for name, value in values.items() if value is not None}
    options = verb.Options(**values)
    found = verb.evaluate(bundle, source=source, target=target, text=text, texts=texts, options=options, loading=loading)
    say(found, as_json)
    if found.verdict == "fail":
        raise GateError(f"{bundle}: found verdict fail, needed pass or unknown: see {bundle}/evaluation.md for the reasons")
