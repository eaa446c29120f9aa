"""Measure on this machine what docs/benchmarks.md computes from shapes: everything in one run, as ratios.

    python tests/benchmarks/gpu.py > gpu.md                     # a card of 80 GB: the shapes of Qwen3 8B and 14B
    python tests/benchmarks/gpu.py --pair qwen3-14b qwen3-32b   # a card of 141 GB
    python tests/benchmarks/gpu.py --device cpu --small         # the same steps on tiny models, to try them

Models and maps have public shapes and random weights, on which no time depends. Prints Markdown: transfers against the bare
matrix products that they contain, against the target's prefill and against a handoff; capture against its two forward passes;
`load_mapper` against bare reading. Of each the fastest of several runs counts, and the runs that are compared take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import load
import torch
from accumulate import flops_per_token
from torch import Tensor
from transfer import timed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from made_mappers import mapper_spec, spec_of

from kvfit import handoff
from kvfit.cost import Prefill, map_parameters
from kvfit.fit.capture.activations import Activations
from kvfit.fit.capture.capture import LEXICAL_LAGS
from kvfit.fit.hardware import measure_rates
from kvfit.fit.payoff import MapOption, map_options
from kvfit.fit.stats.accumulate import Accumulator
from kvfit.fit.stats.budget import free_share
from kvfit.fit.stats.layout import Layout
from kvfit.model import cache as caches
from kvfit.model.decoder import decoder_parameters
from kvfit.runtime.mapper import Mapper
from kvfit.spec import MapperSpec, ModelSpec


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's shape: layers, width, width of the feed-forward layers, heads of queries and of keys, size of a head."""

    n_layers: int
    hidden: int
    intermediate: int
    n_query_heads: int
    n_heads: int = 8
    head_dim: int = 128


