"""The share of the likelihood gap that an arm recovers, and bootstrap intervals over documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# For a gap below this, in nats per token, the share is 0.
SMALLEST_GAP = 1e-9


def share_of_gap(source: Tensor, native: Tensor, arm: Tensor) -> float:
    """``(source - arm) / (source - native)`` of mean negative log-likelihoods: 1 is native, 0 the source, below 0 worse."""
    gap = float((source - native).mean())
    return float((source - arm).mean()) / gap + 0.0 if abs(gap) > SMALLEST_GAP else 0.0  # no -0.0


def _resampled(count: int, resamples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (resamples, count), generator=generator)


def _ends(values: Tensor) -> tuple[float, float]:
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high


def share_interval(source: Tensor, native: Tensor, arm: Tensor, *, resamples: int, seed: int) -> tuple[float, float]:
    """Paired bootstrap 95 % interval of `share_of_gap` over documents.

    Args:
        source: (N,), negative log-likelihood per document of the source.
        native: (N,), that of the target with its own cache.
        arm: (N,), that of the arm.
        resamples: number of bootstrap samples; each draws the same documents from all three.
        seed: seed of the draws.
    """
    rows = _resampled(len(source), resamples, seed)
    above, gap = (source - arm)[rows].mean(1), (source - native)[rows].mean(1)
    return _ends(torch.where(gap.abs() > SMALLEST_GAP, above / gap, 0.0))


def cluster_interval(right: Sequence[float], clusters: Sequence[int], *, resamples: int, seed: int) -> tuple[float, float]:
    """Bootstrap 95 % interval of a mean over items in clusters. Whole clusters are drawn, not items.

    Args:
        right: one number per item.
        clusters: the cluster (document) of each item.
        resamples: number of bootstrap samples.
        seed: seed of the draws.
    """
    names = sorted(set(clusters))
    numbers = torch.tensor([names.index(name) for name in clusters])
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, numbers, torch.tensor(right, dtype=torch.float64))
    counts = torch.bincount(numbers, minlength=len(names)).double()
    rows = _resampled(len(names), resamples, seed)
    return _ends(sums[rows].sum(1) / counts[rows].sum(1))
