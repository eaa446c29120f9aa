"""The layout is a contract: imports point one way, the runtime stays light, names say what they hold.

Each check is a function of a source tree, so that it can also be shown to fail: on a made-up tree, or on a made-up import.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvfit"

# One line a package, lowest first: a package may import itself and the lines above its own.
RANKS = (
    ("errors",),
    ("spec",),
    ("cost", "demo", "model", "bundle"),
    ("runtime",),
    ("hub",),
    ("fit.progress",),
    ("fit.stats", "fit.plots"),
    ("fit.capture",),
    ("fit.solve",),
    ("fit.refine",),
    ("fit.hardware",),
    ("fit.payoff",),
    ("fit.evaluate", "fit.plan"),
    ("interop",),
    ("vllm",),
    ("cli",),
    ("__main__",),
)
# What the runtime may not cost: everything that only fitting, or only building a model, needs.
HEAVY = ("accelerate", "click", "datasets", "matplotlib", "pandas", "pyarrow", "sklearn", "tokenizers", "transformers", "zarr")
MAY_IMPORT_FIT = ("cli", "interop")
MOST_LINES, MOST_CODE, MOST_PARAMETERS = 300, 60, 8
# Functions with more parameters, and why.
WIDE = {
    "fit.capture.capture.capture": "a public verb: every one but three is an option with a default",
    "fit.evaluate.harness.KvfitLM.__init__": "lm-evaluation-harness passes options by name from one string",
    "hub.load.load_mapper": "a public call: every one is an option with a default",
    "hub.push.push": "a public verb: every one but two is an option with a default",
    "runtime.handoff.handoff": "a public call: every one but four is an option with a default",
    "runtime.watch.attention": "takes what torch's scaled_dot_product_attention takes",
}
VAGUE_NAMES = ("common", "helper", "helpers", "misc", "util", "utils")


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name below the package; the package itself under its own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts) or package.name] = path
    return found


def imports(package: Path, name: str) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of the package's own modules anywhere in a module, inside functions too."""
    known = modules(package)
    root = package.name
    path = known[name]
    home = [root, *([] if name == root else name.split("."))]
    if path.name != "__init__.py":
        home.pop()

    def inner(dotted: list[str]) -> str:
        return ".".join(dotted[1:]) or root

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == root:
                    yield inner(alias.name.split(".")), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = [*home[: len(home) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            if base[:1] != [root]:
                continue
            for alias in node.names:
                submodule = inner([*base, alias.name])
                yield (submodule if submodule in known else inner(base)), node.lineno


def room(name: str, ranks: tuple[tuple[str, ...], ...]) -> str | None:
    """The entry of the table that a module belongs to: itself or the nearest package around it."""
    known = {entry for line in ranks for entry in line}
    parts = name.split(".")
    return next((".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in known), None)


def upward_imports(package: Path, ranks: tuple[tuple[str, ...], ...]) -> list[str]:
    """What breaks the table: modules without a line in it, lines without a module, imports of a line that is not above."""
    rank = {name: number for number, line in enumerate(ranks) for name in line}
    known = modules(package)
    faults = [f"{name}: is in RANKS but does not exist" for name in rank if name not in known]
    for name, path in known.items():
        here = room(name, ranks)
        # The root names its public functions for type checkers and loads them when they are first used.
        if name == package.name or (path.name == "__init__.py" and here is None):
            continue
        if here is None:
            faults.append(f"{name}: has no line in RANKS of {Path(__file__).name}")
            continue
        for imported, line in imports(package, name):
            there = room(imported, ranks)
            if there is not None and there != here and rank[there] >= rank[here]:
                faults.append(f"{name}, line {line}: imports {imported}, whose line is not above that of {here}")
    return faults


def imports_of_fit(package: Path) -> list[str]:
    """Modules outside `fit` that import it."""
    return [
        f"{name}, line {line}"
        for name in modules(package)
        if name.split(".")[0] not in ("fit", *MAY_IMPORT_FIT)
        for imported, line in imports(package, name)
        if imported.split(".")[0] == "fit"
    ]


def undocumented(package: Path) -> list[str]:
    """Modules, public classes and public functions without a docstring; methods count where their class is public."""
    faults = []

    def visit(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        if ast.get_docstring(node) is None:
            faults.append(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
                visit(child, f"{name}.{child.name}")

    for name, path in modules(package).items():
        visit(ast.parse(path.read_text(encoding="utf-8")), name)
    return faults


def too_long(package: Path) -> list[str]:
    """Files over `MOST_LINES` lines."""
    counts = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules(package).items()}
    return [f"{name}: {count} lines" for name, count in counts.items() if count > MOST_LINES]


def functions(package: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method by its dotted name below the package, those inside of functions too."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            inner = f"{name}.{child.name}" if named else name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield inner, child
            yield from inside(child, inner)

    for name, path in modules(package).items():
        yield from inside(ast.parse(path.read_text(encoding="utf-8")), name)


def too_much_code(package: Path) -> list[str]:
    """Functions of over `MOST_CODE` lines, the docstring not counted."""
    faults = []
    for name, function in functions(package):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if ast.get_docstring(function) is not None:
            lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
        if lines > MOST_CODE:
            faults.append(f"{name}: {lines} lines")
    return faults


def too_wide(package: Path) -> list[str]:
    """Functions of over `MOST_PARAMETERS` parameters, `self` and `cls` not counted."""
    faults = []
    for name, function in functions(package):
        arguments = function.args
        every = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if len(every) - (every[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
            faults.append(name)
    return faults


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a statement brings into a fresh interpreter, beyond the standard library and start-up."""
    program = f"""
import json, sys
before = set(sys.modules)
{statement}
after = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(after - set(sys.stdlib_module_names))))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return set(json.loads(done.stdout))


def test_imports_point_one_way() -> None:
    assert upward_imports(PACKAGE, RANKS) == []


def test_only_the_command_line_and_interop_import_fit() -> None:
    assert imports_of_fit(PACKAGE) == []


def _tree(folder: Path, **sources: str) -> Path:
    package = folder / "made"
    for name, source in {"__init__": '"""Root."""', **sources}.items():
        path = package / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    "statement",
    [
        "from made import high",
        "import made.high",
        "from made.high import name",
        "from . import high",
        "from .high import name",
        "def late():\n    from made.high import name",
        "class Late:\n    import made.high",
    ],
)
def test_an_upward_import_is_seen_however_it_is_written(tmp_path: Path, statement: str) -> None:
    package = _tree(tmp_path, low=statement, high="name = 1")
    ranks = (("made",), ("low",), ("high",))
    assert len(upward_imports(package, ranks)) == 1
    assert "imports high" in upward_imports(package, ranks)[0]
    assert upward_imports(package, (("made",), ("high",), ("low",))) == []


def test_an_import_inside_a_subpackage_is_resolved_from_there(tmp_path: Path) -> None:
    package = _tree(
        tmp_path, low="", fit__in____init__="", fit__in__deep="from .. import low\nfrom . import deeper", fit__in__deeper=""
    )
    assert {name for name, _ in imports(package, "fit.deep")} == {"low", "fit.deeper"}


def test_a_module_without_a_line_and_an_import_of_fit_are_seen(tmp_path: Path) -> None:
    package = _tree(
        tmp_path, new="", root="def late():\n    from made.fit import heavy", fit__in____init__="", fit__in__heavy=""
    )
    faults = upward_imports(package, (("fit.heavy",), ("root",), ("gone",)))
    assert [fault.split(":")[0] for fault in faults] == ["gone", "new"]
    assert imports_of_fit(package) == ["root, line 2"]


def test_a_package_is_one_room(tmp_path: Path) -> None:
    package = _tree(
        tmp_path, a__in____init__="", a__in__one="from made.a import two", a__in__two="from made.b import far",
        b__in____init__="", b__in__far="from made.a import one",
    )  # fmt: skip
    faults = upward_imports(package, (("b",), ("a",)))
    assert len(faults) == 1
    assert faults[0].startswith("b.far, line 1: imports a.one")
    assert len(upward_imports(package, (("a", "b"),))) == 2


def test_import_kvfit_loads_nothing_else() -> None:
    assert loaded_by("import kvfit") == {"kvfit"}


def test_load_mapper_loads_nothing_heavy() -> None:
    loaded = loaded_by("from kvfit import load_mapper")
    assert "torch" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_handoff_loads_nothing_heavy() -> None:
    assert loaded_by("from kvfit import Mapper, handoff").isdisjoint(HEAVY)


def test_a_heavy_import_would_be_seen() -> None:
    loaded = loaded_by("import kvfit\nimport transformers\nimport click")
    assert {"transformers", "click"} <= loaded & set(HEAVY)


def test_no_file_has_a_name_that_says_nothing() -> None:
    vague = [
        path
        for folder in (PACKAGE, ROOT / "tests", ROOT / "scripts")
        for path in folder.rglob("*.py")
        if path.stem in VAGUE_NAMES
    ]
    assert vague == []


def test_no_file_and_no_function_is_too_long() -> None:
    assert too_long(PACKAGE) == []
    assert too_much_code(PACKAGE) == []


def test_no_function_has_too_many_parameters_without_a_reason() -> None:
    assert sorted(too_wide(PACKAGE)) == sorted(WIDE)  # no entry is left when its function is mended


def test_long_files_and_functions_are_seen(tmp_path: Path) -> None:
    text = "\n" + "    # why\n" * 70
    package = _tree(
        tmp_path,
        long="x = 1\n" * (MOST_LINES + 1),
        just="x = 1\n" * MOST_LINES,
        told='def told():\n    """Told."""\n' + "    x = 1\n" * (MOST_CODE - 1),
        documented=f'def documented():\n    """Told.{text}    """\n    return 1\n',
        deep="class Deep:\n    def method(self):\n        def inner():\n" + "            x = 1\n" * MOST_CODE,
    )
    assert too_long(package) == [f"long: {MOST_LINES + 1} lines"]
    assert too_much_code(package) == [
        f"deep.Deep.method: {MOST_CODE + 2} lines",
        f"deep.Deep.method.inner: {MOST_CODE + 1} lines",
    ]


def test_functions_with_many_parameters_are_seen(tmp_path: Path) -> None:
    names = ", ".join(f"p{number}" for number in range(MOST_PARAMETERS))
    package = _tree(
        tmp_path,
        wide=f"def f({names}): ...\ndef g({names}, more): ...\ndef h({names}, *, more): ...\nasync def i(x, /, {names}): ...",
        method=f"class C:\n    def f(self, {names}): ...\n    def g(self, {names}, more): ...",
    )
    assert too_wide(package) == ["method.C.g", "wide.g", "wide.h", "wide.i"]


def test_everything_public_has_a_docstring() -> None:
    assert [name for name in undocumented(PACKAGE) if not name.endswith((".to_json", ".convert"))] == []


def test_a_missing_docstring_is_seen(tmp_path: Path) -> None:
    public = '"""Module."""\nclass Public:\n    """Class."""\n    def method(self): ...\n    def _own(self): ...\n'
    source = public + "def function(): ...\ndef _own(): ...\n"
    assert undocumented(_tree(tmp_path, module=source)) == ["module.Public.method", "module.function"]
