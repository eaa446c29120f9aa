"""Train a correction, so that the target continues from the mapped cache as it does from its own cache.

The loss is the Kullback-Leibler divergence from the target with its own cache to the target with the mapped one, on the tokens
after the prefix. On text with questions about itself, most of the loss is on the answers. The models are frozen: gradients pass
through the target to the mapped keys and values, and from there to the correction alone.
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
SLOWER = 0.25  # factor on the learning rate after the holdout got worse

Outputs = Mapping[tuple[Kind, int], Tensor]


@dataclass(frozen=True)
class Schedule:
    """The schedule of the training.

    Attributes:
        steps: maximal number of steps.
        batch_size: sequences per step.
        learning_rate: learning rate of Adam: the largest change of an output per step, in units of the standard deviations of
            the output and its inputs. It rises over the first steps, then decays to zero along a cosine.
        continuation: number of tokens after the prefix that are scored.
        prefix_least: minimal length of the prefix, which is random in each step.
        clip: maximal norm of a step's gradient.
        check_every: number of steps between two checks on the holdout.
        patience: number of checks without an improvement after which training stops.
        seed: seed of batches and lengths.
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
        """The factor on the learning rate in a step. It is small at first, because Adam's first steps are unreliable."""
        return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def prefix_most(self, example: Example) -> int:
        """The longest prefix that leaves a full continuation."""
        return len(example.ids) - self.continuation

    def holdout_prefixes(self, example: Example) -> list[int]:
        """The prefixes at which an example of the holdout is checked."""
        most = self.prefix_most(example)
        return sorted({most, max(self.prefix_least, most // 2)})


class Continuation:
    """The frozen target, which continues from mapped caches."""

    def __init__(self, spec: MapperSpec, target: Any) -> None:
        """Prepare the loaded target of a mapper with this spec."""
        self.spec, self.target = spec, target
        self.dtype = caches.cache_dtype(target)
        self.devices = caches.layer_devices(target, spec.target.n_layers)

    def divergence(self, cache: Any, batch: Sequence[Example], prefix: int, n_tokens: int) -> Tensor:
        """Mean KL per token, in nats, from the target with its own cache to the target with another one.

        Args:
            cache: a cache of the target for `prefix` tokens of B sequences; changed in place.
            batch: B examples.
            prefix: number of tokens in the cache.
            n_tokens: number of tokens that the target runs on top of it.
        """
        part = slice(prefix, prefix + n_tokens)
        ids, likely, wanted = (
            torch.stack([getattr(example, name)[part] for example in batch]).to(input_device(self.target))
            for name in ("ids", "likely", "log_probs")
        )
        logits = self.target(input_ids=ids, use_cache=True, **{caches.cache_argument(self.target): cache}).logits.float()
        likely, wanted = likely.to(logits.device), wanted.to(logits.device)
        # The less likely tokens are compared as a sum, which can only make the divergence smaller.
        found = with_rest(logits.gather(-1, likely) - logits.logsumexp(-1, keepdim=True))
        return (wanted.exp() * (wanted - found)).sum(-1).mean()

    def cache(self, outputs: Outputs, batch: Sequence[Example], prefix: int) -> Any:
        """A cache of the target for `prefix` tokens, of which the first are exact and the others are mapped, with gradients."""
        cache = caches.new_cache(self.target)
        target = self.spec.target
        for layer_index in range(target.n_layers):
            pair = [torch.cat([example.exact[layer_index][half][:, :, :prefix] for example in batch]) for half in (0, 1)]
            if layer_index in self.spec.mapped_layers:
                device = outputs["keys", layer_index].device
                keys, values = (
                    outputs[kind, layer_index].view(len(batch), prefix, *target.shape(kind, layer_index)).transpose(1, 2)
                    for kind in KINDS
                )
                table = target.rope.table(layer_index)
                if table is not None:
                    keys = rotate(keys, table, angles(table, torch.arange(prefix, device=device)))
                pair = [
                    torch.cat([own.to(device), new[:, :, own.shape[2] :].to(own.dtype)], 2)
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
    """Train a correction in place. It ends with the values that were best on the holdout.

    Args:
        correction: the correction.
        continuation: the frozen target.
        fit: examples to train on.
        holdout: examples that decide when to stop.
        schedule: the schedule.
        progress: whether to show progress.

    Returns:
        Step and KL of every check on the holdout. The first is that of the original map.
    """
    rng = random.Random(schedule.seed)
    parameters = list(correction.matrices.values())
    # Adam changes all entries equally, so an output changes in proportion to the root of the number of its inputs.
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
        # The holdout got worse, so training returns to the best values with smaller steps. How high a rate may be depends on
        # the pair.
        restore(parameters, best)
        optimizer.state.clear()
        decay.base_lrs = [rate * SLOWER for rate in decay.base_lrs]
    restore(parameters, best)
    return looks


@torch.no_grad()
def restore(parameters: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Set parameters to saved values."""
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
    """The mean KL on examples, each with its longest prefix and with half of that."""
    found = []
    for example in holdout:
        for prefix in schedule.holdout_prefixes(example):
            found.append(float(_divergence(correction, continuation, [example], prefix, schedule.continuation)))
    return sum(found) / len(found)
