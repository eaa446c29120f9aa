"""Small bundles for the tests: fixed specs and weights, no model behind them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvfit.bundle.bundle import Bundle, add_files, write_bundle
from kvfit.spec import FORMAT_VERSION, KINDS, Kind, LayerMap, MapperSpec, ModelSpec, RopeSpec, RopeTable

RECIPE: dict[str, Any] = {
    "text": {"dataset": "example-org/plain-text", "config": None, "revision": "0" * 40, "split": "train", "column": "text"},
    "options": {"num_sequences": 8, "seq_len": 64, "token_stride": 2, "skip_tokens": 0, "seed": 0},
    "versions": {"torch": "2.9.0"},
}
SOLVE: dict[str, Any] = {
    "options": {"top_k": 2, "penalty": "auto"},
    "tokens": {"fit": 256, "holdout": 32},
    "r2": {
        "keys": {"single": {"fit": 0.61, "holdout": 0.52}, "chosen": {"fit": 0.75, "holdout": 0.625}},
        "values": {"single": {"fit": 0.41, "holdout": 0.32}, "chosen": {"fit": 0.55, "holdout": 0.4375}},
    },
    "probe": {
        "keys": {"fit": [], "holdout": [[0.9, 0.5], [0.25, 0.75], [-0.5, 0.125]]},
        "values": {"fit": [], "holdout": [[0.5, 0.25], [0.25, 0.5], [0.0, 1.0]]},
    },
}


def model_spec(ref: str, *, n_layers: int, n_heads: int, head_dim: int = 4, base: float = 10000.0) -> ModelSpec:
    """A model of made-up content; its angles are exact float32."""
    angles = torch.tensor([base ** (-2 * plane / head_dim) for plane in range(head_dim // 2)], dtype=torch.float32)
    table = RopeTable(tuple(angles.tolist()), head_dim, "half", 1.0)
    return ModelSpec(
        ref=ref,
        revision=hashlib.sha1(ref.encode()).hexdigest(),
        family="llama",
        n_layers=n_layers,
        n_heads=n_heads,
        head_dim=head_dim,
        n_query_heads=2 * n_heads,
        windows=(None,) * n_layers,
        rope=RopeSpec((table,), (0,) * (n_layers - 1) + (None,)),
        tokenizer_fingerprint="sha256:" + "1" * 64,
        config_digest="sha256:" + "2" * 64,
        weight_fingerprint="sha256:" + hashlib.sha256(ref.encode()).hexdigest(),
        dtype="float32",
        quantisation=None,
    )


def mapper_spec(
    *, dtype: str = "float32", support: str = "full", source: str = "org/small", target: str = "org/large"
) -> MapperSpec:
    """Two source layers to three target layers, one head to two."""
    return MapperSpec(
        format_version=FORMAT_VERSION,
        kvfit_version="0.1.0",
        source=model_spec(source, n_layers=2, n_heads=1),
        target=model_spec(target, n_layers=3, n_heads=2, base=500000.0),
        keys_rotated=False,
        support=support,  # type: ignore[arg-type]
        inputs="same",
        gain="variance",
        dtype=dtype,  # type: ignore[arg-type]
        layers=tuple(
            LayerMap(kind, layer_index, (0, 1) if layer_index else (1,), 0.01, 0.75 - layer_index / 8, 0.625 - layer_index / 8)
            for layer_index in range(3)
            for kind in KINDS
        ),
    )


def lexical_spec(*, dtype: str = "float32", lags: tuple[int, ...] = (0, 1), rank: int | None = 5) -> MapperSpec:
    """The same pair with lexical inputs and a shared basis: target layer 0 is exact, so layers 1 and 2 are mapped."""
    spec = mapper_spec(dtype=dtype)
    layers = tuple(replace(layer, source_layers=(0, 1)) for layer in spec.layers if layer.layer_index or not lags)
    return replace(spec, inputs="both", layers=layers, lexical_lags=lags, rank=rank)


def basis(spec: MapperSpec, seed: int = 0) -> torch.Tensor | None:
    """The shared basis of a spec, as `weights` makes its numbers; None where the spec has none."""
    if spec.rank is None:
        return None
    count = math.prod(spec.basis_shape)
    return torch.tensor(_numbers(seed + 1000, count)[0]).reshape(spec.basis_shape).to(getattr(torch, spec.dtype))


def weights(spec: MapperSpec, seed: int = 0) -> Iterator[tuple[Kind, int, torch.Tensor, torch.Tensor]]:
    """Multiples of 1/8 from a congruence, exact in every dtype and the same on every machine and version of torch."""
    state = seed + 1

    def numbers(*shape: int) -> torch.Tensor:
        nonlocal state
        values, state = _numbers(state, torch.Size(shape).numel())
        return torch.tensor(values, dtype=torch.float32).reshape(shape)

    for entry in spec.layers:
        weight = numbers(*spec.weight_shape(entry.kind, entry.layer_index))
        yield (
            entry.kind,
            entry.layer_index,
            weight.to(getattr(torch, spec.dtype)),
            numbers(spec.target.width_of(entry.kind, entry.layer_index)),
        )


def _numbers(state: int, count: int) -> tuple[list[float], int]:
    values = []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        values.append((state // 65536 % 64 - 32) / 8)
    return values, state


def make_bundle(
    folder: Path, spec: MapperSpec | None = None, *, seed: int = 0, shard_bytes: int = 2 << 30, **extra: Any
) -> Path:
    """Write a bundle and return its folder."""
    spec = spec or mapper_spec()
    write_bundle(
        folder, spec, weights(spec, seed), recipe=RECIPE, solve=SOLVE, shard_bytes=shard_bytes, basis=basis(spec, seed), **extra
    )
    return folder


def evaluation(bundle: Bundle, verdict: str = "pass") -> dict[str, Any]:
    """An `evaluation.json` of made-up numbers that binds to the bundle."""

    def row(nll: float, kl: float, share: float, low: float, high: float, recall: float | None) -> dict[str, Any]:
        return {
            "nll": nll,
            "kl": kl,
            "kl_p95": 3 * kl,
            "top1": max(0.0, 1 - kl),
            "share_of_gap": share,
            "interval": [low, high],
            "recall": recall,
        }

    return {
        "verdict": verdict,
        "weights_digest": bundle.weights_digest,
        "reasons": [] if verdict == "pass" else ["share of gap 0.10, needed 0.25"],
        "arms": {
            "native": row(2.0, 0.0, 1.0, 1.0, 1.0, 0.9),
            "transfer": row(2.25, 0.125, 0.5, 0.4, 0.6, 0.5),
            "handoff": row(2.2, 0.1, 0.6, 0.5, 0.7, 0.6),
            "source": row(2.5, 0.25, 0.0, 0.0, 0.0, 0.7),
            "mean": row(4.0, 1.5, -3.0, -3.5, -2.5, None),
            "shuffled": row(4.5, 2.0, -4.0, -4.5, -3.5, 0.0),
        },
        "milliseconds": {"transfer": 2.5, "prefill": 40.0},
        "tokens": {"prefix": 384, "continuation": 128, "documents": 48},
        "text": "example-org/other-text",
    }


def evaluated_bundle(folder: Path, verdict: str = "pass", **options: Any) -> Path:
    """A bundle with an evaluation of its own."""
    make_bundle(folder, **options)
    text = json.dumps(evaluation(Bundle.open(folder), verdict), indent=2, sort_keys=True)
    add_files(folder, {"evaluation.json": text.encode()})
    return folder


def rewrite_sums(folder: Path) -> None:
    """List whatever is there, as an attacker would: then only what the files say can give them away."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != "SHA256SUMS" and not path.name.startswith(".") and path.is_file()
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
