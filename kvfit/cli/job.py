"""The job of `kvfit fit`: two models and the options of every part, from a command line or a ``fit.yaml``.

The file names options as the command line does. It is written to the folder ``OUT.fit`` next to the bundle, together with the
store. The bundle contains a copy without local paths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from kvfit.cli.arguments import Once
from kvfit.errors import OptionError

PARTS = ("capture", "solve", "evaluate", "push")
CONFIG = "fit.yaml"
# Options of capture that evaluate gets too, because both load the models in the same way.
LOADING = ("dtype", "source-device", "target-device", "device-map", "attn-implementation", "trust-remote-code")
# Options that the job sets itself.
OWN = {"capture": {"out", "resume", "json"}, "solve": {"out", "json", "sweep"}, "evaluate": {"source", "target", "json"}}
OWN["push"] = {"json", "dry-run"}

Values = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The models and options of a job.

    Attributes:
        source: ref of the source model.
        target: ref of the target model.
        parts: per part of the job, its options by their long names without the dashes.
    """

    source: str
    target: str
    parts: Mapping[str, Values] = field(default_factory=dict)

    def to_yaml(self, *, published: bool = False) -> str:
        """The text of ``fit.yaml``. With `published`, local paths are reduced to their last part."""
        document: Values = {"source": self.source, "target": self.target}
        document |= {part: dict(self.parts.get(part, {})) for part in PARTS if self.parts.get(part)}
        return str(yaml.safe_dump(_without_paths(document) if published else document, sort_keys=False, allow_unicode=True))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith((".", "~")) or os.path.exists(value)):
        return Path(value).name
    return value


def read_job(path: str | Path) -> Job:
    """The job that a ``fit.yaml`` describes.

    Raises:
        OptionError: the file cannot be read, or has another form; names the key.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())[:200]})") from None
    known = ("source", "target", *PARTS)
    unknown = sorted(map(str, set(document) - set(known))) if isinstance(document, dict) else [type(document).__name__]
    if unknown:
        raise OptionError(f"{path}: found {unknown[0]}, needed a mapping with the keys {', '.join(known)}")
    for name in ("source", "target"):
        if not isinstance(document.get(name, ""), str):
            raise OptionError(f"{path}: key {name}: found {document[name]!r}, needed the ref of a model")
    parts = {part: document.get(part) or {} for part in PARTS}
    for part, options in parts.items():
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise OptionError(f"{path}: key {part}: found {type(options).__name__}, needed options by name")
    return Job(document.get("source", ""), document.get("target", ""), parts)


def described(words: Sequence[str], config: str | None, commands: Mapping[str, click.Command]) -> Job:
    """The job of a command line, whose options override those of a ``fit.yaml``.

    Raises:
        OptionError: a model is missing, or no part has an option.
    """
    first_option = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    models, options = list(words[:first_option]), parse_options(words[first_option:], commands)
    base = Job("", "") if config is None else read_job(config)
    if len(models) not in (0, 2) or (not models and not (base.source and base.target)):
        raise OptionError(f"found {len(models)} models, needed SOURCE and TARGET, or --config with a file that names both")
    source, target = (os.path.expanduser(model) for model in models) if models else (base.source, base.target)
    parts = {part: {**base.parts.get(part, {}), **options.get(part, {})} for part in PARTS}
    return Job(source, target, parts)


def parse_options(words: Sequence[str], commands: Mapping[str, click.Command]) -> dict[str, Values]:
    """Assign the options on the command line of `fit` to its parts.

    If several parts have an option of the same name, the plain name means capture's. Those of the others are written
    ``--solve-NAME``, ``--evaluate-NAME`` and ``--push-NAME``. Options for loading models go to capture and to evaluate.

    Raises:
        OptionError: an option is unknown or has no value, or a word belongs to no option.
    """
    found: dict[str, Values] = {part: {} for part in PARTS}
    position = 0
    while position < len(words):
        word, _, attached = words[position].partition("=")
        position += 1
        if not word.startswith("--"):
            raise OptionError(f"found {word!r} after the two models, needed an option that begins with --")
        part, name = _home(word[2:], commands)
        option = option_names(commands[part])[name]
        if option.is_flag:
            value: Any = True
        elif attached:
            value = attached
        elif position < len(words):
            value, position = words[position], position + 1
        else:
            raise OptionError(f"--{name}: found nothing after it, needed a value")
        for each in ("capture", "evaluate") if part == "capture" and name in LOADING else (part,):
            if isinstance(option, Once) and name in found[each]:
                option.refuse_again()
            if option.multiple:
                found[each].setdefault(name, []).append(value)
            else:
                found[each][name] = value
    return {part: values for part, values in found.items() if values}


def _home(word: str, commands: Mapping[str, click.Command]) -> tuple[str, str]:
    """The part that an option belongs to, and the option's name there."""
    for part in PARTS:
        prefix, name = f"{part}-", word.removeprefix(f"{part}-")
        if word.startswith(prefix) and name not in OWN[part] and option_names(commands[part]).get(name):
            return part, name
    for part in PARTS:
        if word not in OWN[part] and option_names(commands[part]).get(word):
            return part, word
    raise OptionError(f"--{word}: found an unknown option, needed one of capture, solve, evaluate or push: see their --help")


def option_names(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names, without the dashes."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name[2:]: option for option in options for name in option.opts if name.startswith("--")}


def words_of(values: Values, command: click.Command, part: str) -> list[str]:
    """A part's options as words of its command line.

    Raises:
        OptionError: the part does not have an option, or the job sets it itself.
    """
    names = option_names(command)
    for name in values:
        if name in OWN[part] or name not in names:
            raise OptionError(f"{part}: found the option {name!r}, needed one of kvfit {part} --help that fit leaves to you")
    return as_words(values)


def as_words(values: Values) -> list[str]:
    """Options as words of a command line. A flag is written alone or not at all, a list as a repeated option."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [f"--{name}", str(item)]
    return words


def work_folder(out: str | Path) -> Path:
    """The folder for a job's store and its full ``fit.yaml``: ``OUT.fit`` next to the bundle."""
    path = Path(out)
    return path.with_name(path.name + ".fit")


def local_refs(bundle: str | Path) -> tuple[str | None, str | None]:
    """Refs of the models that a job on this machine fitted the bundle from; None if there is no job next to it."""
    path = work_folder(bundle) / CONFIG
    if not path.is_file():
        return None, None
    job = read_job(path)
    return job.source or None, job.target or None
