"""The documentation is true: its Python runs, its commands parse, its reference is the code's own, its files agree.

Every Python block of a page runs in order in one namespace, in a folder that holds what `kvfit demo` leaves (made here on less
text). A block whose fence has a title beginning with "Not run" is left out.
"""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from kvfit import errors
from kvfit.bundle.bundle import Bundle
from kvfit.hub.card import render_card
from kvfit.hub.registry import MapperEntry, ModelPin, list_mappers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALL = [ROOT / "README.md", *PAGES]
FROZEN = ROOT / "tests" / "data" / "bundle-v2"
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
# Options of other programs that pages name.
FOREIGN = {
    "--check",
    "--model",
    "--model_args",
    "--tasks",
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--strict",
}


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(fence info after the language, body) of every block of a language."""
    found = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        name, _, rest = match["info"].strip().partition(" ")
        if name == language:
            found.append((rest, match["body"]))
    return found


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every ``kvfit`` command in a page's shell blocks, from the word ``kvfit`` on."""
    for language in ("sh", "bash", "console"):
        for _, body in blocks(page, language):
            for line in body.replace("\\\n", " ").split("\n"):
                for part in re.split(r"&&|;|\|", line):
                    words = shlex.split(part, comments=True)
                    for at, word in enumerate(words):
                        if word.rpartition("/")[2] == "kvfit" and (at == 0 or words[at - 1] in ("-m", "$")):
                            yield words[at:]
                            break


def parse(words: list[str]) -> None:
    """Parse a command as the command line does, without running it."""
    from kvfit.cli.main import cli

    name, command, rest = cli.resolve_command(click.Context(cli), words[1:])
    assert command is not None
    command.make_context(name, rest)


def script(name: str) -> ModuleType:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `demo-out` in it, as `kvfit demo` leaves it, made on less text."""
    from kvfit.fit.capture import capture
    from kvfit.fit.capture.text import TextOptions
    from kvfit.fit.evaluate import evaluate
    from kvfit.fit.solve import solve

    folder = tmp_path_factory.mktemp("docs")
    out = folder / "demo-out"
    out.mkdir()
    captured = capture.capture(
        "demo:source",
        "demo:target",
        out / "pair.zarr",
        text=TextOptions("demo:text"),
        options=capture.Options(num_sequences=40, seq_len=128, token_stride=1),
        progress=False,
    )
    solved = solve.solve(captured.store, out / "bundle", options=solve.Options(penalty=0.01), progress=False)
    # So little text makes no map that passes: pages get one that was never evaluated, the page on evaluation a copy that was.
    shutil.copytree(solved.bundle, folder / "evaluated" / "demo-out" / "bundle")
    options = evaluate.Options(
        prefix=96, continuation=32, documents=4, probes=0, greedy=2, diagnose=0, seconds=0, transcripts=0, resamples=10
    )
    evaluate.evaluate(folder / "evaluated" / "demo-out" / "bundle", options=options, progress=False)
    return folder


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """What pages call "with both models loaded and the source's cache at hand"."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvfit.demo import MODELS
    from kvfit.model import cache as caches

    source, target = (AutoModelForCausalLM.from_pretrained(MODELS[f"demo:{name}"]).eval() for name in ("source", "target"))
    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo:target"])
    ids = tokenizer(
        "In the beginning was a text of more than a few words, so that there is something to move.", return_tensors="pt"
    )
    return {
        "source_model": source,
        "target_model": target,
        "tokenizer": tokenizer,
        "input_ids": ids["input_ids"],
        "caches": caches,
    }


def _prelude(loaded: dict[str, Any]) -> dict[str, Any]:
    cache = loaded["caches"].new_cache(loaded["source_model"])
    loaded["caches"].forward(loaded["source_model"], loaded["input_ids"], cache)
    return {**{name: value for name, value in loaded.items() if name != "caches"}, "source_cache": cache, "__name__": "page"}


def run_page(page: Path, namespace: dict[str, Any]) -> int:
    """Run a page's Python in order; the number of blocks that ran."""
    count = 0
    for info, body in blocks(page, "python"):
        if 'title="Not run' in info:
            continue
        exec(compile(body, str(page), "exec"), namespace)
        count += 1
    return count


