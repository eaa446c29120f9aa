"""How a memory budget is shared between the token buffer and the blocks of a store."""

from __future__ import annotations

import torch

from kvfit.errors import MismatchError
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.resident import resident_bytes
from kvfit.fit.stats.updater import working_bytes

LARGEST_BUFFER = 32_768  # tokens; a larger buffer would only make commits rarer
RESIDENT_BUFFER = 8192  # tokens, where the blocks are in memory; adding to the blocks then costs 2 % of the products
LEAST_RESIDENT_BUFFER = 1024
AUTO_SHARE = 0.5  # the share of the free memory that a memory budget of ``auto`` takes
BUFFER_SHARE = 7 / 8  # the buffer's share of the budget; the remainder and a few hundred MB more are for blocks being written


def free_share(device: torch.device | str | None = None) -> int:
    """The memory budget, in bytes, that ``auto`` means: half of the free memory on the device of the statistics."""
    return int(AUTO_SHARE * free_memory(device))


def free_memory(device: torch.device | str | None = None) -> int:
    """The bytes that are free on a device, by default on the host."""
    place = torch.device(device or "cpu")
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def fits_in_memory(layout: Layout, memory_budget: int) -> bool:
    """Whether all blocks and a buffer of `LEAST_RESIDENT_BUFFER` tokens fit into `memory_budget` bytes."""
    return memory_budget >= resident_bytes(layout) + LEAST_RESIDENT_BUFFER * layout.token_bytes


def buffer_tokens(layout: Layout, memory_budget: int) -> int:
    """The number of tokens in a store's buffer within `memory_budget` bytes."""
    if fits_in_memory(layout, memory_budget):
        return min(RESIDENT_BUFFER, LARGEST_BUFFER, (memory_budget - resident_bytes(layout)) // layout.token_bytes)
    return max(1, min(LARGEST_BUFFER, int(memory_budget * BUFFER_SHARE) // layout.token_bytes))


def check_budget(layout: Layout, memory_budget: int) -> None:
    """Refuse a budget that is too small for one token and the blocks on their way to disk.

    Raises:
        MismatchError: says the least budget that is enough.
    """
    least = layout.token_bytes + working_bytes(layout)
    if memory_budget < least:
        kib = -(-least // 1024)
        raise MismatchError(
            f"--memory-budget: found {memory_budget} bytes, needed at least {kib}KiB for one token and the blocks of this "
            "pair: raise it"
        )
