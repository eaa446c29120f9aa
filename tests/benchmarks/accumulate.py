"""How fast statistics accumulate, and in how much memory.

    python tests/benchmarks/accumulate.py --budgets 1 2 4 --fills 1

Feeds random activations of a pair of models that exists only as shapes, by default a quarter of the depth of a 14B and a 32B
model, to an `Accumulator` and prints per memory budget: the throughput of the accumulation as a share of bare
`torch.matmul` products of the same shapes in the same process, the time the disk took, and the peak of resident memory
beyond the activations. Every budget runs in a process of its own, because a process's peak never falls.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvfit.fit import moments
from kvfit.fit.layout import Layout
from kvfit.fit.store import Accumulator, Store
from kvfit.fit.updater import units
from kvfit.spec import KINDS, ModelSpec, RopeSpec

GIB = 2**30


def geometry(n_layers: int, n_heads: int, head_dim: int) -> ModelSpec:
    """A model of which only the shape of its cache matters."""
    return ModelSpec(
        ref="random/activations", revision=None, family="random", n_layers=n_layers, n_heads=n_heads, head_dim=head_dim,
        n_query_heads=n_heads, windows=(None,) * n_layers, rope=RopeSpec((), (None,) * n_layers), tokenizer_fingerprint="",
        config_digest="", weight_fingerprint="", dtype="float32", quantisation=None,
    )  # fmt: skip


def resident() -> float:
    """Bytes resident now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def peak() -> float:
    """Bytes resident at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flops_per_token(layout: Layout) -> int:
    """Multiplications and additions of all products that one token takes part in."""
    return sum(2 * array.n_pairs * array.rows * array.columns for array in layout.blocks)


def bare_rate(layout: Layout, device: torch.device, seconds: float) -> float:
    """FLOP/s of the products alone: the shapes of the accumulation, float32, nothing kept."""
    n_rows = moments.ROWS_PER_SUM
    width = sum(layout.widths)
    rows = torch.randn(n_rows, width, device=device)
    shapes = []
    for array in layout.blocks:
        for numbers in units(array):
            first, last = array.chunks[numbers[0]].first, array.chunks[numbers[-1]].last
            pair = first
            while pair < last:
                left, right = array.pairs[pair]
                n_pairs = min(last - pair, array.n_right - right)
                offset = 0 if array.role == "source" else layout.widths[0]
                shapes.append((array, left, offset + right * array.columns, n_pairs))
                pair += n_pairs
    done, started = 0, time.perf_counter()
    with moments.precise_matmul():
        while True:
            for array, left, begin, n_pairs in shapes:
                torch.matmul(
                    rows[:, left * array.rows : (left + 1) * array.rows].T, rows[:, begin : begin + n_pairs * array.columns]
                )
                done += 2 * n_rows * array.rows * n_pairs * array.columns
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if time.perf_counter() - started > seconds:
                    return done / (time.perf_counter() - started)


def run_one(options: argparse.Namespace, budget: float, folder: Path) -> dict[str, float]:
    """One budget: accumulate `fills` buffers of tokens, then the bare products."""
    device = torch.device(options.device)
    source, target = (
        geometry(options.source_layers, 8, options.width // 8),
        geometry(options.target_layers, 8, options.width // 8),
    )
    dtype = getattr(torch, options.dtype)
    batch = [
        {k: [torch.randn(options.batch, m.width, device=device).to(dtype) for _ in range(m.n_layers)] for k in KINDS}
        for m in (source, target)
    ]
    layout = Layout(source, target, "same", options.stats_dtype)
    torch.matmul(torch.randn(512, 512), torch.randn(512, 512))  # the libraries' own memory is not the store's
    before = resident()
    path = folder / "bench.zarr"
    with Accumulator.create(
        path,
        source=source,
        target=target,
        recipe={},
        stats_dtype=options.stats_dtype,
        memory_budget=int(budget * GIB),
        device=device,
    ) as accumulator:
        n_batches = max(1, round(options.fills * accumulator.buffer_tokens / options.batch))
        started = time.perf_counter()
        for number in range(n_batches):
            accumulator.add(
                "holdout" if options.holdout and number % options.holdout == 0 else "fit", batch[0], batch[1], number
            )
        accumulator.finish(n_batches)
        wall, seconds = time.perf_counter() - started, accumulator.seconds
        beyond = peak() - before
        n_tokens = n_batches * options.batch
        busy = wall - seconds["wait"]
        found = {
            "budget_gib": budget, "tokens": n_tokens, "commits": accumulator.commits, "wall_s": wall,
            "products_s": seconds["products"], "disk_s": seconds["disk"], "waited_for_disk_s": seconds["wait"],
            "peak_beyond_gib": beyond / GIB,
        }  # fmt: skip
    flops = n_tokens * flops_per_token(layout)
    assert Store.open(path).count("all") == n_tokens
    bare = bare_rate(layout, device, options.bare_seconds)
    return {
        **found,
        "bare_gflops": bare / 1e9,
        "products_share": flops / found["products_s"] / bare,
        "share": flops / busy / bare,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 2, 4], help="memory budgets in GiB")
    parser.add_argument("--fills", type=float, default=1, help="buffers of tokens per budget")
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
    print(
        f"{'budget':>7} {'tokens':>7} {'commits':>7} {'wall':>8} {'products':>9} {'disk':>8} {'waited':>8} {'bare':>11} {'share':>6} {'peak':>9}"
    )
    for budget in options.budgets:
        folder = Path(tempfile.mkdtemp(prefix="kvfit-bench-", dir=options.folder))
        try:
            arguments = [*sys.argv[1:], "--one", str(budget), "--folder", str(folder)]
            done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        finally:
            shutil.rmtree(folder)
        row = json.loads(done.stdout)
        print(
            f"{budget:4g}GiB {row['tokens']:7d} {row['commits']:7d} {row['wall_s']:7.1f}s {row['products_s']:8.1f}s "
            f"{row['disk_s']:7.1f}s {row['waited_for_disk_s']:7.1f}s {row['bare_gflops']:6.1f}GF/s {row['share']:6.1%} "
            f"{row['peak_beyond_gib']:6.2f}GiB"
        )


if __name__ == "__main__":
    main()
