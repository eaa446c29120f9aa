"""What guided recompute buys at each budget, with a random choice of as many tokens as the control.

    python tests/benchmarks/recompute.py BUNDLE --budgets 0 0.02 0.05 0.1 0.2 0.5

Recall: names with random codes hidden in held-out text, one asked for; an answer counts when every digit is right. Likelihood:
nats per token of the continuation of held-out documents, and KL to the target's own prefill. The random control runs as many
tokens, in windows as long as the guide's. Prints one row per budget, in Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from kvfit import handoff
from kvfit.bundle.bundle import Bundle
from kvfit.fit.capture.text import TextOptions, documents
from kvfit.fit.evaluate import arms, questions
from kvfit.model import cache as caches
from kvfit.runtime.choice import WINDOW_TOKENS


def at_random(rng: random.Random, n_tokens: int, count: int) -> list[int]:
    """`count` tokens in random windows."""
    chosen: set[int] = set()
    while len(chosen) < count:
        start = rng.randrange(1, max(2, n_tokens - WINDOW_TOKENS + 1))
        for token in range(start, min(start + WINDOW_TOKENS, n_tokens)):
            if len(chosen) < count:
                chosen.add(token)
    return sorted(chosen)


class Conversation:
    """One context and what follows it, with the source's cache of the context."""

    def __init__(self, pair: arms.Pair, ids: Tensor, prefix: int) -> None:
        self.pair, self.ids, self.prefix = pair, ids, prefix
        self.sources = arms.source_pairs(pair, ids[:, :prefix])

    def moved(self, **more: Any) -> Any:
        """The target's cache of the context."""
        return handoff(self.pair.mapper, self.pair.target, self.ids, self.sources, **more)

    def native(self) -> Any:
        """The target's own."""
        cache = caches.new_cache(self.pair.target)
        caches.forward(self.pair.target, self.ids[:, : self.prefix], cache, base=True)
        return cache


def choices(conversation: Conversation, budget: float, rng: random.Random) -> dict[str, Any]:
    """The cache at a budget: guided and at random."""
    if not budget:
        return {name: conversation.moved() for name in ("guided", "random")}  # a cache each: it grows as it is used
    guided = conversation.moved(recompute=budget, guide=conversation.pair.source)
    tokens = at_random(rng, conversation.prefix, guided.recomputed.shape[1])
    return {"guided": guided, "random": conversation.moved(exact_tokens=tokens)}


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--source", help="default: the one that the bundle names")
    parser.add_argument("--target")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0, 0.02, 0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--probes", type=int, default=60)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--continuation", type=int, default=96)
    options = parser.parse_args()
    rng = random.Random(0)
    pair, tokenizer = arms.load_pair(Bundle.open(options.bundle), source=options.source, target=options.target)
    texts = [text for text in documents(TextOptions("demo:heldout")) if "[Codes" not in text and "[Recall" not in text]
    long = [text for text in texts if len(tokenizer(text)["input_ids"]) >= options.prefix + options.continuation]

    asked = questions.probes(tokenizer, long, count=options.probes, context_tokens=options.prefix)
    right: dict[tuple[str, float], int] = {}
    seconds: dict[float, list[float]] = {budget: [] for budget in options.budgets}
    prefill = []
    for probe in asked:
        ids = torch.tensor([[*probe.context_ids, *probe.question_ids]])
        conversation = Conversation(pair, ids, options.prefix)

        def correct(model: Any, cache: Any, ids: Tensor = ids, probe: Any = probe) -> bool:
            return arms.answer(model, cache, ids[:, options.prefix :], len(probe.answer_ids)) == list(probe.answer_ids)

        begun = time.process_time()
        native = conversation.native()
        prefill.append(time.process_time() - begun)
        source = caches.full_cache()
        caches.forward(pair.source, ids[:, : options.prefix], source, base=True)
        for name, model, cache in (("native", pair.target, native), ("source", pair.source, source)):
            right[name, 0] = right.get((name, 0), 0) + correct(model, cache)
        for budget in options.budgets:
            begun = time.process_time()
            conversation.moved(recompute=budget, guide=pair.source)
            seconds[budget].append(time.process_time() - begun)
            for name, moved in choices(conversation, budget, rng).items():
                right[name, budget] = right.get((name, budget), 0) + correct(pair.target, moved.cache)

    nats: dict[tuple[str, float], list[float]] = {}
    divergence: dict[tuple[str, float], list[float]] = {}

    def score(key: tuple[str, float], cache: Any, ids: Tensor, model: Any, native: Tensor | None) -> Tensor:
        logits = caches.forward(model, ids[:, options.prefix : -1], cache)
        found = logits[..., : len(tokenizer)].float().log_softmax(-1)
        wanted = ids[:, options.prefix + 1 :]
        nats.setdefault(key, []).append(-float(found.gather(-1, wanted[..., None]).mean()))
        if native is not None:
            divergence.setdefault(key, []).append(float((native.exp() * (native - found)).sum(-1).mean()))
        return found

    for text in long[: options.documents]:
        ids = torch.tensor([tokenizer(text)["input_ids"][: options.prefix + options.continuation]])
        # The guide reads one new token, as at the start of an answer.
        conversation = Conversation(pair, ids[:, : options.prefix + 1], options.prefix)
        native = score(("native", 0), conversation.native(), ids, pair.target, None)
        source = caches.full_cache()
        caches.forward(pair.source, ids[:, : options.prefix], source, base=True)
        score(("source", 0), source, ids, pair.source, None)
        for budget in options.budgets:
            for name, moved in choices(conversation, budget, rng).items():
                score((name, budget), moved.cache, ids, pair.target, native)

    def shown(key: tuple[str, float]) -> list[str]:
        kl = f"{statistics.fmean(divergence[key]):.3f}" if key in divergence else ""
        return [f"{right[key] / len(asked):.0%}", f"{statistics.fmean(nats[key]):.3f}", kl]

    print(f"{len(asked)} questions, {len(nats['native', 0])} documents, {options.prefix} tokens of context")
    print("| budget | recall guided | random | nats/token guided | random | KL guided | random | time / prefill |")
    print("|---|---|---|---|---|---|---|---|")
    whole = statistics.median(prefill)
    for budget in options.budgets:
        pairs = zip(shown(("guided", budget)), shown(("random", budget)), strict=True)
        cells = [cell for both in pairs for cell in both]
        print(f"| {budget:.0%} | {' | '.join(cells)} | {statistics.median(seconds[budget]) / whole:.2f} |")
    for name in ("native", "source"):
        cells = shown((name, 0))
        print(f"| {name} | {cells[0]} | | {cells[1]} | | | | {1 if name == 'native' else ''} |")


if __name__ == "__main__":
    with torch.no_grad():
        main()
