"""What inputs, rank, gain, layers and penalty do to the demo pair: the table of docs/guides/solve.md.

    python tests/benchmarks/gain_table.py --out table

Captures the pair once (or takes `--store`), solves each map and evaluates it on held-out text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from kvfit.fit.capture import capture
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.evaluate import evaluate
from kvfit.fit.solve.options import RECIPES, Gain, Options
from kvfit.fit.solve.solve import solve
from kvfit.spec import KINDS

GAINS: tuple[Gain, ...] = ("none", "variance", "head")
SEPARATE: dict[str, Any] = {"inputs": "same", "lexical": "none", "rank": "none", "cost": None}
BOTH = SEPARATE | {"inputs": "both"}
LEXICAL = BOTH | {"lexical": "auto"}
# The comparisons that matter most come first, so that a run that is cut short still says something.
MAPS: list[tuple[str, Options]] = [
    ("keys and values as inputs", Options(**BOTH)),
    ("the same and lexical inputs", Options(**LEXICAL)),
    *[(f"the same, rank {rank}", Options(**LEXICAL | {"rank": rank})) for rank in (512, 256, 128, 64)],
    ("the same, full rank, penalty 0.01", Options(**LEXICAL, penalty=0.01)),
    ("the same, full rank, gain from the fit split", Options(**LEXICAL, gain_split="fit")),
    *[(f"all layers, penalty 0.01, gain {gain}", Options(**SEPARATE, penalty=0.01, gain=gain)) for gain in GAINS],
    *[(f"all layers, penalty auto, gain {gain}", Options(**SEPARATE, gain=gain)) for gain in GAINS[:2]],
    *[(f"keys and values as inputs, penalty auto, gain {gain}", Options(**BOTH, gain=gain)) for gain in GAINS[:2]],
    *[(f"all layers, penalty 0.1, gain {gain}", Options(**SEPARATE, penalty=0.1, gain=gain)) for gain in GAINS[:2]],
    *[(f"best layer, penalty 0.01, gain {gain}", Options(**SEPARATE, top_k=1, penalty=0.01, gain=gain)) for gain in GAINS[:2]],
    *[
        (f"matching head, penalty 0.01, gain {gain}", Options(**SEPARATE, penalty=0.01, support="head", gain=gain))
        for gain in GAINS[:2]
    ],
    ("heo2026", dataclasses.replace(RECIPES["heo2026"], top_k="all")),  # the demo's source has fewer than 8 layers
]


def row(name: str, options: Options, store: Path, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """One map."""
    solved = solve(store, folder / name.replace(" ", "-"), options=options, progress=False)
    # Likelihood and recall only.
    how = evaluate.Options(
        documents=asked.documents, probes=asked.probes, probe_kinds=("names",), greedy=0, diagnose=0, seconds=0, transcripts=0
    )
    report = evaluate.evaluate(
        solved.bundle, source=asked.source, target=asked.target, text=TextOptions("demo:heldout"), options=how, progress=False
    ).report
    r2 = {kind: solved.report["r2"][kind] for kind in KINDS}
    arms = report["arms"]
    found: dict[str, Any] = {"map": name, "share_of_prefill": solved.report["cost"]["share"]}
    for kind in KINDS:
        found[f"{kind}_r2"] = r2[kind]["chosen"]["holdout"]
        found[f"{kind}_r2_used"] = r2[kind]["chosen_with_gain"]["holdout"]
    for arm in ("transfer", "handoff"):
        found |= {f"{arm}_{name}": arms[arm].get(name) for name in ("nll", "share_of_gap", "kl", "recall")}
    found |= {f"{arm}_nll": arms[arm]["nll"] for arm in ("native", "source", "no_context", "mean", "shuffled")}
    return found


def main() -> None:
    """Run, and write the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="a store of the demo pair, captured with keys and values and lexical inputs")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--source", default="demo:source")
    parser.add_argument("--target", default="demo:target")
    parser.add_argument("--num-sequences", type=int, default=600)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--probes", type=int, default=40)
    parser.add_argument("--first", type=int, help="only so many maps from the top")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = asked.store
        if store is None:
            options = capture.Options(num_sequences=asked.num_sequences, seq_len=512, token_stride=2, inputs="both")
            captured = capture.capture(
                asked.source, asked.target, Path(folder) / "pair.zarr", text=TextOptions("demo:text"), options=options
            )
            store = captured.store
        with open(asked.out, "a") as stream:
            for name, wanted in MAPS[: asked.first]:
                print(json.dumps(row(name, wanted, store, Path(folder), asked)), file=stream, flush=True)


if __name__ == "__main__":
    main()
