"""The commands for existing bundles: push, list, verify, export, import."""

from __future__ import annotations

import json
from typing import Any

import click

from kvfit.cli.arguments import json_option, path, ref
from kvfit.cli.console import Verb, say, say_text


@click.command(cls=Verb)
@click.argument("bundle", type=path)
@click.option("--to", required=True, type=ref, help="org/name on the Hub, or a local folder written ./folder.")
@click.option("--tag", help="Version, such as v1; default: the next one.")
@click.option("--private", is_flag=True, help="Create the repository as private.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--license", "license_", metavar="ID", help="Licence of the mapper, such as apache-2.0, for the card.")
@click.option("--registry", type=path, help="Also write the registry entry to this folder, which is created if necessary.")
@click.option("--any", "any_", is_flag=True, help="Push a bundle whose verdict is fail, too.")
@click.option("--dry-run", is_flag=True, help="Check everything and print what would happen.")
@json_option
def push(bundle: str, license_: str | None, any_: bool, as_json: bool, registry: str | None, **values: Any) -> None:
    """Publish BUNDLE: check everything, make one commit, then the tag. Safe to repeat. Exits with 3 if its verdict is fail."""
    from pathlib import Path

    from kvfit.hub import push as verb

    place = None if registry is None else Path(registry)
    say(verb.push(bundle, license=license_, require="any" if any_ else "pass", registry=place, **values), as_json)


@click.command("list", cls=Verb)
@click.option("--source", help="Only mappers from this model.")
@click.option("--target", help="Only mappers to this model.")
@click.option("--registry", type=path, help="Folder of your own registry; default: the one that came with kvfit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array on stdout instead of lines.")
def list_(source: str | None, target: str | None, registry: str | None, as_json: bool) -> None:
    """List the published mappers in the registry."""
    from pathlib import Path

    from kvfit.hub.registry import list_mappers

    entries = list_mappers(source, target, folder=None if registry is None else Path(registry))
    if as_json:
        say_text(json.dumps([entry.to_json() for entry in entries], allow_nan=False))
    else:
        say_text("\n".join(map(str, entries)) or "no registered mapper matches")


@click.command(cls=Verb)
@click.argument("ref", type=ref)
@click.option("--revision", help="Commit, tag or branch of a Hub repository.")
@click.option("--local-files-only", is_flag=True, help="Never ask the Hub.")
@json_option
def verify(ref: str, as_json: bool, **values: Any) -> None:
    """Check everything in the bundle REF: files, digests, spec, shapes, and that every weight is finite."""
    from kvfit.hub import verify as verb

    say(verb.verify(ref, **values), as_json)


@click.command(cls=Verb)
@click.argument("bundle", type=ref)
@click.option("--format", type=click.Choice(["semantic-router"]), required=True, help="The layout to write.")
@click.option("--out", required=True, type=path, help="The folder to write; must not exist.")
@click.option("--bundle-version", default=1, help="Number of this fit of the pair, which ends its mapper id.")
@click.option("--any", "any_", is_flag=True, help="Export a bundle whose verdict is fail, too.")
@json_option
def export(bundle: str, out: str, any_: bool, as_json: bool, **values: Any) -> None:
    """Write BUNDLE in the layout of another program. Exits with 3 if its verdict is fail."""
    from kvfit.interop import export_bundle as verb

    say(verb.export_bundle(bundle, out, require="any" if any_ else "pass", **values), as_json)


@click.command("import", cls=Verb)
@click.argument("folder", type=path)
@click.option("--out", required=True, type=path, help="The bundle's folder; must not exist.")
@click.option("--source", type=ref, help="The source model, for a folder that kvfit did not write.")
@click.option("--target", type=ref, help="The target model, for a folder that kvfit did not write.")
@click.option("--device", help="Device to load the models on; default: the first GPU, else the CPU.")
@click.option("--device-map", help="Spread each model over devices with accelerate, for example auto.")
@click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories.")
@json_option
def import_(folder: str, out: str, source: str | None, target: str | None, as_json: bool, **values: Any) -> None:
    """Make a bundle of FOLDER, a mapper in semantic-router's layout. Its verdict is unknown until it is evaluated.

    A folder that kvfit did not write contains only the names of its models. For such a folder, --source and --target say where
    to load them from.
    """
    from kvfit.fit.capture.models import Options
    from kvfit.interop import import_bundle as verb

    if (source is None) != (target is None):
        raise click.UsageError("found one of --source and --target, needed both or neither")
    say(verb.import_bundle(folder, out, source=source, target=target, options=Options(**values)), as_json)
