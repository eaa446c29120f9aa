"""What `kvfit fit` is to do: the two models and the options of every part, from a command line or a ``fit.yaml``.

The file names options as the command line does. It is kept beside the bundle, in the folder ``OUT.fit`` together with the
store, and a copy without local paths travels in the bundle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from kvfit.errors import OptionError

PARTS = ("capture", "solve", "evaluate", "push")
CONFIG = "fit.yaml"
# Both models are loaded twice, by capture and by evaluate, and always in the same way.
LOADING = ("dtype", "source-device", "target-device", "device-map", "attn-implementation", "trust-remote-code")
# What the job sets by itself.
OWN = {"capture": {"out", "resume", "json"}, "solve": {"out", "json", "sweep"}, "evaluate": {"source", "target", "json"}}
OWN["push"] = {"json", "dry-run"}

Values = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is to be fitted, and how.

    Attributes:
        source, target: refs of the two models.
        parts: per part of the job, its options as the command line writes them, without the dashes.
    """

    source: str
    target: str
    parts: Mapping[str, Values] = field(default_factory=dict)

    def to_yaml(self, *, published: bool = False) -> str:
        """The text of ``fit.yaml``; `published`: local folders and files by their last name only."""
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
        OptionError: the file cannot be read, or is not of that form; names the key.
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
    """The job that a command line asks for: its own words before those of a ``fit.yaml``.

    Raises:
        OptionError: a model is missing, or an option that no part has.
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
    """Options of the parts, as a caller of `fit` wrote them.

    A name that several parts have means capture's; the others' are written ``--solve-NAME``, ``--evaluate-NAME``,
    ``--push-NAME``. Options of how models are loaded go to capture and to evaluate.

    Raises:
        OptionError: an unknown option, a missing value, or a word that belongs to no option.
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
            if option.multiple:
                found[each].setdefault(name, []).append(value)
            else:
                found[each][name] = value
    return {part: values for part, values in found.items() if values}


def _home(word: str, commands: Mapping[str, click.Command]) -> tuple[str, str]:
    """Part and name of an option."""
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
        OptionError: an option that the part does not have, or that the job sets by itself.
    """
    names = option_names(command)
    for name in values:
        if name in OWN[part] or name not in names:
            raise OptionError(f"{part}: found the option {name!r}, needed one of kvfit {part} --help that fit leaves to you")
    return as_words(values)


def as_words(values: Values) -> list[str]:
    """Options as words of a command line: a flag alone or not at all, a list as the option given several times."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [f"--{name}", str(item)]
    return words


def work_folder(out: str | Path) -> Path:
    """Where the store and the whole description of a job are kept: ``OUT.fit``, beside the bundle."""
    path = Path(out)
    return path.with_name(path.name + ".fit")


def local_refs(bundle: str | Path) -> tuple[str | None, str | None]:
    """The models that the bundle was fitted from on this machine, None where no job is remembered beside it."""
    path = work_folder(bundle) / CONFIG
    if not path.is_file():
        return None, None
    job = read_job(path)
    return job.source or None, job.target or None
