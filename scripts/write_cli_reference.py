"""Write docs/reference/cli.md from the command line itself.

    python scripts/write_cli_reference.py            # write the page
    python scripts/write_cli_reference.py --check    # exit 1 if the page is not what the command line says

Made from click's own description of each command rather than from its help text, whose layout differs between click versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from kvfit.cli.main import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"

HEAD = r"""<!-- Written by scripts/write_cli_reference.py. Change the command in kvfit/cli/, then run that script. -->

# Command line

This page lists every command and option. To see the whole job on a built-in pair, run `kvfit demo`. To fit a pair of
your own, run `kvfit fit SOURCE TARGET`.

The usual order is `capture`, `solve`, `evaluate`, `push`. What a command acts on comes first; where the result goes
is `--out` or `--to`. Wherever a model is asked for, give a folder, `org/name` or `org/name@revision` on the Hub, or
`demo:source` or `demo:target`; wherever text is asked for, a `.jsonl`, `.parquet` or `.txt` file, a folder of such
files, a dataset `org/name` on the Hub, or `demo:text` or `demo:heldout`.

Progress and log go to stderr. The result goes to stdout: one line, or one JSON object with `--json`.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | an error: one line on stderr: what was found, what was needed, what to do; see [Errors](errors.md) |
| 2 | the command line itself is wrong: an unknown option, or a value that an option cannot have |
| 3 | refused by a gate: the verdict of an evaluation is `fail`, or `inspect` found a model that cannot be mapped |
| 130 | interrupted with Ctrl-C; `capture`, `evaluate` and `fit` print the command that continues them |

To complete commands, options and file names with the Tab key, add one line to the start-up file of your shell:

| Shell | File | Line |
|---|---|---|
| Bash 4.4 or newer | `~/.bashrc` | `eval "$(_KVFIT_COMPLETE=bash_source kvfit)"` |
| Zsh | `~/.zshrc` | `eval "$(_KVFIT_COMPLETE=zsh_source kvfit)"` |
| Fish | `~/.config/fish/completions/kvfit.fish` | `_KVFIT_COMPLETE=fish_source kvfit \| source` |
"""


def _plain(text: str | None) -> str:
    """Help text as one line of Markdown: literals in code marks stay, pipes do not end a cell."""
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


def _type(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.Choice):
        return "\\|".join(f"`{choice}`" for choice in parameter.type.choices)
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return ""
    return _plain(parameter.metavar or parameter.type.name)


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    if option.is_flag or not isinstance(option.default, str | int | float):
        return ""
    return f"`{option.default}`"


def _usage(name: str, command: click.Command) -> str:
    arguments = [
        p.human_readable_name.upper() + ("..." if p.nargs == -1 else "")
        for p in command.params
        if isinstance(p, click.Argument)
    ]
    needed = [
        f"{p.opts[-1]} {p.human_readable_name.upper()}" for p in command.params if isinstance(p, click.Option) and p.required
    ]
    return " ".join(["kvfit", name, *arguments, *needed, "[OPTIONS]"])


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    return f"| {names} | {_type(option)} | {_default(option)} | {_plain(option.help)} |"


def _command(name: str, command: click.Command) -> Iterator[str]:
    yield f"## kvfit {name}"
    yield f"```text\n{_usage(name, command)}\n```"
    yield "\n\n".join(re.sub(r"\s+", " ", part).strip() for part in (command.help or "").split("\n\n"))
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    rows = [_row(option) for option in options]
    yield "\n".join(["| Option | Takes | Default | What it does |", "|---|---|---|---|", *rows])


def page() -> str:
    """The whole page."""
    parts = [HEAD.strip()]
    for name in cli.commands:
        parts.extend(_command(name, cli.commands[name]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from generated_page import write_or_check

    write_or_check(PAGE, page(), "the command line")
