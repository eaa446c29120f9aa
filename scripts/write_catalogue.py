"""Write docs/catalogue.md from the registry.

python scripts/write_catalogue.py            # write the page
python scripts/write_catalogue.py --check    # exit 1 if the page is not what the registry says
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvfit.hub.registry import MapperEntry, list_mappers

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "catalogue.md"

HEAD = """<!-- Written by scripts/write_catalogue.py from registry/. Run it again after a change there. -->

# Catalogue

This page lists the mappers that are published for this version of kvfit; `kvfit list` prints the same list. If your two
models are not in the table, [fit a mapper](guides/fit-one-gpu.md): a mapper for another pair, or for other versions of these
models, is no substitute.

Each row describes the evaluation's `handoff`, with the guided recompute with which it was judged. Below a mapper's name are
its verdict, its size and its licence. **Recall** is the share of correct answers to questions about facts in the moved part
of the conversation. **Share of gap** is how much of the difference in likelihood between source and target the move
recovers. **Speed** is how many times as fast as the target's prefill it is, and **work** is its share of that prefill's
operations. Read [what they tell and what they do not](concepts/r2-and-likelihood.md). The table is made from the
[registry](reference/registry.md).
"""

COLUMNS = ("Source and target", "Mapper", "Recall", "Share of gap", "Speed", "Work", "KL to native", "R2 keys / values")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _row(entry: MapperEntry) -> Iterator[str]:
    scores = dict(entry.scores)
    yield f"`{entry.source.ref}`<br>`{entry.target.ref}`"
    where = f"https://huggingface.co/{entry.repo}/tree/{entry.commit}" if entry.repo else None
    name = f"[`{entry.name}`]({where})" if where else f"`{entry.name}`"
    yield f"{name}<br>{entry.verdict}, {entry.nbytes / 1e6:.1f} MB, {entry.license}"
    yield _percent(scores.get("recall"))
    yield _percent(scores.get("share_of_gap"))
    yield "" if scores.get("speed") is None else f"{scores['speed']:.2g} x"
    yield _percent(scores.get("share_of_work"))
    yield _number(scores.get("kl"), 3)
    yield f"{_number(scores.get('r2_keys'), 2)} / {_number(scores.get('r2_values'), 2)}"


def _use(entry: MapperEntry) -> str:
    title = ' title="Not run here: needs the Hub"' if entry.repo else ""
    return f"""## {entry.source.ref} to {entry.target.ref}

```python{title}
from kvfit import load_mapper

mapper = load_mapper(source="{entry.source.ref}", target="{entry.target.ref}")
```"""


def page(entries: Sequence[MapperEntry]) -> str:
    """The whole page."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_row(entry))} |" for entry in entries]
    best = {(entry.source.ref, entry.target.ref): entry for entry in reversed(entries)}
    return "\n\n".join([HEAD.strip(), "\n".join(lines), *map(_use, reversed(best.values()))]) + "\n"


if __name__ == "__main__":
    from generated_page import write_or_check

    write_or_check(PAGE, page(list_mappers(folder=ROOT / "registry")), "the registry")
