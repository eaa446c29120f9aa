"""What `load_mapper` takes for a large bundle, as a multiple of reading its tensors and nothing else.

    python tests/benchmarks/load.py --gigabytes 2

The bundle is written to a temporary folder and read once before anything is timed, so the times are those of a warm file cache.
The machine's hashing rate is printed beside them: with more processors than weight files the check of digests hides behind
reading; with fewer it bounds the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bundle_factory import mapper_spec, model_spec

from kvfit import load_mapper
from kvfit.bundle.bundle import write_bundle
from kvfit.bundle.manifest import file_digest
from kvfit.spec import KINDS, LayerMap, MapperSpec


def large_spec(gigabytes: float) -> MapperSpec:
    """A mapper of about so many bytes in float32: four source layers to as many target layers as it takes."""
    source = model_spec("org/small", n_layers=4, n_heads=8, head_dim=128)
    per_layer = 2 * 4 * 4 * source.width**2
    n_layers = max(1, round(gigabytes * 1e9 / per_layer))
    target = model_spec("org/large", n_layers=n_layers, n_heads=8, head_dim=128)
    layers = tuple(LayerMap(kind, index, (0, 1, 2, 3), 0.0, 0.0, 0.0) for index in range(n_layers) for kind in KINDS)
    return dataclasses.replace(mapper_spec(), source=source, target=target, layers=layers)


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of a run, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(gigabytes: float, shard_gigabytes: float, repeats: int, device: str = "cpu") -> tuple[int, dict[str, float]]:
    """Bytes of the weight files, and the median seconds of each way to read them to a device, by name."""
    spec = large_spec(gigabytes)

    def weights() -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
        for entry in spec.layers:
            weight = torch.rand(spec.weight_shape(entry.kind, entry.layer_index))
            yield entry.kind, entry.layer_index, weight, weight[0].clone()

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "bundle"
        write_bundle(folder, spec, weights(), recipe={}, solve={}, shard_bytes=int(shard_gigabytes * 1e9))
        files = sorted(folder.glob("*.safetensors"))

        def bare() -> list[torch.Tensor]:
            return [tensor.clone() for path in files for tensor in load_file(path, device=device).values()]

        times = {
            "bare reading": median_seconds(bare, repeats),
            "verify='size'": median_seconds(lambda: load_mapper(folder, device=device, verify="size"), repeats),
            "verify='digest'": median_seconds(lambda: load_mapper(folder, device=device), repeats),
            "hashing on one thread": median_seconds(lambda: [file_digest(path) for path in files], 1),
        }
        return sum(path.stat().st_size for path in files), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shard-gigabytes", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    size, times = measure(options.gigabytes, options.shard_gigabytes, options.repeats, options.device)
    print(f"{size / 1e9:.2f} GB, {os.cpu_count()} processors")
    for name, seconds in times.items():
        ratio = seconds / times["bare reading"]
        print(f"{name:22} {seconds:7.2f} s  {size / 1e9 / seconds:5.2f} GB/s  {ratio:5.2f} x bare reading")


if __name__ == "__main__":
    main()