@pytest.mark.parametrize("page", [p for p in ALL if blocks(p, "python")], ids=lambda p: p.relative_to(ROOT).as_posix())
@pytest.mark.filterwarnings("ignore")
def test_python_runs(page: Path, place: Path, loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "evaluated" if page.name == "evaluate.md" else place)
    run_page(page, _prelude(loaded))


def test_the_python_of_a_card_runs(place: Path, loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    card = render_card(Bundle.open(place / "demo-out" / "bundle"), ref="demo-out/bundle").replace("=200)", "=4)")
    (place / "card.md").write_text(card, encoding="utf-8")
    namespace = _prelude(loaded)
    with pytest.warns(UserWarning, match="was not evaluated"):
        assert run_page(place / "card.md", namespace) == 1
    ids = loaded["input_ids"]
    assert namespace["output_ids"].shape == (1, ids.shape[1] + 4)
    assert namespace["output_ids"][:, : ids.shape[1]].equal(ids)


def spelled_for_one_version(code: str) -> list[str]:
    """The calls that pass a cache under a name of transformers, which differs between its versions."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if {"cache", "past_key_values"} & {word.arg for word in call.keywords}]


def test_a_cache_is_passed_on_with_one_spelling_everywhere() -> None:
    """`moved.generate(...)` works on every version: pages, examples and cards show nothing else."""
    shown = {page.name: "\n".join(body for _, body in blocks(page, "python")) for page in ALL}
    shown |= {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "examples").glob("*.py")}
    shown["card"] = render_card(Bundle.open(FROZEN), ref="org/mapper").split("```python\n")[1].split("```")[0]
    assert sum("moved.generate(" in code for code in shown.values()) >= 6
    assert {name: found for name, code in shown.items() if (found := spelled_for_one_version(code))} == {}


def test_a_spelling_of_one_version_would_be_found() -> None:
    for name in ("cache", "past_key_values"):
        assert spelled_for_one_version(f"model.generate(ids, {name}=moved.cache)") == [
            f"model.generate(ids, {name}=moved.cache)"
        ]
    assert spelled_for_one_version("moved.generate(max_new_tokens=4)") == []
    assert spelled_for_one_version("handoff(mapper, model, ids, cache, target_cache=moved.cache)") == []


def test_most_python_is_run() -> None:
    infos = [info for page in ALL for info, _ in blocks(page, "python")]
    assert len([info for info in infos if "title=" in info]) <= len(infos) // 4


def test_a_page_that_is_wrong_would_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```python\nx = 1\n```\n\n```python title="Not run: needs a GPU"\nx = 2\n```\n\n```python\nassert x == 2\n```\n'
    )
    with pytest.raises(AssertionError):
        run_page(page, {})
    page.write_text(page.read_text().replace("assert x == 2", "assert x == 1"))
    assert run_page(page, {}) == 2


@pytest.mark.parametrize("page", [p for p in ALL if any(commands(p))], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        try:
            parse(words)
        except (click.ClickException, click.exceptions.Exit) as error:
            if isinstance(error, click.exceptions.Exit) and error.exit_code == 0:
                continue  # --help, --version
            pytest.fail(f"{shlex.join(words)}: {error.format_message() if isinstance(error, click.ClickException) else error}")


@pytest.mark.parametrize(
    "line", ["kvfit capture a b", "kvfit solve s --out o --no-such", "kvfit fly", "kvfit solve s --out o --top-k x"]
)
def test_a_command_that_is_wrong_would_fail(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh\ncd x && {line}  # comment\n```\n")
    [words] = commands(page)
    with pytest.raises(click.ClickException):
        parse(words)


def test_commands_and_options_named_in_text_exist() -> None:
    from kvfit.cli.main import cli

    known = {name for command in cli.commands.values() for parameter in command.params for name in parameter.opts} | FOREIGN
    known |= {"--help", "--version"}
    wrong = []
    for page in ALL:
        for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))):
            wrong += [
                f"{page.name}: {option}" for option in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", code) if option not in known
            ]
            wrong += [f"{page.name}: {code}" for name in re.findall(r"^kvfit ([a-z]+)", code) if name not in cli.commands]
    assert wrong == []


def test_the_command_reference_is_what_the_command_line_says() -> None:
    generator = script("write_cli_reference")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page()


def test_the_catalogue_is_what_the_registry_says() -> None:
    generator = script("write_catalogue")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(list_mappers(folder=ROOT / "registry"))


def test_the_catalogue_shows_the_best_of_a_pair_once() -> None:
    def entry(name: str, verdict: str, scores: tuple[tuple[str, float], ...]) -> MapperEntry:
        models = ModelPin("org/small", "1" * 40, "llama"), ModelPin("org/large", "2" * 40, "llama")
        digest = f"sha256:{'0' * 64}"
        return MapperEntry(1, f"org/{name}", None, "v1", "a" * 40, 1, digest, 2_500_000, "mit", verdict, *models, scores)  # type: ignore[arg-type]

    page = script("write_catalogue").page([entry("good", "pass", (("recall", 0.9), ("kl", 0.25))), entry("new", "unknown", ())])
    link = f"[`org/good@v1`](https://huggingface.co/org/good/tree/{'a' * 40})"
    assert f"| `org/small`<br>`org/large` | {link}<br>pass, 2.5 MB, mit | 90% |  |  |  | 0.250 |  /  |" in page
    assert "<br>unknown, 2.5 MB, mit |  |  |  |  |  |  /  |" in page
    assert page.count('load_mapper(source="org/small", target="org/large")') == 1
    assert '```python title="Not run here: needs the Hub"' in page


def test_every_error_class_has_a_heading() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KvfitError)}
    headings = set(re.findall(r"^## (\w+)$", (DOCS / "reference" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert headings == classes


def test_errors_page_names_the_builtins() -> None:
    sections = re.split(r"^## ", (DOCS / "reference" / "errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for section in sections:
        name = section.split("\n", 1)[0]
        builtin = next((base for base in getattr(errors, name).__mro__[1:] if base.__module__ == "builtins"), Exception)
        if builtin is not Exception:
            assert f"`{builtin.__name__}`" in section


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(DOCS).as_posix())
def test_a_page_opens_with_what_it_is_for(page: Path) -> None:
    """A title, then a sentence in plain text, before any table, list, picture or further heading."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).strip()
    title, opening = text.split("\n", 1)
    assert re.match(r"# \S", title)
    first = opening.strip().split("\n\n", 1)[0]
    assert re.match(r"[A-Za-z`\[*]", first)
    assert len(first.split()) >= 8


def test_the_map_of_contributing_names_files_that_exist() -> None:
    table = (DOCS / "contributing.md").read_text(encoding="utf-8").split("## What a change must pass")[0]
    named = re.findall(r"`((?:kvfit|tests|docs|scripts)/[\w./-]+)`", table)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_the_tree_in_readme_names_every_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [tree] = re.findall(r"<!-- tree -->\n```text\n(.*?)```", text, re.DOTALL)
    package = ROOT / "kvfit"
    named = re.findall(r"\b(\w+/|\w+\.py)(?=\s)", tree.partition("registry/")[0])
    rooms = [f"{path.parent.name}/" for path in package.rglob("__init__.py")]
    alone = [path.name for path in [*package.glob("*.py"), *(package / "fit").glob("*.py")]]
    assert sorted(named) == sorted(rooms + [name for name in alone if not name.startswith("__")])


def test_readme_and_ci_run_the_same_command() -> None:
    readme = [body.strip() for _, body in blocks(ROOT / "README.md", "sh")]
    install = [line for line in readme if line.startswith("python3 -m venv")]
    assert len(install) == 2
    assert install[0].endswith("kvfit demo")
    assert install[1].endswith("pytest")
    assert all("\n" not in line for line in install)
    assert f"bash -c '{install[1]}'" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_ci_run_stops_at_a_failure() -> None:
    """`set -e` overlooks a failure in the middle of a && b && c; the shell around README's command must not."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [call] = re.findall(r"^bash -c '.*'$", text, re.MULTILINE)
    assert text.index("set -euo pipefail") < text.index(call)
    broken = call.replace("python3 -m venv .venv", "false")
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{broken}\necho went on"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "went on" not in done.stdout


def test_no_figure_is_missing() -> None:
    assert [page.name for page in ALL if "<<FIGURE" in page.read_text(encoding="utf-8")] == []


def test_no_page_names_a_local_path() -> None:
    home = re.compile(r"/(?:root|home|work|Users)/")
    assert [page.name for page in ALL if home.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WARNING" not in done.stderr


def test_python_blocks_are_valid_python() -> None:
    for page in ALL:
        for _, body in blocks(page, "python"):
            ast.parse(body, str(page))
