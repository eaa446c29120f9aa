"""How fast machines multiply and read memory: this one by measuring, others from what their makers publish."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvfit.errors import OptionError
from kvfit.fit.capture.models import find_device
from kvfit.fit.stats.moments import precise_matmul

# Of a published peak, what large products and copies reach in practice; so that a time says what it assumes.
EFFICIENCY = 0.5


@dataclass(frozen=True)
class Rates:
    """Bare matrix products in operations per second, and memory in bytes per second.

    Attributes:
        device: whose they are.
        forward: in the dtype that models run in there: bfloat16 on a graphics card, float32 on a processor.
        float32: without TF32, as statistics need.
        float64: as solving needs.
        bandwidth: of the memory that weights are in.
        published: whether these are `EFFICIENCY` of published peaks rather than measured.
    """

    device: str
    forward: float
    float32: float
    float64: float
    bandwidth: float
    published: bool = False


# Dense peaks without sparsity, TFLOP/s in bfloat16, float32 and float64 (tensor cores where they have it), and TB/s.
# Source: NVIDIA's data sheets of the H100 SXM, H200 SXM, A100 SXM 80 GB and L40S.
PEAKS = {
    "h100": (989.0, 67.0, 67.0, 3.35),
    "h200": (989.0, 67.0, 67.0, 4.8),
    "a100": (312.0, 19.5, 19.5, 2.04),
    "l40s": (362.0, 91.6, 1.43, 0.864),
}


def published_rates(name: str) -> Rates:
    """The rates of a card by name.

    Raises:
        OptionError: no such card in the table.
    """
    if name not in PEAKS:
        raise OptionError(f"--hardware: found {name}, needed this or one of {', '.join(PEAKS)}")
    forward, float32, float64, bandwidth = (EFFICIENCY * 1e12 * peak for peak in PEAKS[name])
    return Rates(name.upper(), forward, float32, float64, bandwidth, published=True)


def measure_rates(device: str | None = None, seconds: float = 0.2) -> Rates:
    """Time a square product of each dtype and a copy, `seconds` each.

    Args:
        device: None for the first GPU, else the CPU.
        seconds: how long to measure each.

    Raises:
        OptionError: no such device here.
    """
    place = find_device(device)
    size = 4096 if place.type == "cuda" else 1024

    def rate(dtype: torch.dtype) -> float:
        matrix = torch.ones(size, size, dtype=dtype, device=place)
        (matrix @ matrix).sum().item()
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            (matrix @ matrix)[0, 0].item()  # waits for it
            count += 1
        return 2.0 * size**3 * count / (time.perf_counter() - started)

    def bandwidth() -> float:
        block = torch.ones(32 << 20, device=place)  # 128 MiB: more than a processor's cache holds
        count, started = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - started < seconds:
            block.sum().item()
            count += 1
        return block.nbytes * count / (time.perf_counter() - started)

    forward = torch.bfloat16 if place.type == "cuda" else torch.float32
    with precise_matmul():
        return Rates(str(place), rate(forward), rate(torch.float32), rate(torch.float64), bandwidth())
