"""kvfit's map of the demo pair next to the one that aither-kvcache (package index, 2.4.1) fits, in one run.

    python3 -m venv .venv-aither && .venv-aither/bin/pip install torch==2.13.0 -e ".[fit]" aither-kvcache==2.4.1
    .venv-aither/bin/python tests/benchmarks/against_aither.py demo-out/bundle

aither's own capture and fit run over the demo's calibration text, by default as many sequences as `kvfit demo` takes. Its maps
are then judged by kvfit's evaluation, as a mapper with the same weights; that this mapper gives the cache that aither's own
`translate_cache` gives is checked first. The time is of aither's own functions, from the source's cache to the target's.
Everything is float32. Times are shares of a prefill by the target, the least processor time of several runs that took turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aither_kvcache.kvtransfer.capture import _extract_kv, _stack_layers, capture_pair
from aither_kvcache.kvtransfer.fit import fit_pack
from aither_kvcache.kvtransfer.geometry import KVGeometry
from aither_kvcache.kvtransfer.pack import LoadedPack, load_pack
from aither_kvcache.kvtransfer.transfer import _to_cache, translate_cache
from transfer import timed

from kvfit.bundle.bundle import Bundle
from kvfit.cost import map_parameters
from kvfit.demo import MODELS
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate.compare import Comparison, Row
from kvfit.fit.evaluate.options import Options
from kvfit.model import cache as caches
from kvfit.runtime.mapper import Mapper
from kvfit.spec import FORMAT_VERSION, LayerMap, MapperSpec

ROLES = {"keys": "k", "values": "v"}


def fitted(work: Path, sequences: int) -> LoadedPack:
    """aither's maps of the demo pair, fitted where they are not there yet."""
    if not (work / "pack").exists():
        corpus = work / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(islice(documents(TextOptions("demo:text")), 4 * sequences)):
            (corpus / f"{number:05}.txt").write_text(text, encoding="utf-8")
        capture_pair(
            str(MODELS["demo:source"]), str(MODELS["demo:target"]), work / "capture", corpus_roots=[corpus], seq_len=512,
            train_seqs=sequences * 9 // 10, val_seqs=sequences // 10, max_docs=4 * sequences,
        )  # fmt: skip
        fit_pack(work / "capture", work / "pack", top_k=4, weight_dtype="float32")  # of the 4 source layers: its best
    source, target = (_geometry(str(MODELS[ref])) for ref in ("demo:source", "demo:target"))
    return load_pack(work / "pack", live_source=source, live_target=target, require_acceptance=False)


def _geometry(path: str) -> KVGeometry:
    from transformers import AutoConfig, AutoTokenizer

    return KVGeometry.from_hf(path, AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path), "float32")


def as_mapper(pack: LoadedPack, like: MapperSpec) -> Mapper:
    """The same maps as a mapper of kvfit."""
    weights, layers = {}, []
    for layer_index in range(like.target.n_layers):
        for kind, role in ROLES.items():
            weight, bias, source_layers = pack.layer_map(role, layer_index)
            weights[kind, layer_index] = tuple(torch.from_numpy(np.asarray(part, np.float32)) for part in (weight, bias))
            layers.append(LayerMap(kind, layer_index, tuple(source_layers), 0.0, 0.0, 0.0))  # type: ignore[arg-type]
    spec = MapperSpec(
        FORMAT_VERSION, "0.1.0", like.source, like.target, False, "full", "same", "none", "float32", tuple(layers)
    )  # fmt: skip
    return Mapper(spec, weights)  # type: ignore[arg-type]


def translated(pack: LoadedPack, source_cache: Any) -> Any:
    """A cache of the target from the source's, by aither's own functions."""
    positions = np.arange(caches.cache_length(source_cache))
    keys, values = _stack_layers(_extract_kv(source_cache), pack.source, positions)
    return _to_cache(translate_cache(keys, values, pack, positions), torch, "cpu", torch.float32)


def check_alike(mapper: Mapper, pack: LoadedPack, source_cache: Any) -> float:
    """The largest error of the mapper's cache against aither's own, relative to its largest number.

    Raises:
        SystemExit: they are not the same but for rounding (aither keeps its inputs in float16).
    """
    ours, theirs = (caches.read_cache(cache) for cache in (mapper.transfer(source_cache), translated(pack, source_cache)))
    worst = max(
        float((a - b).abs().max() / b.abs().max())
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in zip(mine, other, strict=True)
    )
    if worst > 0.01:
        raise SystemExit(f"found a cache that differs by {worst:.3f} from aither's own, needed the same but for rounding")
    return worst


@torch.no_grad()
def main() -> None:
    """Fit, judge and time; print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="what `kvfit demo` wrote")
    parser.add_argument("--work", type=Path, help="keep aither's capture and maps here, and take them from here")
    parser.add_argument("--sequences", type=int, default=300)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    work = asked.work or Path(tempfile.mkdtemp(prefix="kvfit-aither-"))
    pack = fitted(work, asked.sequences)
    bundle = Bundle.open(asked.bundle)
    options = Options(documents=asked.documents, batch_size=16, probe_kinds=("names",))
    float32 = models.Options(dtype="float32")
    comparison = Comparison(bundle, TextOptions("demo:heldout"), options, loading=(float32, float32))
    pair = comparison.pair
    ours, theirs = comparison.mapper(bundle).to(dtype=torch.float32), as_mapper(pack, bundle.spec)

    ids = torch.cat([*comparison.ids])[None, : asked.tokens]
    source_cache = caches.full_cache()
    caches.forward(pair.source, ids, source_cache, base=True)
    worst = check_alike(theirs, pack, source_cache)
    jobs: dict[str, Callable[[], object]] = {
        "prefill": lambda: caches.forward(pair.target, ids, caches.new_cache(pair.target), base=True),
        "kvfit": lambda: ours.transfer(source_cache, input_ids=ids, target_model=pair.target),
        "aither": lambda: translated(pack, source_cache),
    }
    times = {name: found["processor"] for name, found in timed(jobs, asked.repeats, torch.device("cpu")).items()}

    rows: list[tuple[str, Row, str, str]] = [
        ("target's own prefill", comparison.without_map["native"], "", "1.00"),
        ("source alone", comparison.without_map["source"], "", ""),
    ]
    for name, mapper, job in (("kvfit, transfer", ours, "kvfit"), ("aither-kvcache", theirs, "aither")):
        share = f"{times[job] / times['prefill']:.2f}"
        rows.append((name, comparison.row(mapper, arm="transfer"), f"{map_parameters(mapper.spec) / 1e6:.2f}", share))
    rows.append(("kvfit, 10 % recomputed", comparison.row(ours, recompute=0.1), rows[2][2], ""))
    print(f"{asked.documents} held-out documents, 40 questions; {asked.tokens} tokens timed, processor time of one process.")
    print(f"As a mapper of kvfit, aither's maps give its own cache to {worst:.1e} of the largest number.\n")
    print("| | million weights | nats/token | share of gap | KL | recall | time / prefill |\n|---|---|---|---|---|---|---|")
    for name, row, size, share in rows:
        low, high = row.interval
        recall = " ".join(f"{exact:.0%} ({log:.2f})" for exact, log in row.recall.values())
        gap = f"{row.share:.0%} ({low:.0%} to {high:.0%})"
        print(f"| {name} | {size} | {row.nll:.3f} | {gap} | {row.kl:.3f} | {recall} | {share} |")


if __name__ == "__main__":
    main()
