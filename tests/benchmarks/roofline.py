"""What maps cost three public pairs, computed from shapes: the table of docs/benchmarks.md.

    python tests/benchmarks/roofline.py --hardware h100

Nothing is measured. Times are rooflines at a stated share of the card's published peaks; see `kvfit.fit.payoff`.
"""

from __future__ import annotations

import argparse

from kvfit.fit.hardware import EFFICIENCY, PEAKS, published_rates
from kvfit.fit.payoff import table
from kvfit.fit.plan import Plan, plan

PAIRS = (("qwen3-8b", "qwen3-14b"), ("qwen3-14b", "qwen3-32b"), ("llama-3.1-8b", "llama-3.1-70b"))


def section(planned: Plan) -> list[str]:
    """Heading, and a row per kind of map."""
    a, b = planned.source, planned.target
    shapes = " to ".join(f"{one.name} ({one.n_layers} x {one.n_heads} x {one.head_dim})" for one in (a, b))
    return [f"**{shapes}**", "", *table(planned.maps), ""]


def main() -> None:
    """Print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=sorted(PEAKS), default="h100")
    asked = parser.parse_args()
    rates = published_rates(asked.hardware)
    print(
        f"Computed, not measured: {rates.device} at {EFFICIENCY:.0%} of its published peaks; keys and values of all source"
        " layers and three lags of lexical inputs, bfloat16 where it does not say otherwise.\n"
    )
    for source, target in PAIRS:
        print("\n".join(section(plan(source, target, rates=rates))))


if __name__ == "__main__":
    main()
