"""The built-in pair and its text, as data, and the refs that name them. Knows nothing of the rest of kvfit.

Two Qwen3 models of one family, trained by `scripts/train_demo_pair.py` on public-domain text, and two files of documents that
neither model was trained on: `text.jsonl` to fit maps on, `heldout.jsonl` to test them. The verb `kvfit demo` is in
`kvfit.cli.demo`.
"""

from pathlib import Path

from kvfit.errors import RefError

FOLDER = Path(__file__).parent

MODELS = {"demo:source": FOLDER / "source", "demo:target": FOLDER / "target"}
TEXTS = {"demo:text": FOLDER / "text.jsonl", "demo:heldout": FOLDER / "heldout.jsonl"}


def demo_path(ref: str) -> Path | None:
    """Where a built-in ref lives; None for any other ref.

    Raises:
        RefError: it starts with ``demo:`` but there is no such thing.
    """
    if not ref.startswith("demo:"):
        return None
    known = MODELS | TEXTS
    if ref not in known:
        raise RefError(f"{ref}: found no such built-in ref, needed one of {', '.join(known)}")
    return known[ref]
