"""kvfit: let one language model continue from another model's KV cache.

Public names are loaded when first used, so that ``import kvfit`` costs nothing:

    from kvfit import load_mapper, handoff
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfit.hub.load import load_mapper
    from kvfit.runtime.handoff import Handoff, handoff
    from kvfit.runtime.mapper import Mapper

__version__ = "0.1.0"

_HOMES = {
    "Handoff": "kvfit.runtime.handoff",
    "Mapper": "kvfit.runtime.mapper",
    "handoff": "kvfit.runtime.handoff",
    "load_mapper": "kvfit.hub.load",
}

__all__ = ["Handoff", "Mapper", "__version__", "handoff", "load_mapper"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvfit' has no attribute {name!r}")
    with warnings.catch_warnings():
        # torch warns when it is first imported without numpy, which neither it nor kvfit's runtime needs.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
