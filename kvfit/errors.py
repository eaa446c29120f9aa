"""The error tree.

Every error that kvfit raises on purpose is a `KvfitError` and also a built-in, so that callers can catch either.
A message is one logical line that says what was found, what was needed and what to do.
"""


class KvfitError(Exception):
    """Base of all errors that kvfit raises on purpose. The command line turns it into exit code 1."""


class MismatchError(KvfitError, ValueError):
    """Two things that must agree do not: a model and a bundle, two tokenizers, a cache and its mask."""


class OptionError(MismatchError):
    """An option with a value that is never valid, whatever it is applied to. The command line turns it into exit code 2."""


class UnsupportedModelError(KvfitError, NotImplementedError):
    """A model whose keys and values kvfit cannot describe, or whose description it cannot verify."""


class RefError(KvfitError, LookupError):
    """A model, bundle or dataset that its ref does not lead to, because it does not exist or cannot be reached."""


class TextError(KvfitError, ValueError):
    """Text that cannot be used: unreadable, empty, or shorter than a sequence."""


class StoreError(KvfitError, ValueError):
    """A statistics store that is incomplete, damaged, locked, or made with another recipe."""


class SolveError(KvfitError, ArithmeticError):
    """A linear system without a trustworthy solution. The message names the layer and the kind."""


class SpecError(KvfitError, ValueError):
    """A value of a spec or a record that is not allowed; `field` is its dotted path, `found` and `needed` say what is wrong."""

    def __init__(self, field: str, found: str, needed: str) -> None:
        self.field, self.found, self.needed = field, found, needed
        super().__init__(f"field {field or '<top>'}: found {found}, needed {needed}")


class BundleError(KvfitError, ValueError):
    """A bundle that is torn, altered, hostile, or of a newer format. The message names the file and the field."""


class GateError(KvfitError, RuntimeError):
    """A quality gate said no. The command line turns it into exit code 3."""
