"""Training a correction: the target continues from the mapped cache, and should say what it says with its own.

The loss is the Kullback-Leibler divergence from the target with its own cache to the target with the mapped one, on the tokens
after the prefix. On text that asks back, most of it lies on the answers. The models are frozen; gradients pass through the
target to the keys and values that were mapped, and from there to the correction alone.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfit.fit.progress import track
from kvfit.fit.refine.correction import Correction
from kvfit.fit.refine.examples import Example, with_rest
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device
from kvfit.model.rope import angles, rotate
from kvfit.spec import KINDS, Kind, MapperSpec

LOGGER = logging.getLogger("kvfit")
WARM_UP_STEPS = 10
SLOWER = 0.25  # what the rate is multiplied by where the holdout got worse

Outputs = Mapping[tuple[Kind, int], Tensor]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        steps: most steps.
        batch_size: sequences of a step.
        learning_rate: of Adam: how far a step moves an output at most, in units of its standard deviation and of its inputs',
            however many directions it reads. Rises over the first steps, then decays to zero along a cosine.
        continuation: tokens after the prefix that are scored.
        prefix_least: shortest prefix; the length is drawn anew at each step.
        clip: largest norm of a step's gradient.
        check_every: steps from one look at the holdout to the next.
        patience: looks without a better one before training stops.
        seed: of batches and lengths.
    """

    steps: int = 200
    batch_size: int = 4
    learning_rate: float = 0.016
    continuation: int = 128
    prefix_least: int = 64
    clip: float = 1.0
    check_every: int = 20
    patience: int = 4
    seed: int = 0

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by: Adam's first steps are too sure of their direction to be taken whole."""
        return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def prefix_most(self, example: Example) -> int:
        """The longest prefix that leaves a whole continuation."""
        return len(example.ids) - self.continuation

    def holdout_prefixes(self, example: Example) -> list[int]:
        """The prefixes that an example of the holdout is judged at."""
        most = self.prefix_most(example)
        return sorted({most, max(self.prefix_least, most // 2)})


class Continuation:
    """The frozen target, continuing from mapped caches."""

    def __init__(self, spec: MapperSpec, target: Any) -> None:
        """Wrap the loaded target of a mapper with this spec."""
        self.spec, self.target = spec, target
        self.dtype = caches.cache_dtype(target)
        self.devices = caches.layer_devices(target, spec.target.n_layers)

    def divergence(self, cache: Any, batch: Sequence[Example], prefix: int, n_tokens: int) -> Tensor:
        """Mean KL per token, in nats, from the target with its own cache to the target with another one.

        Args:
            cache: of the target, over `prefix` tokens of B sequences; used up.
            batch: B examples.
            prefix: tokens that the cache covers.
            n_tokens: tokens that the target runs on top of it.
        """
        part = slice(prefix, prefix + n_tokens)
        ids, likely, wanted = (
            torch.stack([getattr(example, name)[part] for example in batch]).to(input_device(self.target))
            for name in ("ids", "likely", "log_probs")
        )
        logits = self.target(input_ids=ids, use_cache=True, **{caches.cache_argument(self.target): cache}).logits.float()
        likely, wanted = likely.to(logits.device), wanted.to(logits.device)
        # Only the likeliest tokens are compared one by one, which can only make the divergence smaller.
        found = with_rest(logits.gather(-1, likely) - logits.logsumexp(-1, keepdim=True))
        return (wanted.exp() * (wanted - found)).sum(-1).mean()

    def cache(self, outputs: Outputs, batch: Sequence[Example], prefix: int) -> Any:
        """A cache of the target over `prefix` tokens: the first exact, the others mapped, with their gradients."""
        cache = caches.new_cache(self.target)
        target = self.spec.target
        for layer_index in range(target.n_layers):
            pair = [torch.cat([example.exact[layer_index][half][:, :, :prefix] for example in batch]) for half in (0, 1)]
            if layer_index in self.spec.mapped_layers:
                device = outputs["keys", layer_index].device
                keys, values = (
                    outputs[kind, layer_index].view(len(batch), prefix, target.n_heads, target.head_dim).transpose(1, 2)
                    for kind in KINDS
                )
                table = target.rope.table(layer_index)
                if table is not None:
                    keys = rotate(keys, table, angles(table, torch.arange(prefix, device=device)))
                pair = [
                    torch.cat([own.to(device), new[:, :, 1:].to(own.dtype)], 2)
                    for own, new in zip(pair, (keys, values), strict=True)
                ]
            caches.append(cache, layer_index, *(half.to(self.devices[layer_index], self.dtype) for half in pair))
        return cache


def train(
    correction: Correction,
    continuation: Continuation,
    fit: Sequence[Example],
    holdout: Sequence[Example],
    schedule: Schedule,
    *,
    progress: bool = True,
) -> list[dict[str, float]]:
    """Train a correction in place, and leave it where the holdout was best.

    Args:
        correction: starts at the map that was given.
        continuation: the frozen target.
        fit: examples to learn from.
        holdout: examples to stop by.
        schedule: see `Schedule`.
        progress: show a bar or log lines.

    Returns:
        Per look at the holdout: step, and KL on the holdout. The first is that of the map as it was given.
    """
    rng = random.Random(schedule.seed)
    parameters = list(correction.matrices.values())
    # Adam moves every entry alike, so the same rate moves an output by the root of the number of its inputs.
    rates = [{"params": [one], "lr": schedule.learning_rate / math.sqrt(len(one))} for one in parameters]
    optimizer = torch.optim.Adam(rates)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    best = [parameter.detach().clone() for parameter in parameters]
    looks = [{"step": 0, "kl": holdout_divergence(correction, continuation, holdout, schedule)}]
    for step in track(range(1, schedule.steps + 1), "refine", "steps", show=progress):
        batch = rng.sample(list(fit), min(schedule.batch_size, len(fit)))
        prefix = rng.randint(schedule.prefix_least, schedule.prefix_most(batch[0]))
        loss = _divergence(correction, continuation, batch, prefix, schedule.continuation)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, schedule.clip)
        optimizer.step()
        decay.step()
        if step % schedule.check_every and step != schedule.steps:
            continue
        looks.append({"step": step, "kl": holdout_divergence(correction, continuation, holdout, schedule)})
        LOGGER.info("refine: KL on the holdout %.4f after %d steps, %.4f at the start", looks[-1]["kl"], step, looks[0]["kl"])
        lowest = min(looks, key=lambda look: look["kl"])
        if lowest is looks[-1]:
            best = [parameter.detach().clone() for parameter in parameters]
            continue
        if step - lowest["step"] >= schedule.patience * schedule.check_every:
            break
        # Worse than it has been: back to there, with smaller steps. Which rate is too high differs from pair to pair.
        restore(parameters, best)
        optimizer.state.clear()
        decay.base_lrs = [rate * SLOWER for rate in decay.base_lrs]
    restore(parameters, best)
    return looks


@torch.no_grad()
def restore(parameters: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Give parameters the values that were kept of them."""
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)


def _divergence(
    correction: Correction, continuation: Continuation, batch: Sequence[Example], prefix: int, n_tokens: int
) -> Tensor:
    inputs = torch.stack([example.inputs[:prefix] for example in batch])
    return continuation.divergence(continuation.cache(correction.outputs(inputs), batch, prefix), batch, prefix, n_tokens)


@torch.no_grad()
def holdout_divergence(
    correction: Correction, continuation: Continuation, holdout: Sequence[Example], schedule: Schedule
) -> float:
    """Mean KL on examples, each with its longest prefix and with half of that."""
    found = []
    for example in holdout:
        for prefix in schedule.holdout_prefixes(example):
            found.append(float(_divergence(correction, continuation, [example], prefix, schedule.continuation)))
    return sum(found) / len(found)
