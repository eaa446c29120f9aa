"""A capture in processes of its own that are killed, for `test_accumulate`. Not a test.

    python killable_capture.py FOLDER SEED KILLS

makes FOLDER/whole.zarr in one go, and FOLDER/killed.zarr through KILLS processes that were ended by SIGKILL, some
at a random time and some at a random one of the calls that the promises hang on: fsync, replace, rename, unlink. Every
process is forked from this one, so that torch is imported once. Prints one JSON line about what happened.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
import zarr  # noqa: F401  before forking, so that a child is at its work at once
from random_pair import SOURCE, TARGET, batches, budget

from kvfit.fit.stats import budget as budgets
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Accumulator

RECIPE = {"seed": 0}
WATCHED = ("fsync", "replace", "rename", "unlink")


def run(path: Path, given: list, in_memory: bool) -> None:
    """Create or resume, and go on to the end; the blocks in memory and a snapshot after each flush, or on disk."""
    settings = {"recipe": RECIPE, "memory_budget": 1 << 30 if in_memory else budget(64), "snapshot_seconds": 0}
    if path.exists():
        accumulator = Accumulator.resume(path, **settings)
    else:
        accumulator = Accumulator.create(path, Layout(SOURCE, TARGET), **settings)
    with accumulator:
        for number in range(accumulator.cursor or 0, len(given)):
            split, source, target = given[number]
            accumulator.add(split, source, target, number + 1)
        if not accumulator.finished:  # as `capture` does: the one before may have been killed after its last commit
            accumulator.finish(len(given))


def die_at(call: int) -> None:
    """SIGKILL this process right before, or right after, its n-th watched call."""
    count = 0

    def watched(name: str) -> None:
        original = getattr(os, name)

        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                if call % 2:
                    original(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, wrapper)

    for name in WATCHED:
        watched(name)


def fork(
    path: Path, given: list, *, in_memory: bool = False, call: int = 0, seconds: float | None = None
) -> tuple[bool, float]:
    """Run in a child; whether it was killed, and how long it took."""
    reader, writer = os.pipe()
    started, child = time.perf_counter(), os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            if call:
                die_at(call)
            run(path, given, in_memory)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    if not select.select([reader], [], [], seconds)[0]:  # readable when the child is gone
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        sys.exit(f"a child failed: {status}")
    return os.WIFSIGNALED(status), time.perf_counter() - started


def main(folder: Path, seed: int, kills: int) -> None:
    torch.set_num_threads(1)
    budgets.RESIDENT_BUFFER = 64  # as the other way has, so that both empty it at the same batches
    chance = random.Random(seed)
    given = batches([chance.randrange(1, 50) for _ in range(100)] + [150, 7], seed=seed, mean=30.0)
    _, seconds = fork(folder / "whole.zarr", given)
    path, kills_of, cursors = folder / "killed.zarr", [0], []
    while sum(kills_of) < kills:
        if not path.exists():  # creation makes some 130 of the calls, more when it clears what a dead one left
            how = {"call": chance.randrange(1, 130) if len(cursors) < 2 else chance.randrange(200, 500)}
        elif len(cursors) % 2:
            how = {"call": chance.randrange(1, 60)}  # a commit makes some 20
        else:
            how = {"seconds": chance.uniform(0, seconds / 3)}
        killed, _ = fork(path, given, in_memory=chance.random() < 0.5, **how)
        kills_of[-1] += killed
        cursors.append(json.loads((path / "commit.json").read_bytes())["record"]["cursor"] if path.exists() else "nothing")
        if not killed:  # it got to the end: once more from the start
            os.rename(path, folder / f"killed-{len(kills_of)}.zarr")
            kills_of.append(0)
    fork(path, given)
    print(json.dumps({"kills": kills_of, "cursors": cursors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
