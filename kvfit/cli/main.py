"""The command ``kvfit``: parse the command line, call one verb, print one result."""

from __future__ import annotations

import sys

from kvfit import __version__

try:
    import click
except ModuleNotFoundError:  # an installation without extras has no command line
    sys.exit("kvfit: found no click, needed the extra `fit` for the command line: pip install 'kvfit-mappers[fit]'")

from kvfit.cli.arguments import json_option, path
from kvfit.cli.bundles import export, import_, list_, push, verify
from kvfit.cli.capture import capture, inspect, merge, plan
from kvfit.cli.console import Verb, Verbs, run, say
from kvfit.cli.evaluate import evaluate
from kvfit.cli.solve import refine, solve


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
)
@click.version_option(__version__, prog_name="kvfit")
def cli() -> None:
    """Let one language model continue from another model's KV cache.

    The usual order is: capture, solve, evaluate, push. `kvfit demo` does the first three on a built-in pair.
    """


@click.command(cls=Verb)
@click.option("--out", default="demo-out", type=path, help="Folder for the store, the bundle and the picture; must not exist.")
@json_option
def demo(out: str, as_json: bool) -> None:
    """Capture, solve, evaluate and hand over a conversation on the built-in pair, offline."""
    from kvfit.cli.demo import run_demo

    say(run_demo(out), as_json)


@click.command(
    cls=Verb, context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True}
)
@click.argument(
    "words",
    nargs=-1,
    metavar="SOURCE TARGET [OPTIONS OF THE PARTS]",
    type=click.UNPROCESSED,
    shell_complete=path.shell_complete,
)
@click.option("--out", type=path, help="The bundle's folder; the store is next to it in OUT.fit; default: fit-out/bundle.")
@click.option("--config", type=path, help="A fit.yaml with models and options; the command line overrides it.")
@json_option
def fit(words: tuple[str, ...], out: str | None, config: str | None, as_json: bool) -> None:
    """Capture, solve, evaluate and, with --to, push: the complete job for SOURCE and TARGET. Run it again to continue.

    It takes every option of these commands. If several commands have an option of the same name, the plain name means
    capture's; write --solve-NAME, --evaluate-NAME or --push-NAME for the others, for example --evaluate-dataset
    heldout.jsonl. Evaluate loads the models in the same way as capture. The bundle contains the job as fit.yaml, and
    kvfit fit --config bundle/fit.yaml repeats it.
    """
    from kvfit.cli.fit import run_fit
    from kvfit.cli.job import PARTS, described

    commands = {name: cli.commands[name] for name in (*PARTS, "plan")}
    say(run_fit(described(words, config, commands), out or "fit-out/bundle", commands), as_json)


@click.command(cls=Verb)
@json_option
def env(as_json: bool) -> None:
    """Print versions and devices, to paste into a bug report."""
    from kvfit.cli.environment import environment

    say(environment(), as_json)


# This is also the order of the reference page.
for command in (
    demo, capture, plan, merge, solve, refine, evaluate, fit, push, export, import_, list_, verify, inspect, env,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """The command ``kvfit``."""
    run(cli)
