"""What the examples share: the demo pair and a mapper for it. Put your own two models and your bundle here."""

import sys
import tempfile
from pathlib import Path

import torch

from kvfit import load_mapper
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions, documents


def load(arguments=None):
    """Source, target, tokenizer and the mapper between them; the bundle is the first argument, or is made on the spot."""
    arguments = sys.argv[1:] if arguments is None else arguments
    source, target = models.load("demo:source"), models.load("demo:target")
    bundle = arguments[0] if arguments else _quick_bundle()
    # In production leave require="pass", the default: it refuses a mapper that was not found good enough.
    mapper = load_mapper(bundle, require="any").bind(source.model, target.model, tokenizer=target.tokenizer)
    return source.model, target.model, target.tokenizer, mapper


def prompts(tokenizer, lengths):
    """Beginnings of held-out documents, one list of ids per length."""
    held_out = documents(TextOptions("demo:heldout"))
    return [tokenizer(text)["input_ids"][:length] for text, length in zip(held_out, lengths, strict=False)]


def _quick_bundle():
    """A rough mapper in a minute: a real one is fitted on far more text."""
    from kvfit.fit.capture import capture
    from kvfit.fit.solve import solve

    folder = Path(tempfile.mkdtemp(prefix="kvfit-example-"))
    options = capture.Options(num_sequences=80, seq_len=256, token_stride=1)
    captured = capture.capture(
        "demo:source", "demo:target", folder / "pair.zarr", text=TextOptions("demo:text"), options=options, progress=False
    )
    return solve.solve(captured.store, folder / "bundle", progress=False).bundle


def confidence(scores, ids):
    """(B,) geometric mean probability that a model gave to the tokens it chose; scores as `generate` returns them."""
    chosen = [step.log_softmax(-1).gather(1, ids[:, i : i + 1]) for i, step in enumerate(scores)]
    return torch.cat(chosen, 1).mean(1).exp()
