"""Types of values on the command line, and options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


DTYPE = click.Choice(["auto", "float32", "bfloat16", "float16"])


class Once(click.Option):
    """An option that another command takes several times and this one takes once, where the last would silently win."""

    def refuse_again(self) -> None:
        """Refuse it, given again.

        Raises:
            UsageError: always.
        """
        raise click.UsageError(
            f"{self.opts[0]}: found it twice, needed one: give further texts with --text NAME=DATASET, or join the files"
        )


class Place(click.types.StringParamType):
    """A path, or a ref, which may be a path. It expands ``~``, which the shell does not do in ``--out=~/pair.zarr``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return os.path.expanduser(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Complete names of files and folders."""
        return [CompletionItem(incomplete, type="file")]


path, ref = Place("path"), Place("ref")


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


def size_or_auto(context: click.Context, option: click.Parameter, value: str) -> int | str:
    """A size, or ``auto``."""
    return value if value == "auto" else size(context, option, value)


def seconds(_context: click.Context, _option: click.Parameter, value: str) -> float:
    """Seconds, written as ``30s``, ``10min``, ``1h`` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|)\s*", value)
    if match is None:
        raise click.BadParameter(f"found {value!r}, needed a time such as 30s, 10min or 1h")
    return float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600}[match[2]]


def lags(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...] | str:
    """Lags of lexical inputs separated by commas, ``none`` or ``auto``."""
    if value in ("none", "auto"):
        return () if value == "none" else value
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise click.BadParameter(f"found {value!r}, needed numbers such as 0,1,2, or none, or auto")
    return tuple(map(int, value.split(",")))


def numbers(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Numbers separated by commas."""
    try:
        return None if value is None else tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"found {value!r}, needed numbers such as 1,0.5") from None


def top_k(_context: click.Context, _option: click.Parameter, value: str) -> int | str:
    """A number of source layers, ``all`` or ``auto``."""
    return _count(value, "all", "auto")


def rank(_context: click.Context, _option: click.Parameter, value: str) -> int | str:
    """A number of directions, ``auto`` or ``none``."""
    return _count(value, "auto", "none")


def _count(value: str, *words: str) -> int | str:
    if value in words:
        return value
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f"found {value!r}, needed a number of 1 or more, {' or '.join(words)}")
    return int(value)


def cost(_context: click.Context, _option: click.Parameter, value: str) -> float | None:
    """A share above 0, or ``none``."""
    if value == "none":
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"found {value!r}, needed a share above 0, such as 0.05, or none")
    return number


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
    """Numbers of tokens separated by commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() and int(part) > 1 for part in parts):
        raise click.BadParameter(f"found {value!r}, needed numbers of 2 or more separated by commas, such as 256,1024")
    if len(set(parts)) < len(parts):
        raise click.BadParameter(f"found {value!r}, needed each length once")
    return tuple(int(part) for part in parts)


def names(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Names separated by commas."""
    return None if value is None else tuple(part.strip() for part in value.split(","))


def named(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, any number of times."""
    found: dict[str, str] = {}
    for value in values:
        name, _, setting = value.partition("=")
        if not name or not setting:
            raise click.BadParameter(f"found {value!r}, needed {option.metavar}")
        if name in found:
            raise click.BadParameter(f"found {name} twice, needed every name only once")
        found[name] = os.path.expanduser(setting)
    return found


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of a line.")


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


# Options for loading both models.
loading_options = _options(
    click.option("--dtype", type=DTYPE, default="auto", help="Dtype of both models; auto: as stored."),
    click.option("--source-device", help="Device of the source; default: the first GPU, else the CPU."),
    click.option("--target-device", help="Device of the target; default: the first GPU, else the CPU."),
    click.option("--device-map", help="Spread each model over devices with accelerate, for example auto."),
    click.option("--attn-implementation", help="sdpa, eager, flash_attention_2; default: the model's own."),
    click.option("--trust-remote-code", is_flag=True, help="Run code from the models' repositories."),
)


_DATASET = "Hub dataset, or .jsonl, .parquet, .txt file or folder (also .gz, .zst), or demo:text, demo:heldout, demo:facts"


def text_options(default: str | None) -> Callable[[F], F]:
    """Options for the text. Without a default, they take several texts with shares, and capture's own mix by default."""
    several = f"{_DATASET}. May be repeated as REF or REF=SHARE of the sequences, for a mix; default: capture's own mix."
    return _options(
        click.option("--dataset", type=ref, multiple=True, metavar="REF[=SHARE]", help=several)
        if default is None
        else click.option("--dataset", cls=Once, type=ref, default=default, help=f"{_DATASET}."),
        click.option("--dataset-config", help="Configuration of a Hub dataset."),
        click.option("--dataset-revision", help="Commit, tag or branch of a Hub dataset."),
        click.option("--split", default="train", help="Split of the dataset."),
        click.option("--text-column", default="text", help="Column that holds the text."),
    )


def loading_from(values: dict[str, Any]) -> tuple[Any, Any]:
    """Take the loading options out of a command's values. Returns those of the source and those of the target."""
    from kvfit.fit.capture import models

    shared = {name: values.pop(name) for name in ("dtype", "device_map", "attn_implementation", "trust_remote_code")}
    source, target = values.pop("source_device"), values.pop("target_device")
    return models.Options(device=source, **shared), models.Options(device=target, **shared)


def text_from(values: dict[str, Any]) -> Any:
    """Take the text options out of a command's values."""
    from kvfit.fit.capture.text import TextOptions

    names = ("dataset", "dataset_config", "dataset_revision", "split", "text_column")
    return TextOptions(*(values.pop(name) for name in names))
