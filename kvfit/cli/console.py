"""The command's streams and exit codes: results on stdout, all else on stderr. The only place where errors become exit codes.

Exit 0; 1 an error; 2 usage; 3 refused by a gate; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import click

from kvfit.errors import GateError, KvfitError, OptionError

# What each extra of the distribution brings. A verb that needs one of these modules and finds it missing names the extra.
EXTRAS = {
    "eval": ("lm_eval",),
    "fit": ("accelerate", "click", "datasets", "jinja2", "matplotlib", "numpy", "tqdm", "transformers", "zarr"),
}


class Verb(click.Command):
    """A command whose options' own checks count as usage, too."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except OptionError as error:
            raise click.UsageError(str(error), ctx) from None


class Verbs(click.Group):
    """All of them."""

    command_class = Verb


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
    """Run a command line; what goes wrong is one line on stderr and an exit code."""
    _fill_streams()
    if not sys.stderr.isatty():
        # Bars are for people. tqdm reads this when it is first imported, also for the bars of the libraries that use it.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        command.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click makes the one of the other
        _stop("interrupted", 130)
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


def _missing(error: ModuleNotFoundError) -> str:
    """One line for a module that an extra would have brought; any other missing module is a fault of kvfit and is raised."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if name in modules), None)
    if extra is None:
        raise error
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return f'{verb}: found no module {name}, needed the extra "{extra}": pip install "kvfit-mappers[{extra}]"'


def _stop(message: str, code: int) -> NoReturn:
    click.echo(f"kvfit: {message}", err=True)
    sys.exit(code)


def _fill_streams() -> None:
    """Put the null device where a stream was closed, so that neither a print nor the next file that is opened lands there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is the closed one.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
