"""What a capture costs beside the forward passes that it cannot do without.

    python tests/benchmarks/capture.py --num-sequences 300 --repeats 3

Times `capture` of the demo pair from the call to the finished store: tokenizing, loading, self-check, statistics, hashing and
disk included. Beside it, in the same process and in turns, the two bare forward passes over the same sequences in the same
batches: the models alone, without a head and without anything kept but their caches. Prints the fastest of each and their
ratio, by the clock and by processor time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kvfit.fit.capture import capture, models
from kvfit.fit.capture.sequences import sequences
from kvfit.fit.capture.text import TextOptions
from kvfit.model import cache as caches
from kvfit.model.decoder import input_device


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """On the clock, and of all this process's threads together."""
    started = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started[0], time.process_time() - started[1]


@torch.no_grad()
def forward(pair: list[models.Loaded], batches: list[torch.Tensor]) -> None:
    """Both models over all batches, each with a fresh cache."""
    for batch in batches:
        for loaded in pair:
            caches.forward(loaded.model, batch.to(input_device(loaded.model)), caches.full_cache(), base=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo:source")
    parser.add_argument("--target", default="demo:target")
    parser.add_argument("--dataset", default="demo:text")
    parser.add_argument("--num-sequences", type=int, default=300)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--token-stride", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--memory-budget", type=float, default=2, help="GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    text = TextOptions(asked.dataset)
    pair = [models.load(asked.source), models.load(asked.target)]
    stream = sequences(text, pair[0].tokenizer, seq_len=asked.seq_len, pack=False)
    ids = torch.tensor([sequence.ids for sequence in islice(stream, asked.num_sequences)])
    batches = list(ids.split(asked.batch_size))
    forward(pair, batches[:2])
    print(f"{asked.num_sequences} sequences of {asked.seq_len} tokens; fastest of {asked.repeats}; clock / processor")
    print("stride    kept     forward passes            capture    ratio")
    for stride in asked.token_stride:
        options = capture.Options(num_sequences=asked.num_sequences, seq_len=asked.seq_len, token_stride=stride)
        bare, whole = [], []
        for _ in range(asked.repeats):
            folder = Path(tempfile.mkdtemp(prefix="kvfit-bench-"))
            try:
                bare.append(seconds(lambda: forward(pair, batches)))
                whole.append(
                    seconds(
                        lambda folder=folder, options=options: capture.capture(
                            asked.source, asked.target, folder / "pair.zarr", text=text, options=options,
                            batch_size=asked.batch_size, memory_budget=int(asked.memory_budget * 2**30), progress=False,
                        )
                    )
                )  # fmt: skip
            finally:
                shutil.rmtree(folder)
        times = [min(run[clock] for run in runs) for runs in (bare, whole) for clock in (0, 1)]
        kept = len(options.kept) * asked.num_sequences
        ratios = f"{times[2] / times[0]:.2f} / {times[3] / times[1]:.2f}"
        print(f"{stride:6d} {kept:7d} {times[0]:8.2f} /{times[1]:6.2f} s {times[2]:8.2f} /{times[3]:6.2f} s   {ratios}")


if __name__ == "__main__":
    main()