# Source: the models' configurations on the Hub.
SHAPES = {
    "qwen3-8b": Shape(36, 4096, 12288, 32),
    "qwen3-14b": Shape(40, 5120, 17408, 40),
    "qwen3-32b": Shape(64, 5120, 25600, 64),
    "small-4": Shape(4, 128, 256, 4, 2, 32),
    "small-6": Shape(6, 256, 512, 8, 2, 32),
}
VOCABULARY = 32_000


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of that shape with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_query_heads, num_key_value_heads=shape.n_heads,
        head_dim=shape.head_dim, max_position_embeddings=131_072,
    )  # fmt: skip
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def specs_of_maps(source: ModelSpec, target: ModelSpec) -> Iterator[tuple[str, MapperSpec]]:
    """The maps in 16 bits that docs/benchmarks.md computes for the pair, by the same names."""
    every = list(range(source.n_layers))

    def made(sets: list[list[int]], rank: int | None = None) -> MapperSpec:
        return mapper_spec(source, target, sets, inputs="both", lexical_lags=LEXICAL_LAGS, rank=rank)

    yield f"all {source.n_layers} layers", made([every] * target.n_layers)
    if source.n_layers > 8:
        starts = [min(t * source.n_layers // target.n_layers, source.n_layers - 8) for t in range(target.n_layers)]
        yield "8 layers each", made([every[start : start + 8] for start in starts])
    for option in map_options(source, target, Prefill(1.0, 2), n_lags=len(LEXICAL_LAGS)):
        name, _, rank = option.name.rpartition(" ")
        if name.endswith("rank"):
            yield option.name, made([every] * target.n_layers, int(rank))


def random_map(spec: MapperSpec, device: torch.device, dtype: torch.dtype) -> Mapper:
    """A mapper with random weights, made where they will be used."""

    def matrix(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * shape[-2] ** -0.5

    weights = {}
    for layer in spec.layers:
        key = (layer.kind, layer.layer_index)
        weights[key] = (matrix(spec.weight_shape(*key)), torch.zeros(spec.target.width, device=device, dtype=dtype))
    return Mapper(spec, weights, basis=matrix(spec.basis_shape) if spec.rank else None, verdict="pass")


def bare_products(mapper: Mapper, n_tokens: int) -> Callable[[], object]:
    """The matrix products of a transfer and nothing else."""
    basis, weights = mapper.maps.basis, list(mapper.maps.weights.values())
    widths = {weight.shape[0] for weight, _ in weights} | ({basis.shape[0]} if basis is not None else set())
    like = weights[0][0]
    inputs = {width: torch.randn(n_tokens, width, device=like.device).to(like.dtype) for width in widths}

    def run() -> object:
        projected = None if basis is None else inputs[basis.shape[0]] @ basis
        return [torch.addmm(bias, inputs[len(weight)] if projected is None else projected, weight) for weight, bias in weights]

    return run


@torch.no_grad()
def transfers(source: Any, target: Any, asked: argparse.Namespace) -> None:
    """Print the table of transfers."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    specs = [spec_of(model, name) for model, name in zip((source, target), asked.pair, strict=True)]
    prefill = Prefill(decoder_parameters(target), torch.empty(0, dtype=dtype).element_size())
    computed = {
        one.name: one for one in map_options(*specs, prefill, n_lags=len(LEXICAL_LAGS), rates=measure_rates(asked.device))
    }
    ids = torch.randint(0, VOCABULARY, (1, asked.tokens + 1), device=device)
    source_cache = caches.full_cache()
    caches.forward(source, ids[:, :-1], source_cache, base=True)
    print(f"\n## Transfer of {asked.tokens:,} tokens\n")
    print("| map | weights | transfer / products | prefill / transfer | computed | prefill / handoff | prefill / 10 % guided |")
    print("|---|---|---|---|---|---|---|")
    for name, spec in specs_of_maps(*specs):
        mapper = random_map(spec, device, dtype)
        jobs: dict[str, Callable[[], object]] = {
            "products": bare_products(mapper, asked.tokens),
            "transfer": lambda mapper=mapper: mapper.transfer(source_cache, input_ids=ids[:, :-1], target_model=target),
            "prefill": lambda: caches.forward(target, ids[:, :-1], caches.new_cache(target), base=True),
            "handoff": lambda mapper=mapper: handoff(mapper, target, ids, source_cache),
            "guided": lambda mapper=mapper: handoff(mapper, target, ids, source_cache, recompute=0.1, guide=source),
        }
        wall = {job: times["wall"] for job, times in timed(jobs, asked.repeats, device).items()}
        nbytes = map_parameters(spec) * prefill.item_bytes
        cells = [f"{wall['transfer'] / wall['products']:.2f}", f"{wall['prefill'] / wall['transfer']:.1f}"]
        cells += [_computed(computed[name]), *(f"{wall['prefill'] / wall[job]:.1f}" for job in ("handoff", "guided"))]
        print(f"| {name} | {nbytes / 1e9:.3g} GB | {' | '.join(cells)} |", flush=True)
        del mapper, jobs
    print(
        "\nComputed: prefill / map of a roofline of this machine's own products and memory, 8,192 tokens, attention's scores "
        "left out."
    )


def _computed(option: MapOption) -> str:
    assert option.milliseconds is not None
    of_map, of_prefill = option.milliseconds
    return f"{of_prefill / of_map:.1f}"


@torch.no_grad()
def capturing(shapes: list[Shape], asked: argparse.Namespace) -> None:
    """Print what statistics cost beside the two forward passes, on models cut to fewer layers."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    cut = [dataclasses.replace(shape, n_layers=min(shape.n_layers, asked.capture_layers)) for shape in shapes]
    models = [build(shape, device, dtype) for shape in cut]
    specs = [spec_of(model) for model in models]
    whole = [dataclasses.replace(spec, n_layers=shape.n_layers) for spec, shape in zip(specs, shapes, strict=True)]
    forward = 2 * sum(decoder_parameters(model) for model in models)
    of_whole = forward * sum(shape.n_layers for shape in shapes) / sum(shape.n_layers for shape in cut)
    products, all_products = (flops_per_token(Layout(*pair, "both", "float32", LEXICAL_LAGS)) for pair in (specs, whole))
    batches = [torch.randint(0, VOCABULARY, (asked.batch_size, asked.seq_len), device=device) for _ in range(asked.batches)]
    print(f"\n## Capture of {asked.batches} batches of {asked.batch_size} x {asked.seq_len} tokens\n")
    print(f"Both models cut to {cut[0].n_layers} and {cut[1].n_layers} layers.\n")
    print("| token stride | capture / forward passes | statistics / forward passes, FLOPs | the same at whole depth | blocks |")
    print("|---|---|---|---|---|")
    for stride in (4, 1):
        passes, everything, in_memory = [], [], True
        for repeat in range(asked.repeats + 1):
            seconds, whole_seconds, in_memory = _captured(models, specs, batches, stride, device)
            if repeat:  # the first round warms up
                passes.append(seconds)
                everything.append(whole_seconds)
        shares = [f"{100 * each / (stride * total):.0f} %" for each, total in ((products, forward), (all_products, of_whole))]
        place = "in memory" if in_memory else "on disk"
        print(f"| {stride} | {min(everything) / min(passes):.2f} | {' | '.join(shares)} | {place} |", flush=True)


def _captured(
    models: list[Any], specs: list[ModelSpec], batches: list[Tensor], stride: int, device: torch.device
) -> tuple[float, float, bool]:
    """Seconds of the forward passes alone and of the whole capture, and whether its blocks stayed in memory."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    for batch in batches:
        for model in models:
            caches.forward(model, batch, caches.full_cache(), base=True)
    passed = now()
    kept = range(1, batches[0].shape[1], stride)
    runners = [
        Activations(model, spec, kept, lags) for model, spec, lags in zip(models, specs, ((), LEXICAL_LAGS), strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="kvfit-bench-") as folder:
        layout = Layout(specs[0], specs[1], "both", lexical_lags=LEXICAL_LAGS)
        began = now()
        with Accumulator.create(
            Path(folder) / "s.zarr", layout, recipe={}, memory_budget=free_share(device), device=device
        ) as accumulator:
            for batch in batches:
                source, target = (
                    {group: [layer.flatten(0, 1) for layer in layers] for group, layers in runner(batch).items()}
                    for runner in runners
                )
                source["lexical"] = target.pop("lexical")
                accumulator.add("fit", source, target, None)
            accumulator.finish(None)
            return passed - started, now() - began, accumulator.in_memory


def loading(asked: argparse.Namespace) -> None:
    """Print what `load_mapper` takes against bare reading."""
    size, times = load.measure(asked.gigabytes, asked.gigabytes / 8, asked.repeats, asked.device)
    print(f"\n## load_mapper, {size / 1e9:.2f} GB in a warm file cache\n\n| | / bare reading |\n|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {seconds / times['bare reading']:.2f} |")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--pair", nargs=2, choices=list(SHAPES), default=["qwen3-8b", "qwen3-14b"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--capture-layers", type=int, default=8, help="layers of the models that are captured")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of the bundle that is loaded")
    parser.add_argument("--small", action="store_true", help="tiny models and few tokens: to try the script, not to measure")
    asked = parser.parse_args()
    if asked.small:
        asked.pair, asked.dtype, asked.repeats = ["small-4", "small-6"], "float32", 1
        asked.tokens, asked.batches, asked.batch_size, asked.seq_len, asked.gigabytes = 256, 2, 2, 64, 0.02
    warnings.simplefilter("ignore")
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"# {asked.pair[0]} to {asked.pair[1]} on {name}, {asked.dtype}, torch {torch.__version__}")
    shapes = [SHAPES[name] for name in asked.pair]
    capturing(shapes, asked)
    source, target = (build(shape, device, getattr(torch, asked.dtype)) for shape in shapes)
    transfers(source, target, asked)
    del source, target
    loading(asked)


if __name__ == "__main__":
    main()
