"""The built-in pair of models and its text, as data files, and the refs that name them.

Two Qwen3 models of one family, trained by `scripts/train_demo_pair.py` on public-domain text, and two files of documents that
neither model was trained on: `text.jsonl` to fit maps on, `heldout.jsonl` to test them. The verb `kvfit demo` is in
`kvfit.cli.demo`. This package knows nothing of the rest of kvfit.
"""

from pathlib import Path

from kvfit.errors import RefError

FOLDER = Path(__file__).parent

MODELS = {"demo:source": FOLDER / "source", "demo:target": FOLDER / "target"}
TEXTS = {"demo:text": FOLDER / "text.jsonl", "demo:heldout": FOLDER / "heldout.jsonl"}


def demo_path(ref: str) -> Path | None:
    """The path behind a built-in ref; None for any other ref.

    Raises:
        RefError: the ref starts with ``demo:`` but is not a built-in one.
    """
    if not ref.startswith("demo:"):
        return None
    known = MODELS | TEXTS
    if ref not in known:
        raise RefError(f"{ref}: found no such built-in ref, needed one of {', '.join(known)}")
    return known[ref]
