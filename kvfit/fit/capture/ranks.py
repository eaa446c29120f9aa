"""The processes that torchrun has started: which one this is, and how they wait for each other.

With N processes, each captures its own sequences into its own store, and the first process merges the stores at the end. They
exchange nothing else, so they need no shared device and no fast network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvfit.errors import MismatchError


@dataclass(frozen=True)
class Ranks:
    """This process among all processes.

    Attributes:
        rank: number of this process, 0 to `size` - 1.
        size: number of processes.
        local_rank: number of this process on its machine, which selects the GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read torchrun's environment variables; without them there is one process.

        Raises:
            MismatchError: the variables are not numbers, or contradict each other.
        """
        found = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))]
        if not all(value.isdigit() for value in found) or int(found[0]) >= int(found[1]):
            raise MismatchError(f"RANK, WORLD_SIZE, LOCAL_RANK: found {', '.join(found)}, needed what torchrun sets")
        return cls(*map(int, found))

    def owns(self, batch: int) -> bool:
        """Whether batch number `batch` belongs to this process."""
        return batch % self.size == self.rank

    def part(self, store: Path) -> Path:
        """The path that this process captures to: the store itself for a single process, else a part next to it."""
        return store if self.size == 1 else self.parts(store)[self.rank]

    def parts(self, store: Path) -> list[Path]:
        """The paths of all processes' parts."""
        return [store.with_name(f"{store.name}.rank{rank}") for rank in range(self.size)]

    def device(self) -> str | None:
        """The GPU of this process if there are several processes; None for the default choice."""
        return f"cuda:{self.local_rank}" if self.size > 1 and torch.cuda.is_available() else None


@contextmanager
def meeting(ranks: Ranks) -> Iterator[None]:
    """A block that no process enters before all have reached it, and no process leaves before all have finished it."""
    if ranks.size == 1:
        yield
        return
    import torch.distributed as distributed

    distributed.init_process_group("gloo", rank=ranks.rank, world_size=ranks.size)
    try:
        distributed.barrier()
        yield
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
