"""How fast a store is solved, in how much memory, and how much of what the machine can do that is.

    python tests/benchmarks/solve.py --store /tmp/quarter.zarr --top-k 8 all --memory-budget 4

Makes a store of random statistics in the shape of a quarter of the depth of a 14B and a 32B model (unless the folder is there
already), and solves it for every `--top-k` at one penalty. Reports seconds, bytes read, the peak of resident memory, and the
time that the same number of multiplications takes in bare float64 `torch.linalg.cholesky` and `torch.matmul` of the same
sizes, measured just before and after: their ratio is the share of the machine that the solver uses. On a machine that has other
work, the same by processor time says more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from made_mappers import model_spec

from kvfit.fit.solve.fitter import Fitter, groups
from kvfit.fit.solve.options import Options
from kvfit.fit.solve.solve import open_reader, probe_kinds, solve
from kvfit.fit.solve.system import InputSet, input_set
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Accumulator, Store
from kvfit.spec import KINDS, ModelSpec

GIB = 2**30


def make_store(path: Path, source: ModelSpec, target: ModelSpec, n_tokens: int) -> None:
    """Every target layer is a noisy mixture of two source layers, so that the layers rank differently."""
    torch.manual_seed(0)
    with Accumulator.create(path, Layout(source, target), recipe={"benchmark": "solve"}) as accumulator:
        for split, count in (("fit", n_tokens), ("holdout", n_tokens // 4)):
            inputs = {kind: [torch.randn(count, source.width) for _ in range(source.n_layers)] for kind in KINDS}
            outputs: dict[Any, list[torch.Tensor]] = {kind: [] for kind in KINDS}
            for kind in KINDS:
                for t in range(target.n_layers):
                    mixture = inputs[kind][t % source.n_layers] + 0.5 * inputs[kind][(3 * t + 1) % source.n_layers]
                    outputs[kind].append(mixture[:, : target.width] + torch.randn(count, target.width))
            accumulator.add(split, inputs, outputs, None)
        accumulator.finish(None)


def flops(inputs: InputSet, n_targets: int) -> tuple[float, float]:
    """Of factoring an input set, and of its triangular solves and the product with the holdout scatter."""
    f = float(inputs.n_inputs)
    return len(inputs.panels) * f**3 / 3, 4 * f * f * n_targets * inputs.target.width


def planned(store: Path, options: Options) -> tuple[float, float, dict[int, int]]:
    """Multiplications and additions of solving a store: in factors, in products, and the factors' sizes."""
    reader = open_reader(store, options)
    n_source, n_target = reader.store.source.n_layers, reader.store.target.n_layers
    found = [(input_set(reader.models, kind, (i,)), n_target) for kind in KINDS for i in range(n_source)]
    fitter = Fitter(reader, options, progress=False)
    probes = {} if options.top_k == "all" else probe_kinds(reader, options, progress=False)
    found += [(inputs, len(members)) for inputs, members in groups(fitter.sets(fitter.choose(probes))).items()]
    sizes: dict[int, int] = defaultdict(int)
    for inputs, _ in found:
        sizes[inputs.n_inputs] += 1
    counts = [flops(*one) for one in found]
    return sum(count[0] for count in counts), sum(count[1] for count in counts), dict(sizes)


class Rates(NamedTuple):
    """Bare float64 Cholesky and product in operations per second, by the clock and by processor time."""

    cholesky: float
    matmul: float
    cholesky_processor: float
    matmul_processor: float


def bare(f: int, g: int, device: str) -> Rates:
    """Rates of factoring (f, f) and of (f, f) x (f, g)."""
    matrix = torch.eye(f, dtype=torch.float64, device=device) + 1e-5 * torch.ones(f, f, dtype=torch.float64, device=device)
    right = torch.ones(f, g, dtype=torch.float64, device=device)

    def seconds(work: Any) -> tuple[float, float]:
        work()
        times = []
        for _ in range(2):
            synchronise(device)
            started = time.perf_counter(), time.process_time()
            work()
            synchronise(device)
            times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
        return min(wall for wall, _ in times), min(processor for _, processor in times)

    factor, multiply = seconds(lambda: torch.linalg.cholesky(matrix)), seconds(lambda: matrix @ right)
    return Rates(f**3 / 3 / factor[0], 2.0 * f * f * g / multiply[0], f**3 / 3 / factor[1], 2.0 * f * f * g / multiply[1])


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def memory(field: str) -> int:
    """Bytes of resident memory: ``VmRSS`` now, or ``VmHWM`` at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Let ``VmHWM`` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(store: Path, top_k: Any, penalty: float, budget: int, device: str) -> dict[str, Any]:
    """One solve."""
    options = Options(top_k=top_k, penalty=penalty)
    factors, products, sizes = planned(store, options)
    largest, width = max(sizes), Store.open(store).target.width
    before = bare(largest, width, device)
    with tempfile.TemporaryDirectory(dir=store.parent) as folder:
        forget_peak()
        resident = memory("VmRSS")
        started = time.perf_counter()
        processor = time.process_time()
        solved = solve(store, Path(folder) / "bundle", options=options, device=device, memory_budget=budget, progress=False)
        seconds = time.perf_counter() - started
        processor = time.process_time() - processor
        peak = memory("VmHWM") - resident
    after = bare(largest, width, device)
    rates = Rates(*(statistics.fmean(pair) for pair in zip(before, after, strict=True)))
    ideal = factors / rates.cholesky + products / rates.matmul
    ideal_processor = factors / rates.cholesky_processor + products / rates.matmul_processor
    return {
        "top_k": top_k,
        "inputs": largest,
        "factorisations": sizes,
        "seconds": seconds,
        "processor_seconds": processor,
        "gigabytes_read": solved.bytes_read / 1e9,
        "peak_gib": peak / GIB,
        "budget_gib": budget / GIB,
        "teraflops": (factors + products) / 1e12,
        "cholesky_gflops": rates.cholesky / 1e9,
        "matmul_gflops": rates.matmul / 1e9,
        "bare_seconds": ideal,
        "share": ideal / seconds,
        "share_of_processor_time": ideal_processor / processor,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="where the store is or goes; by default a temporary folder")
    parser.add_argument("--layers", type=int, nargs=2, default=(10, 16))
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 128), help="KV heads and head size of both models")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--top-k", nargs="+", default=["8", "all"])
    parser.add_argument("--penalty", type=float, default=0.01)
    parser.add_argument("--memory-budget", type=float, default=4.0, help="GiB")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    folder = None if asked.store else Path(tempfile.mkdtemp())
    store = asked.store or folder / "random.zarr"
    if not store.exists():
        make_store(store, model_spec(asked.layers[0], *asked.heads), model_spec(asked.layers[1], *asked.heads), asked.tokens)
    try:
        for text in asked.top_k:
            found = measure(
                store, text if text == "all" else int(text), asked.penalty, int(asked.memory_budget * GIB), asked.device
            )
            print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}))
    finally:
        if folder is not None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
