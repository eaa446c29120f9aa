"""The processes that torchrun started: which one this is, and where they wait for each other.

A capture of N processes is N captures of their own sequences into stores of their own, merged at the end by the first.
Nothing else passes between them, so the processes need no shared device and no fast network.
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
    """This process among all.

    Attributes:
        rank: 0 to `size` - 1.
        size: processes in all.
        local_rank: among those of this machine; picks the GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """What torchrun has put into the environment; one process where it has not.

        Raises:
            MismatchError: the variables are not numbers that fit each other.
        """
        found = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))]
        if not all(value.isdigit() for value in found) or int(found[0]) >= int(found[1]):
            raise MismatchError(f"RANK, WORLD_SIZE, LOCAL_RANK: found {', '.join(found)}, needed what torchrun sets")
        return cls(*map(int, found))

    def owns(self, batch: int) -> bool:
        """Whether batch number `batch` is this process's."""
        return batch % self.size == self.rank

    def part(self, store: Path) -> Path:
        """Where this process captures: the store itself for a single process, else a part beside it."""
        return store if self.size == 1 else self.parts(store)[self.rank]

    def parts(self, store: Path) -> list[Path]:
        """The parts of all processes."""
        return [store.with_name(f"{store.name}.rank{rank}") for rank in range(self.size)]

    def device(self) -> str | None:
        """The GPU of this process where several share a machine; None for the usual choice."""
        return f"cuda:{self.local_rank}" if self.size > 1 and torch.cuda.is_available() else None


@contextmanager
def meeting(ranks: Ranks) -> Iterator[None]:
    """Entered by all processes once all are there, left by all once all have left."""
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
