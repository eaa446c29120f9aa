"""Write the report of an evaluation, `evaluation.md` and one HTML page, for readers who do not know the documentation.

The template `report.jinja` makes both from the same blocks. The HTML page contains its pictures, so it needs no other file. It
also quotes held-out text, so it is written next to the bundle and not published with it.
"""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path
from typing import Any

from kvfit.fit.evaluate.tables import blocks
from kvfit.spec import MapperSpec

TEMPLATE = Path(__file__).with_name("report.jinja")


def markdown(report: dict[str, Any], spec: MapperSpec) -> str:
    """The report as Markdown.

    Args:
        report: the content of `evaluation.json`.
        spec: the bundle's spec.
    """
    return _rendered("markdown", report, spec, {}, [])


def html_page(report: dict[str, Any], spec: MapperSpec, pictures: dict[str, bytes], transcripts: list[dict[str, str]]) -> str:
    """The report as one self-contained HTML page.

    Args:
        report: the content of `evaluation.json`.
        spec: the bundle's spec.
        pictures: PNG files by name.
        transcripts: contexts and their continuations, as `Measured.transcripts` returns them.
    """
    return _rendered("html", report, spec, pictures, transcripts)


def _prose(text: str) -> str:
    """A paragraph as HTML: escaped, with text in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _rendered(
    form: str, report: dict[str, Any], spec: MapperSpec, pictures: dict[str, bytes], transcripts: list[dict[str, str]]
) -> str:
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    # The template escapes: names and reasons go through the filters `e` and `prose` in HTML, and are unchanged in Markdown.
    environment.filters["prose"] = _prose
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    inline = {name: base64.b64encode(data).decode() for name, data in pictures.items()}
    return template.render(
        form=form,
        title=f"Evaluation: {spec.source.ref} to {spec.target.ref}",
        verdict=report["verdict"],
        blocks=list(blocks(report, spec)),
        pictures=inline,
        transcripts=transcripts,
    )
