"""How fast statistics accumulate, and in how much memory.

    python tests/benchmarks/accumulate.py --budgets 1 2 4 --fills 1

Feeds random activations of a pair of models that exists only as shapes, by default a quarter of the depth of a 14B and a 32B
model, to an `Accumulator` and prints per memory budget: the throughput of the accumulation as a share of bare
`torch.matmul` products of the same shapes in the same process, the time the disk took, and the peak of resident memory
beyond the activations (Linux). ``share`` is by processor time without the disk's part: reading, hashing and writing chunks
runs beside the products, and takes processor time from them where every core multiplies. ``+disk`` is the same with it, and
``wall`` by the clock, less what was spent waiting for the disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from made_mappers import model_spec

from kvfit.fit.stats import moments
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Accumulator, Store
from kvfit.fit.stats.updater import units
from kvfit.spec import KINDS

GIB = 2**30


def memory(field: str) -> int:
    """Bytes of resident memory: ``VmRSS`` now, or ``VmHWM`` at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Let ``VmHWM`` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def flops_per_token(layout: Layout) -> int:
    """Multiplications and additions of all products that one token takes part in."""
    return sum(2 * array.n_pairs * array.rows * array.columns for array in layout.blocks)


def bare(layout: Layout, device: torch.device, seconds: float) -> Work:
    """The products alone: the shapes of the accumulation, in float32, into one reused result."""
    n_rows, width = moments.ROWS_PER_SUM, sum(layout.widths)
    rows = torch.randn(n_rows, width, device=device)
    shapes = []
    for array in layout.blocks:
        for numbers in units(array):
            pair, last = array.chunks[numbers[0]].first, array.chunks[numbers[-1]].last
            while pair < last:
                left, right = array.pairs[pair]
                n_pairs = min(last - pair, array.n_right - right)
                offset = 0 if array.role == "source" else layout.widths[0]
                shapes.append((array, left, offset + right * array.columns, n_pairs))
                pair += n_pairs
    result = torch.empty(max(array.rows * n_pairs * array.columns for array, _, _, n_pairs in shapes), device=device)
    flops, clock = 0, Clock()
    with moments.precise_matmul():
        for array, left, begin, n_pairs in itertools.cycle(shapes):
            columns = n_pairs * array.columns
            torch.matmul(
                rows[:, left * array.rows : (left + 1) * array.rows].T,
                rows[:, begin : begin + columns],
                out=result[: array.rows * columns].view(array.rows, columns),
            )
            flops += 2 * n_rows * array.rows * columns
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if clock.wall > seconds:
                return Work(flops, clock.wall, clock.processor)
    raise AssertionError("a pair without blocks")


class Clock:
    """Seconds since it was made: on the wall, and of all this process's threads together."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._started[0]

    @property
    def processor(self) -> float:
        return time.process_time() - self._started[1]


class Work(NamedTuple):
    """Floating-point operations and the seconds they took; the processor's seconds do not depend on who else is running."""

    flops: int
    wall: float
    processor: float

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.flops + other.flops, self.wall + other.wall, self.processor + other.processor)


def run_one(options: argparse.Namespace, budget: float, folder: Path) -> dict[str, float]:
    """One budget: half of the bare products, the accumulation, and the other half."""
    device = torch.device(options.device)
    source, target = (model_spec(n, 8, options.width // 8) for n in (options.source_layers, options.target_layers))
    layout = Layout(source, target, "same", options.stats_dtype)
    dtype = getattr(torch, options.dtype)
    batch = [
        {k: [torch.randn(options.batch, m.width, device=device).to(dtype) for _ in range(m.n_layers)] for k in KINDS}
        for m in (source, target)
    ]
    alone = bare(layout, device, options.bare_seconds / 2)
    before = memory("VmRSS")
    forget_peak()
    path = folder / "bench.zarr"
    settings = {"memory_budget": int(budget * GIB), "device": device}
    with Accumulator.create(path, layout, recipe={}, **settings) as accumulator:
        n_batches = max(1, options.fills * (accumulator.buffer_tokens // options.batch))  # whole buffers, one commit for each
        clock = Clock()
        for number in range(n_batches):
            split = "holdout" if options.holdout and number % options.holdout == 0 else "fit"
            accumulator.add(split, batch[0], batch[1], number)
        accumulator.finish(n_batches)
        seconds, n_tokens = accumulator.seconds, n_batches * options.batch
        work = Work(n_tokens * flops_per_token(layout), clock.wall, clock.processor)
        beyond = memory("VmHWM") - before
    commits = Store.open(path).record.commit
    if Store.open(path).count("all") != n_tokens:
        raise AssertionError("tokens were lost")
    alone += bare(layout, device, options.bare_seconds / 2)
    return {
        "tokens": n_tokens, "commits": commits, "wall": work.wall, "products": seconds["products"], "disk": seconds["disk"],
        "wait": seconds["wait"], "bare": alone.flops / alone.wall / 1e9,
        "share": work.flops / (work.processor - seconds["disk_processor"]) / (alone.flops / alone.processor),
        "share_with_disk": work.flops / work.processor / (alone.flops / alone.processor),
        "wall_share": work.flops / (work.wall - seconds["wait"]) / (alone.flops / alone.wall), "peak": beyond / GIB,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 2, 4], help="memory budgets in GiB")
    parser.add_argument("--fills", type=int, default=1, help="buffers of tokens per budget")
    parser.add_argument("--batch", type=int, default=512, help="tokens per batch")
    parser.add_argument("--holdout", type=int, default=0, help="every n-th batch is holdout")
    parser.add_argument("--source-layers", type=int, default=10)
    parser.add_argument("--target-layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024, help="features per layer and kind")
    parser.add_argument("--dtype", default="float32", help="of the activations")
    parser.add_argument("--stats-dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bare-seconds", type=float, default=10, help="how long to time the bare products")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the stores; deleted afterwards")
    parser.add_argument("--one", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_one(options, options.one, options.folder)))
        return
    print(" budget  tokens commits     wall products     disk     wait        bare   share   +disk    wall      peak")
    for budget in options.budgets:
        folder = Path(tempfile.mkdtemp(prefix="kvfit-bench-", dir=options.folder))
        try:
            arguments = [*sys.argv[1:], "--one", str(budget), "--folder", str(folder)]
            done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        finally:
            shutil.rmtree(folder)
        row = json.loads(done.stdout)
        times = " ".join(f"{row[name]:7.1f}s" for name in ("wall", "products", "disk", "wait"))
        print(
            f"{budget:4g}GiB {row['tokens']:7d} {row['commits']:7d} {times} {row['bare']:7.1f}GF/s "
            f"{row['share']:7.1%} {row['share_with_disk']:7.1%} {row['wall_share']:7.1%} {row['peak']:6.2f}GiB"
        )


if __name__ == "__main__":
    main()
