"""How long a transfer takes, against the bare matrix products that it contains and against a prefill by the target.

    python tests/benchmarks/transfer.py products --threads 2
    python tests/benchmarks/transfer.py prefill BUNDLE

`products` times `Mapper.transfer` and bare ``torch.addmm`` calls of the same shapes in turn, in one process, on random caches
of two geometries; `prefill` times `transfer`, `handoff` and the target's own prefill on the demo pair (or the pair given).
Of each the fastest of several runs counts, as wall time and as processor time: on a machine that has other work, only the
latter is worth reading.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from made_mappers import mapper_spec, model_spec, random_mapper, random_pairs

from kvfit import handoff
from kvfit.fit.capture.options import LEXICAL_LAGS
from kvfit.model import cache as caches
from kvfit.runtime.transfer import CHUNK_TOKENS
from kvfit.spec import RopeSpec, RopeTable

Times = dict[str, float]


def rope(head_dim: int, n_layers: int) -> RopeSpec:
    """The usual rotation: whole heads, in halves."""
    half = head_dim // 2
    frequencies = torch.tensor([10000.0 ** (-i / half) for i in range(half)])
    return RopeSpec((RopeTable(tuple(frequencies.tolist()), head_dim, "half", 1.0),), (0,) * n_layers)


def pair(name: str) -> Any:
    """A random mapper of a geometry: the demo pair, or 28 layers of 2 heads of size 128.

    Those read 8 source layers each, or all 28, or what `solve` makes by default: all of them, both kinds and three lags of the
    target's first layer, through a shared basis.
    """
    if name == "demo":
        source, target = model_spec(4, 4, 32, rope(32, 4)), model_spec(6, 4, 32, rope(32, 6))
        sets = [range(4)] * 6
    else:
        source = target = model_spec(28, 2, 128, rope(128, 28))
        # The nearest neighbours, as ranking tends to choose, with gaps.
        sets = (
            [range(28)] * 28
            if name == "28-all"
            else [sorted((i + step) % 28 for step in (0, 1, 2, 3, 5, 8, 9, 13)) for i in range(28)]
        )
    if name == "28-basis":
        sets = [range(28)] * 28
        return random_mapper(mapper_spec(source, target, sets, inputs="both", lexical_lags=LEXICAL_LAGS, rank=2048))
    return random_mapper(mapper_spec(source, target, sets))


def timed(jobs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Times]:
    """Fastest wall and processor seconds of each job; the jobs take turns, so that all see the same machine."""
    best = {name: {"wall": float("inf"), "processor": float("inf")} for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            wall, processor = time.perf_counter(), time.process_time()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:  # the first round warms up
                best[name]["wall"] = min(best[name]["wall"], time.perf_counter() - wall)
                best[name]["processor"] = min(best[name]["processor"], time.process_time() - processor)
    return best


def products(options: argparse.Namespace) -> None:
    """The table of transfers against bare products."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    print(f"{'pair':<8} {'tokens':>7} {'products ms':>12} {'transfer ms':>12} {'wall':>6} {'processor':>10}")
    for name in options.pairs:
        mapper = pair(name).to(device, dtype)
        for n_tokens in options.tokens:
            pairs = [(k.to(device, dtype), v.to(device, dtype)) for k, v in random_pairs(mapper.spec.source, 1, n_tokens)]
            weights, basis = list(mapper.maps.weights.values()), mapper.maps.basis
            inputs = {weight.shape[0]: torch.randn(n_tokens, weight.shape[0], device=device).to(dtype) for weight, _ in weights}
            features = None if basis is None else torch.randn(n_tokens, basis.shape[0], device=device).to(dtype)
            first = random_pairs(mapper.spec.target, 1, n_tokens)[0] if mapper.spec.lexical_lags else None

            def bare(weights: Any = weights, inputs: Any = inputs, features: Any = features, basis: Any = basis) -> object:
                projected = None if basis is None else features @ basis
                return [
                    torch.addmm(bias, inputs[weight.shape[0]] if projected is None else projected, weight)
                    for weight, bias in weights
                ]

            def transfer(mapper: Any = mapper, pairs: Any = pairs, first: Any = first) -> object:
                return mapper.transfer_layers(pairs, chunk_tokens=options.chunk, first_layer=first)

            with torch.no_grad():
                found = timed({"products": bare, "transfer": transfer}, options.repeats, device)
            ratios = {clock: found["transfer"][clock] / found["products"][clock] for clock in ("wall", "processor")}
            row = [1000 * found[job]["wall"] for job in ("products", "transfer")]
            print(f"{name:<8} {n_tokens:>7} {row[0]:>12.2f} {row[1]:>12.2f}", end=" ")
            print(f"{ratios['wall']:>6.2f} {ratios['processor']:>10.2f}", flush=True)
            if options.json:
                print(json.dumps({"pair": name, "tokens": n_tokens, "times": found, "ratios": ratios}))


def prefill(options: argparse.Namespace) -> None:
    """The table of transfers against the target's prefill."""
    from kvfit import load_mapper
    from kvfit.fit.capture import models

    device = torch.device(options.device)
    loading = models.Options(dtype=options.dtype, device=options.device)
    mapper = load_mapper(options.bundle, require="any")
    refs = (options.source or mapper.spec.source.ref, options.target or mapper.spec.target.ref)
    source, target = (models.load(ref, options=loading).model for ref in refs)
    mapper = mapper.bind(source, target).to(dtype=getattr(torch, options.dtype))
    print(
        f"{'tokens':>7} {'prefill ms':>11} {'transfer ms':>12} {'handoff ms':>11} {'+ 10 % ms':>10} {'prefill / transfer':>19}"
    )
    for n_tokens in options.tokens:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, mapper.spec.target.n_layers * 100, (1, n_tokens + 1), generator=generator).to(device)
        source_cache = caches.full_cache()
        caches.forward(source, ids[:, :-1], source_cache, base=True)

        def run(ids: Any = ids) -> object:
            return caches.forward(target, ids[:, :-1], caches.new_cache(target), base=True)

        def moved(ids: Any = ids, source_cache: Any = source_cache, **more: Any) -> object:
            return handoff(mapper, target, ids, source_cache, **more)

        jobs = {
            "prefill": run,
            "transfer": lambda cache=source_cache, ids=ids: mapper.transfer(cache, input_ids=ids[:, :-1]),
            "handoff": moved,
            "recompute": lambda moved=moved: moved(recompute=0.1, guide=source),
        }
        with torch.no_grad():
            found = timed(jobs, options.repeats, device)
        clock = options.clock
        row = [1000 * found[job][clock] for job in jobs]
        print(
            f"{n_tokens:>7} {row[0]:>11.1f} {row[1]:>12.1f} {row[2]:>11.1f} {row[3]:>10.1f} {row[0] / row[1]:>19.1f}",
            flush=True,
        )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall", help="which time `prefill` prints")
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("products")
    first.add_argument("--pairs", nargs="+", default=["demo", "28-of-8", "28-all", "28-basis"])
    first.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192])
    first.add_argument("--chunk", type=int, default=CHUNK_TOKENS)
    first.set_defaults(run=products)
    second = commands.add_parser("prefill")
    second.add_argument("bundle")
    second.add_argument("--source", help="default: the one that the bundle names")
    second.add_argument("--target")
    second.add_argument("--tokens", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048, 4096, 8192])
    second.set_defaults(run=prefill)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.run(options)


if __name__ == "__main__":
    main()
