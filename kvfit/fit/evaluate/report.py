"""The report of an evaluation, for a reader who has not seen the documentation: `evaluation.md` and one HTML page.

Both are made by the template `report.jinja` from the same blocks. The HTML page needs no other file: its pictures are in it. It
also quotes held-out text, so it lies beside the bundle and is not published with it.
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
        spec: of the bundle.
    """
    return _rendered("markdown", report, spec, {}, [])


def html_page(report: dict[str, Any], spec: MapperSpec, pictures: dict[str, bytes], transcripts: list[dict[str, str]]) -> str:
    """The report as one HTML page that needs no other file.

    Args:
        report: the content of `evaluation.json`.
        spec: of the bundle.
        pictures: PNG files by name.
        transcripts: contexts and their continuations, as `Measured.transcripts` returns them.
    """
    return _rendered("html", report, spec, pictures, transcripts)


def _prose(text: str) -> str:
    """A paragraph as HTML: escaped, and what stands in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _rendered(
    form: str, report: dict[str, Any], spec: MapperSpec, pictures: dict[str, bytes], transcripts: list[dict[str, str]]
) -> str:
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    # Escaping is the template's: names and reasons reach HTML through the filters `e` and `prose`, Markdown as they are.
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
