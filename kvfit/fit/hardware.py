"""The rates at which machines multiply and read memory: measured for this machine, published for others."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvfit.errors import OptionError
from kvfit.fit.capture.models import find_device
from kvfit.fit.stats.moments import precise_matmul

# The share of a published peak that large products and copies reach in practice. Estimated times state it.
EFFICIENCY = 0.5


@dataclass(frozen=True)
class Rates:
    """Rates of plain matrix products in operations per second, and of memory in bytes per second.

    Attributes:
        device: the device.
        forward: products in the dtype of models: bfloat16 on a GPU, float32 on a CPU.
        float32: products without TF32, as for statistics.
        float64: products as for solving.
        bandwidth: reads of the memory that holds weights.
        published: whether these are `EFFICIENCY` of published peaks, and not measured.
    """

    device: str
    forward: float
    float32: float
    float64: float
    bandwidth: float
    published: bool = False


# Dense peaks in TFLOP/s for bfloat16, float32 and float64 (with tensor cores if they support it), and TB/s.
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
        OptionError: the table has no such card.
    """
    if name not in PEAKS:
        raise OptionError(f"--hardware: found {name}, needed this or one of {', '.join(PEAKS)}")
    forward, float32, float64, bandwidth = (EFFICIENCY * 1e12 * peak for peak in PEAKS[name])
    return Rates(name.upper(), forward, float32, float64, bandwidth, published=True)


def measure_rates(device: str | None = None, seconds: float = 0.2) -> Rates:
    """Time a square product of each dtype and a read of memory.

    Args:
        device: the device; None for the first GPU, else the CPU.
        seconds: how long to measure each of them.

    Raises:
        OptionError: this machine has no such device.
    """
    place = find_device(device)
    size = 4096 if place.type == "cuda" else 1024

    def rate(dtype: torch.dtype) -> float:
        matrix = torch.ones(size, size, dtype=dtype, device=place)
        (matrix @ matrix).sum().item()
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            (matrix @ matrix)[0, 0].item()  # waits for the product
            count += 1
        return 2.0 * size**3 * count / (time.perf_counter() - started)

    def bandwidth() -> float:
        block = torch.ones(32 << 20, device=place)  # 128 MiB, which is more than a processor's cache
        count, started = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - started < seconds:
            block.sum().item()
            count += 1
        return block.nbytes * count / (time.perf_counter() - started)

    forward = torch.bfloat16 if place.type == "cuda" else torch.float32
    with precise_matmul():
        return Rates(str(place), rate(forward), rate(torch.float32), rate(torch.float64), bandwidth())
