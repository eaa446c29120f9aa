"""The command's streams and exit codes: results on stdout, all else on stderr. The only place where errors become exit codes.

Exit 0; 1 an error; 2 usage; 3 refused by a gate; 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from kvfit.errors import GateError, KvfitError, OptionError

# What each extra of the distribution brings. A verb that needs one of these modules and finds it missing names the extra.
EXTRAS = {
    "eval": ("lm_eval",),
    "fit": (
        "accelerate",
        "click",
        "datasets",
        "filelock",
        "jinja2",
        "matplotlib",
        "numpy",
        "psutil",
        "pyarrow",
        "tqdm",
        "transformers",
        "zarr",
    ),
}


LOGGER = logging.getLogger("kvfit")
# Verbs that keep what they have done when they are interrupted, and the option with which they go on.
RESUMABLE = {"capture": "--resume", "evaluate": None, "fit": None}
# Verbs that answer at once have nothing to be quiet about.
SHORT = ("env", "list")


class _ToStderr(logging.Handler):
    """Log lines on stderr as it is now: tests and redirections replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _quieten(context: click.Context, _option: click.Parameter, quiet: bool) -> None:
    if quiet and not context.resilient_parsing:
        LOGGER.setLevel(logging.WARNING)
        os.environ["TQDM_DISABLE"] = "1"


class Verb(click.Command):
    """A command whose options' own checks count as usage, too, and which can be told to be quiet."""

    def __init__(self, name: str | None, *arguments: Any, **values: Any) -> None:
        super().__init__(name, *arguments, **values)
        if name not in SHORT:
            option = ["--quiet"]
            about = "No progress: neither bars nor lines."
            self.params.append(click.Option(option, is_flag=True, expose_value=False, callback=_quieten, help=about))

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except OptionError as error:
            raise click.UsageError(str(error), ctx) from None


class Verbs(click.Group):
    """All of them. Their list shows the first sentence of each, whole."""

    command_class = Verb

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs."""
        found = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in found if not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def say(result: Any, as_json: bool) -> None:
    """Print a result."""
    say_text(json.dumps(result.to_json(), allow_nan=False) if as_json else str(result))


def say_text(text: str) -> None:
    """Print text as the result."""
    try:
        click.echo(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error  # which the error does not say


def run(command: click.Command) -> None:
    """Run a command line; an error becomes one line on stderr and an exit code."""
    _fill_streams()
    _log()
    # Without the extra `fit` there may be no numpy, and torch warns of that before a verb can say which extra it needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    if not sys.stderr.isatty():
        # Bars are for people. tqdm reads this when it is first imported, also for the bars of the libraries that use it.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        command.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click makes the one of the other
        _stop(_interrupted(sys.argv, os.environ), 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        _stop(_missing(error), 1)
    except GateError as error:
        _stop(str(error), 3)
    except KvfitError as error:
        _stop(str(error), 1)
    except BrokenPipeError:
        sys.exit(1)  # whoever read the result has seen enough
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
        _stop(f"{error.filename}: {reason}" if isinstance(error.filename, str | os.PathLike) else reason, 1)


def _log() -> None:
    """Show what kvfit logs: progress where no terminal shows bars, and warnings."""
    if not any(isinstance(handler, _ToStderr) for handler in LOGGER.handlers):
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)


def _interrupted(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """One line for an interrupted command line: where the verb can go on, with the command that does it.

    Args:
        words: the process's words, the program first.
        environment: the process's environment, which says whether torchrun started it.
    """
    verb = _verb(words)
    if verb not in RESUMABLE:
        return "interrupted"
    option = RESUMABLE[verb]
    added = [option] if option is not None and option not in words else []
    if environment.get("WORLD_SIZE", "1") != "1":
        return "interrupted; to go on, run the same torchrun command again" + (f" with {option}" if added else "")
    program = [words[0]]
    if Path(words[0]).name == "__main__.py":
        program = [sys.executable, "-m", "kvfit"]
    elif shutil.which("kvfit") == words[0]:
        program = ["kvfit"]
    return f"interrupted; to go on: {shlex.join([*program, *words[1:], *added])}"


def _verb(words: Sequence[str]) -> str:
    return next((word for word in words[1:] if not word.startswith("-")), "")


def _missing(error: ModuleNotFoundError) -> str:
    """One line for a module that an extra would have brought; any other missing module is a fault of kvfit and is raised."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if name in modules), None)
    if extra is None:
        raise error
    return f'{_verb(sys.argv)}: found no module {name}, needed the extra "{extra}": pip install "kvfit-mappers[{extra}]"'


def _stop(message: str, code: int) -> NoReturn:
    click.echo(f"kvfit: {message}", err=True)
    sys.exit(code)


def _fill_streams() -> None:
    """Put the null device where a stream was closed, so that neither a print nor the next file that is opened lands there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is the closed one.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
