"""What a memory budget holds: the token buffer, and all blocks of a store or those on their way to disk."""

from __future__ import annotations

import torch

from kvfit.errors import MismatchError
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.resident import resident_bytes
from kvfit.fit.stats.updater import working_bytes

LARGEST_BUFFER = 32_768  # tokens; more would only make commits rarer
RESIDENT_BUFFER = 8192  # tokens with the blocks in memory; adding to the blocks then costs 2 % of the products
LEAST_RESIDENT_BUFFER = 1024
AUTO_SHARE = 0.5  # of the free memory, for a memory budget of ``auto``
BUFFER_SHARE = 7 / 8  # of the memory budget; the rest, and a fixed few hundred MB, is for blocks on their way to disk


def free_share(device: torch.device | str | None = None) -> int:
    """The memory budget that ``auto`` means: half of what is free where the statistics are, bytes."""
    return int(AUTO_SHARE * free_memory(device))


def free_memory(device: torch.device | str | None = None) -> int:
    """Bytes that are free on a device, the host's by default."""
    place = torch.device(device or "cpu")
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def fits_in_memory(layout: Layout, memory_budget: int) -> bool:
    """Whether all blocks and a buffer of `LEAST_RESIDENT_BUFFER` tokens fit into `memory_budget` bytes."""
    return memory_budget >= resident_bytes(layout) + LEAST_RESIDENT_BUFFER * layout.token_bytes


def buffer_tokens(layout: Layout, memory_budget: int) -> int:
    """Tokens that the buffer of a store holds within `memory_budget` bytes."""
    if fits_in_memory(layout, memory_budget):
        return min(RESIDENT_BUFFER, LARGEST_BUFFER, (memory_budget - resident_bytes(layout)) // layout.token_bytes)
    return max(1, min(LARGEST_BUFFER, int(memory_budget * BUFFER_SHARE) // layout.token_bytes))


def check_budget(layout: Layout, memory_budget: int) -> None:
    """Refuse a budget that one token and the blocks on their way to disk exceed.

    Raises:
        MismatchError: with the least that will do.
    """
    least = layout.token_bytes + working_bytes(layout)
    if memory_budget < least:
        kib = -(-least // 1024)
        raise MismatchError(
            f"--memory-budget: found {memory_budget} bytes, needed at least {kib}KiB for one token and the blocks of this "
            "pair: raise it"
        )
