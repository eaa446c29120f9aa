"""Write a generated page of the site, or check that it is up to date. For the scripts that make one."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, wanted: str, source: str) -> None:
    """Write the page; with ``--check`` on the command line, exit with an error where it is not up to date.

    Args:
        page: the page's file.
        wanted: its text.
        source: what the page is made from, for the message.
    """
    program = f"python scripts/{Path(sys.argv[0]).name}"
    if sys.argv[1:] == ["--check"]:
        if not page.exists() or page.read_text(encoding="utf-8") != wanted:
            sys.exit(f"{page.name}: found another text than {source} gives: run {program}")
    elif sys.argv[1:]:
        sys.exit(f"found {' '.join(sys.argv[1:])}, needed nothing or --check")
    else:
        page.write_text(wanted, encoding="utf-8")
