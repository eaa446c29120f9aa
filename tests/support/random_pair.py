"""A pair of models that exists only as shapes, random activations for it, and the float64 answer to compare with."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfit.fit.stats.store import Block, Store
from kvfit.spec import KINDS, Kind, ModelSpec, RopeSpec


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where the system has one: a store waits for the disk hundreds of times, a test need not."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvfit-test-", dir=memory) as folder:
        yield Path(folder)


Batch = tuple[str, dict[Kind, list[Tensor]], dict[Kind, list[Tensor]]]


def model(n_layers: int, n_heads: int, head_dim: int, geometry: Any = None) -> ModelSpec:
    """A spec of some geometry, without rotation."""
    return ModelSpec(
        ref="some/model", revision=None, family="some", n_layers=n_layers, n_heads=n_heads, head_dim=head_dim,
        n_query_heads=n_heads, windows=(None,) * n_layers, rope=RopeSpec((), (None,) * n_layers), tokenizer_fingerprint="t",
        config_digest="c", weight_fingerprint="w", dtype="float32", quantisation=None, geometry=geometry,
    )  # fmt: skip


SOURCE = model(3, 2, 8)
TARGET = model(4, 3, 4)
TOKEN_BYTES = 2 * 4 * (3 * 16 + 4 * 12)


def budget(n_tokens: int, source: ModelSpec = SOURCE, target: ModelSpec = TARGET, n_lags: int = 0) -> int:
    """A memory budget whose buffer holds that many tokens."""
    token_bytes = 4 * (2 * source.n_layers * source.width + 2 * target.n_layers * target.width + n_lags * target.first_width)
    return -(-n_tokens * token_bytes * 8 // 7)


def batches(
    sizes: list[int],
    *,
    seed: int = 0,
    mean: float = 0.0,
    dtype: torch.dtype = torch.float32,
    holdout_every: int = 3,
    source: ModelSpec = SOURCE,
    target: ModelSpec = TARGET,
    n_lags: int = 0,
) -> list[Batch]:
    """Activations with correlated layers, spreads from 0.1 to 10 per feature, and a mean of `mean` spreads.

    With lags also lexical inputs, which here are just more activations.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def layer(width: int) -> tuple[Tensor, Tensor, Tensor]:
        return normal(8, width), 10 ** (2 * torch.rand(width, generator=generator) - 1), normal(width).sign()

    planted: list[dict] = [
        {kind: [layer(spec.width_of(kind, i)) for i in range(spec.n_layers)] for kind in KINDS} for spec in (source, target)
    ]
    if n_lags:
        planted[0]["lexical"] = [layer(target.first_width) for _ in range(n_lags)]
    made: list[Batch] = []
    for number, n_tokens in enumerate(sizes):
        hidden = normal(n_tokens, 8)
        sides: list[dict[Kind, list[Tensor]]] = []
        for side in planted:
            sides.append({})
            for kind, layers in side.items():
                rows = [(hidden @ w / 4 + normal(n_tokens, w.shape[1]) + mean * sign) * spread for w, spread, sign in layers]
                sides[-1][kind] = [layer.to(dtype) for layer in rows]
        made.append(("holdout" if number % holdout_every == holdout_every - 1 else "fit", sides[0], sides[1]))
    return made


@dataclass(frozen=True)
class Oracle:
    """All rows of a split in float64, centred in one go: the answer that the store must give."""

    source: dict[Block, Tensor]
    target: dict[Block, Tensor]

    @classmethod
    def of(cls, given: list[Batch], split: str) -> Oracle:
        chosen = [batch for batch in given if split in ("all", batch[0])]
        rows = [
            {(group, i): torch.cat([batch[side][group][i].double() for batch in chosen])
             for group, layers in given[0][side].items() for i in range(len(layers))}
            for side in (1, 2)
        ]  # fmt: skip
        return cls(rows[0], rows[1])


def worst_error(store: Store, given: list[Batch], split: str, *, both: bool = False) -> float:
    """The largest error of any number of a split, relative to the norms of the two features it is about."""
    oracle, worst = Oracle.of(given, split), 0.0
    count = len(oracle.source["keys", 0])
    if store.count(split) != count:
        return float("inf")

    def centred(rows: Tensor) -> tuple[Tensor, Tensor]:
        deviations = rows - rows.mean(0)
        return deviations, deviations.norm(dim=0).clamp(min=1e-300)

    for a, x in oracle.source.items():
        (dx, nx) = centred(x)
        worst = max(worst, ((store.source_mean(split, a) - x.mean(0)).abs() / (nx / count**0.5)).max().item())
        for others, scatter in ((oracle.source, store.source_scatter), (oracle.target, store.cross_scatter)):
            for b, y in others.items():
                if a[0] == b[0] or both or "lexical" in (a[0], b[0]):
                    (dy, ny) = centred(y)
                    worst = max(worst, ((scatter(split, a, b) - dx.T @ dy).abs() / (nx[:, None] * ny)).max().item())
    for b, y in oracle.target.items():
        (_, ny) = centred(y)
        worst = max(worst, ((store.target_mean(split, b) - y.mean(0)).abs() / (ny / count**0.5)).max().item())
        worst = max(worst, (store.target_scatter(split, b) / ny**2 - 1).abs().max().item())
    return worst


def create(path: Path, **settings: Any) -> Any:
    """A new store; `settings` are those of its layout and of the accumulator."""
    from kvfit.fit.stats.layout import Layout
    from kvfit.fit.stats.store import Accumulator

    shape = ("source", "target", "inputs", "stats_dtype", "lexical_lags")
    layout = Layout(**{name: settings.pop(name) for name in shape if name in settings})
    return Accumulator.create(path, layout, **settings)


def capture(path: Path, given: list[Batch], *, n_buffer: int = 64, finish: bool = True, **options: Any) -> None:
    """Write a store of some batches; the cursor is the number of the next batch."""
    settings = {"source": SOURCE, "target": TARGET, "recipe": {"seed": 0}, **options}
    memory = budget(n_buffer, settings["source"], settings["target"], len(settings.get("lexical_lags", ())))
    with create(path, memory_budget=memory, **settings) as accumulator:
        for number, (split, source, target) in enumerate(given):
            accumulator.add(split, source, target, number + 1)
        if finish:
            accumulator.finish(len(given))
