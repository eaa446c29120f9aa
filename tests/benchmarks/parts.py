"""Where a mapped cache loses likelihood: replace its keys, its values or some of its layers by the target's own.

    python tests/benchmarks/parts.py BUNDLE --dataset heldout.jsonl

The first tokens, as many as `handoff` runs by default, are the target's own in every row. What a row gains over `none` is what
a better map of that part could bring at most. The last rows replace other numbers of first and last tokens, and nothing else.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch

from kvfit.bundle.bundle import Bundle
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate import arms
from kvfit.fit.evaluate.heldout import heldout
from kvfit.fit.evaluate.likelihood import Reference
from kvfit.runtime import EXACT_HEAD

HEADS = (1, 4, 8, 16, 32)
TAILS = (16, 32)


@dataclass(frozen=True)
class Own:
    """What is the target's own: some keys and values whole, of all others the first and the last tokens."""

    chosen: frozenset[tuple[int, int]] = frozenset()  # (target layer, 0 for keys and 1 for values)
    head: int = EXACT_HEAD
    tail: int = 0


def parts(n_layers: int, n_groups: int) -> dict[str, Own]:
    """What is replaced, by name of the row."""
    found = {"none": Own()}
    for half, name in enumerate(("keys", "values")):
        found[f"all {name}"] = Own(frozenset((layer, half) for layer in range(n_layers)))
    bounds = [round(n_layers * group / n_groups) for group in range(n_groups + 1)]
    for start, stop in itertools.pairwise(bounds):
        layers = frozenset((layer, half) for layer in range(start, stop) for half in (0, 1))
        found[f"layers {start} to {stop - 1}"] = Own(layers)
    found |= {f"{head} first" if head > 1 else "the first": Own(head=head) for head in HEADS if head != EXACT_HEAD}
    return found | {f"{EXACT_HEAD} first and {tail} last": Own(tail=tail) for tail in TAILS}


def joined(mapped: arms.Pairs, own: arms.Pairs, kept: Own) -> arms.Pairs:
    """The mapped cache with parts of the target's own."""
    out = []
    for layer, pairs in enumerate(zip(mapped, own, strict=True)):
        halves = []
        for half in (0, 1):
            new, exact = (pair[half] for pair in pairs)
            start, stop = kept.head, exact.shape[2] - kept.tail
            parts = [exact[:, :, :start], new[:, :, start:stop].to(exact.dtype), exact[:, :, stop:]]
            halves.append(exact if (layer, half) in kept.chosen else torch.cat(parts, 2))
        out.append((halves[0], halves[1]))
    return out


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--source", help="default: the one that the bundle names")
    parser.add_argument("--target")
    parser.add_argument("--dataset", default="demo:heldout")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--groups", type=int, default=4, help="groups of layers")
    parser.add_argument("--dtype", default="auto", help="of both models")
    given = parser.parse_args()
    bundle = Bundle.open(given.bundle)
    loading = (models.Options(dtype=given.dtype),) * 2
    pair, tokenizer = arms.load_pair(bundle, source=given.source, target=given.target, loading=loading)
    length = given.prefix + given.continuation
    ids = heldout(TextOptions(given.dataset), tokenizer, length, given.documents, None).ids
    rows = parts(bundle.spec.target.n_layers, given.groups)
    nll, kl = (dict.fromkeys(["source", *rows, "native"], 0.0) for _ in range(2))
    with torch.no_grad():
        for one in ids.split(1):
            prefix_ids = one[:, : given.prefix - 1]
            prefixes = arms.Prefixes(pair, prefix_ids)
            own = arms.target_pairs(pair, prefix_ids)
            reference = Reference(pair, arms.Rewindable(arms.filled(pair.target, own)), one, given.prefix, 0)
            caches = {name: joined(prefixes.mapped, own, kept) for name, kept in rows.items()} | {"native": own}
            for name in nll:
                model = arms.model_of(pair, "source" if name == "source" else "transfer")
                filled = arms.filled(model, prefixes.sources if name == "source" else caches[name])
                scores = reference.score(model, arms.Rewindable(filled))
                nll[name] += scores["nll"][0] / len(ids)
                kl[name] += sum(scores["kl_tokens"][0]) / len(scores["kl_tokens"][0]) / len(ids)
    print("| the target's own | nats/token | share of gap | KL |\n|---|---|---|---|")
    for name in nll:
        share = (nll["source"] - nll[name]) / (nll["source"] - nll["native"])
        print(f"| {name} | {nll[name]:.3f} | {share:.0%} | {kl[name]:.3f} |")


if __name__ == "__main__":
    main()
