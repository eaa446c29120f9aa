"""docs/reference/supported-models.md says what the tests test: its tables are generated from the families of the zoo.

Run ``PYTHONPATH=tests/support python tests/model/test_supported_models.py`` to write them again.
"""

from pathlib import Path

from zoo import FAMILIES, REFUSED, UNLISTED, Family

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "supported-models.md"
HEAD_DIM = 16


def family_row(family: Family) -> str:
    rotates = [index for index in family.assignment if index is not None]
    width = "all" if family.rotated_width == HEAD_DIM else f"{100 * family.rotated_width // HEAD_DIM} %"
    windows = "no" if family.windows is None else ("all layers" if all(family.windows) else "some layers")
    still = "none" if len(rotates) == len(family.assignment) else ("all layers" if not rotates else "some layers")
    tables = len(set(rotates))
    pairing = {"half": "half-split", "interleaved": "interleaved"}[family.pairing] if rotates else "none"
    scaling = f"attention scaling {family.scaling:.4g}" if family.scaling != 1.0 else ""
    notes = ", ".join(part for part in (scaling, family.note) if part)
    return row(family.name, f"`{family.model_type}`", pairing, width if rotates else "none", str(tables), still, windows, notes)


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def head(*cells: str) -> str:
    return row(*cells) + "\n" + "|---" * len(cells) + "|\n"


def block(name: str) -> str:
    families = {"families": FAMILIES, "unlisted": UNLISTED}
    if name in families:
        top = head("case", "model_type", "pairing", "rotated", "tables", "layers that do not rotate", "windows", "notes")
        return top + "\n".join(family_row(family) for family in families[name])
    rows = []
    for refused in REFUSED:
        where = "all layers" if refused.layer_index is None else f"layer {refused.layer_index}"
        rows.append(row(refused.what, f"`{refused.model_type}`", where, f"...{refused.reason}..."))
    return head("what", "model_type", "names", "the message says") + "\n".join(rows)


def generated(text: str) -> str:
    """The page with every generated block made anew."""
    for name in ("families", "unlisted", "refused"):
        start, end = f"<!-- {name}: generated -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        assert after, f"{PAGE.name} has no block {name}"
        text = before + start + block(name) + end + after
    return text


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == generated(text), f"run: PYTHONPATH=tests/support python tests/model/{Path(__file__).name}"


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
