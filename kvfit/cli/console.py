"""Streams and exit codes: results go to stdout, everything else to stderr. Only this module turns errors into exit codes.

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

from kvfit.cli.arguments import Once
from kvfit.errors import GateError, KvfitError, OptionError

# The modules of each extra of the distribution. If one is missing when a verb needs it, the error names the extra.
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
# Verbs that can continue after an interruption, and the option for it.
RESUMABLE = {"capture": "--resume", "evaluate": None, "fit": None}
# Verbs that answer immediately do not need --quiet.
SHORT = ("env", "list")


class _ToStderr(logging.Handler):
    """Writes log lines to the current stderr, which tests and redirections replace."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _quieten(context: click.Context, _option: click.Parameter, quiet: bool) -> None:
    if quiet and not context.resilient_parsing:
        LOGGER.setLevel(logging.WARNING)
        os.environ["TQDM_DISABLE"] = "1"


class Verb(click.Command):
    """A command that reports an `OptionError` as a usage error, and that has ``--quiet``."""

    def __init__(self, name: str | None, *arguments: Any, **values: Any) -> None:
        super().__init__(name, *arguments, **values)
        if name not in SHORT:
            option = ["--quiet"]
            about = "Show no progress, neither bars nor lines."
            self.params.append(click.Option(option, is_flag=True, expose_value=False, callback=_quieten, help=about))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read its words."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in order:
            if isinstance(option, Once) and order.count(option) > 1:
                option.refuse_again()
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except OptionError as error:
            raise click.UsageError(str(error), ctx) from None


class Verbs(click.Group):
    """The group of all commands. Its list shows the first sentence of each command's help without truncation."""

    command_class = Verb

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
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
        raise OSError(error.errno, error.strerror, "stdout") from error  # the error itself has no file name


def run(command: click.Command) -> None:
    """Run a command line; an error becomes one line on stderr and an exit code."""
    _fill_streams()
    _log()
    # Without the extra `fit` numpy may be missing. torch warns about that before a verb can say which extra it needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    if not sys.stderr.isatty():
        # Bars are useful on a terminal only. tqdm reads this at its first import, also for libraries that use it.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        command.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click turns KeyboardInterrupt into Abort
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
        sys.exit(1)  # the reader of the pipe has closed it
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
        _stop(f"{error.filename}: {reason}" if isinstance(error.filename, str | os.PathLike) else reason, 1)


def _log() -> None:
    """Show kvfit's log: warnings, and progress if there is no terminal to show bars on."""
    if not any(isinstance(handler, _ToStderr) for handler in LOGGER.handlers):
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)


def _interrupted(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """One line for an interrupted command; if the verb can continue, with the command line that continues it.

    Args:
        words: the words of the command line, beginning with the program.
        environment: the environment variables, which show whether torchrun started the process.
    """
    verb = _verb(words)
    if verb not in RESUMABLE:
        return "interrupted"
    option = RESUMABLE[verb]
    added = [option] if option is not None and option not in words else []
    if environment.get("WORLD_SIZE", "1") != "1":
        return "interrupted; to continue, run the same torchrun command again" + (f" with {option}" if added else "")
    program = [words[0]]
    if Path(words[0]).name == "__main__.py":
        program = [sys.executable, "-m", "kvfit"]
    elif shutil.which("kvfit") == words[0]:
        program = ["kvfit"]
    return f"interrupted; to continue: {shlex.join([*program, *words[1:], *added])}"


def _verb(words: Sequence[str]) -> str:
    return next((word for word in words[1:] if not word.startswith("-")), "")


def _missing(error: ModuleNotFoundError) -> str:
    """One line for a missing module of an extra. Any other missing module is a bug of kvfit, so the error is raised."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if name in modules), None)
    if extra is None:
        raise error
    return f'{_verb(sys.argv)}: found no module {name}, needed the extra "{extra}": pip install "kvfit-mappers[{extra}]"'


def _stop(message: str, code: int) -> NoReturn:
    click.echo(f"kvfit: {message}", err=True)
    sys.exit(code)


def _fill_streams() -> None:
    """Replace closed streams by the null device, so that prints work and no file that is opened later gets their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free file descriptor, which is the closed one.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
