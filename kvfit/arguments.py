"""What the command line takes: kinds of values, and options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


DTYPE = click.Choice(["auto", "float32", "bfloat16", "float16"])


def path(value: str) -> str:
    """A path; the shell leaves the ``~`` of ``--out=~/pair.zarr`` alone."""
    return os.path.expanduser(value)


def ref(value: str) -> str:
    """A ref, which may be a path."""
    return os.path.expanduser(value)


_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", start=1)
    for name, base in ((letter, 1000), (f"{letter}b", 1000), (f"{letter}ib", 1024))
}


def size(_context: click.Context, _option: click.Parameter, value: str) -> int:
    """Bytes, written as ``64MiB``, ``2GiB`` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise click.BadParameter(f"found {value!r}, needed a size such as 64MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def top_k(_context: click.Context, _option: click.Parameter, value: str) -> int | str:
    """A number of source layers, ``all`` or ``auto``."""
    if value in ("all", "auto"):
        return value
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f"found {value!r}, needed a number of 1 or more, all or auto")
    return int(value)


def penalty(_context: click.Context, _option: click.Parameter, value: str) -> float | str:
    """A number of 0 or more, or ``auto``."""
    if value == "auto":
        return value
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise click.BadParameter(f"found {value!r}, needed a number of 0 or more, or auto")
    return number


def lengths(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() and int(part) > 1 for part in parts):
        raise click.BadParameter(f"found {value!r}, needed numbers of 2 or more with commas between, such as 256,1024")
    if len(set(parts)) < len(parts):
        raise click.BadParameter(f"found {value!r}, needed each length once")
    return tuple(int(part) for part in parts)


def names(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Names with commas between."""
    return None if value is None else tuple(part.strip() for part in value.split(","))


def named(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, given any number of times."""
    found: dict[str, str] = {}
    for value in values:
        name, _, rest = value.partition("=")
        if not name or not rest:
            raise click.BadParameter(f"found {value!r}, needed {option.metavar}")
        if name in found:
            raise click.BadParameter(f"found {name} twice, needed a name of its own for each")
        found[name] = os.path.expanduser(rest)
    return found


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of a line.")


def loading_options(function: F) -> F:
    """How both models are loaded."""
    for option in (
        click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories."),
        click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own."),
        click.option("--device-map", help="Spread each model over devices with accelerate, for example auto."),
        click.option("--target-device", help="Device of the target; default: the first GPU, else the CPU."),
        click.option("--source-device", help="Device of the source; default: the first GPU, else the CPU."),
        click.option("--dtype", type=DTYPE, default="auto", help="auto: as stored."),
    ):
        function = option(function)
    return function


def text_options(default: str) -> Callable[[F], F]:
    """Where the text comes from."""

    def add(function: F) -> F:
        for option in (
            click.option("--text-column", default="text", help="Column that holds the text."),
            click.option("--split", default="train", help="Split of the dataset."),
            click.option("--dataset-revision", help="Commit, tag or branch of a Hub dataset."),
            click.option("--dataset-config", help="Configuration of a Hub dataset."),
            click.option(
                "--dataset",
                type=ref,
                default=default,
                help="Hub dataset, or .jsonl, .parquet, .txt file or folder, or demo:text, demo:heldout.",
            ),
        ):
            function = option(function)
        return function

    return add
