"""kvfit: let one language model continue from another model's KV cache.

Public names are loaded when first used, so that ``import kvfit`` costs nothing:

    from kvfit import load_mapper, handoff
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfit.handoff import Handoff, handoff
    from kvfit.hub import load_mapper
    from kvfit.mapper import Mapper

__version__ = "0.1.0"

_HOMES = {
    "Handoff": "kvfit.handoff",
    "Mapper": "kvfit.mapper",
    "load_mapper": "kvfit.hub",
}

__all__ = ["Handoff", "Mapper", "__version__", "handoff", "load_mapper"]


class _Package(types.ModuleType):
    """The package, with lazy public names.

    A class rather than a module-level ``__getattr__``, because importing the module ``kvfit.handoff`` makes the import
    system store that module under the name of the public function; a property wins over such a store.
    """

    @property
    def handoff(self) -> Any:
        return importlib.import_module("kvfit.handoff").handoff

    @handoff.setter
    def handoff(self, module: types.ModuleType) -> None:
        """Where the import system offers the module of the same name: declined."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'kvfit' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Package
