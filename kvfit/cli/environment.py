"""The verb `env`: versions, machine and devices, for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import kvfit

_RUNTIME = ("torch", "safetensors", "huggingface-hub")
_EXTRAS = ("transformers", "tokenizers", "accelerate", "datasets", "zarr", "numpy", "click", "vllm")
PACKAGES = (*_RUNTIME, *_EXTRAS)
VARIABLES = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Environment:
    """Versions, machine and devices, without any token or other secret.

    Attributes:
        kvfit: version of kvfit.
        python: version of Python.
        system: operating system and processor.
        cores: number of logical processors that this process may use.
        packages: version per package; None if it is not installed.
        devices: names of the GPUs.
        variables: the environment variables that affect kvfit and are set.
    """

    kvfit: str
    python: str
    system: str
    cores: int
    packages: dict[str, str | None]
    devices: tuple[str, ...]
    variables: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        rows = {"kvfit": self.kvfit, "python": self.python, "system": self.system, "cores": str(self.cores)}
        rows |= {name: version or "not installed" for name, version in self.packages.items()}
        rows["devices"] = ", ".join(self.devices) or "cpu only"
        rows |= self.variables
        return "\n".join(f"{name:<22}{value}" for name, value in rows.items())


def environment() -> Environment:
    """Collect the facts about this process."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Environment(
        kvfit=kvfit.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=available,
        packages={name: _version(name) for name in PACKAGES},
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
