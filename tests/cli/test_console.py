"""The streams of a real process: closed, full, or interrupted."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfit.cli import console

KVFIT = f'"{sys.executable}" -m kvfit'


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True)


def test_a_closed_stderr_stops_nothing() -> None:
    done = shell(f"{KVFIT} inspect demo:source 2>&-")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].split() == ["verdict", "supported"]
    assert shell(f"{KVFIT} list --registry nowhere 2>&-").returncode == 1


def test_all_streams_closed(tmp_path: Path) -> None:
    """No file of ours may get the number of a stream that libraries print to."""
    log = tmp_path / "log"
    program = (
        f"import os, sys; from kvfit.cli.console import _fill_streams as fill; fill(); f = open({str(log)!r}, 'w'); print('x');"
    )
    program += "print('y', file=sys.stderr); os.write(2, b'z'); f.write(str(f.fileno() > 2))"
    assert shell(f'"{sys.executable}" -c "{program}" 0>&- 1>&- 2>&-').returncode == 0
    assert log.read_text() == "True"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", ["list", "list --json", "env"])
def test_a_full_stdout_is_one_line(words: str) -> None:
    done = shell(f"{KVFIT} {words} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "kvfit: stdout: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_help_on_a_full_stdout_is_one_line() -> None:
    done = shell(f"{KVFIT} --help > /dev/full")
    assert (done.returncode, done.stderr) == (1, "kvfit: No space left on device\n")


def test_a_reader_that_has_seen_enough_is_no_error_to_tell() -> None:
    done = shell(f"{{ {KVFIT} env; echo $? >&2; }} | true")
    assert done.stderr in ("0\n", "1\n")


def test_an_interrupt_is_told(tmp_path: Path) -> None:
    with subprocess.Popen(
        command := [sys.executable, "-m", "kvfit", "fit", "demo:source", "demo:target", "--out", str(tmp_path / "bundle")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores interrupts, and its children would with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("kvfit plan")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    told = err.splitlines()[-1].removeprefix("kvfit: interrupted; to continue: ")
    assert shlex.split(told) == command
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        ("/x/kvfit capture a b --out 'my pair.zarr'", {}, "to continue: /x/kvfit capture a b --out 'my pair.zarr' --resume"),
        ("/x/kvfit capture a b --resume --out c", {}, "to continue: /x/kvfit capture a b --resume --out c"),
        ("/x/kvfit fit a b --out c", {}, "to continue: /x/kvfit fit a b --out c"),
        ("/x/kvfit evaluate b", {"WORLD_SIZE": "1"}, "to continue: /x/kvfit evaluate b"),
        ("/x/kvfit/__main__.py evaluate b", {}, f"to continue: {sys.executable} -m kvfit evaluate b"),
        ("/x/kvfit capture a b", {"WORLD_SIZE": "2"}, "to continue, run the same torchrun command again with --resume"),
        ("/x/kvfit capture a b --resume", {"WORLD_SIZE": "2"}, "to continue, run the same torchrun command again"),
        ("/x/kvfit refine b --out c", {}, None),
        ("/x/kvfit", {}, None),
    ],
)
def test_an_interrupt_says_how_to_go_on(words: str, environment: dict[str, str], told: str | None) -> None:
    assert console._interrupted(shlex.split(words), environment) == ("interrupted" if told is None else f"interrupted; {told}")


def test_a_program_on_the_path_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kvfit"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert console._interrupted([str(program), "evaluate", "b"], {}) == "interrupted; to continue: kvfit evaluate b"


WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv[0] = "kvfit"
from kvfit.cli.main import main
main()
"""


def without(modules: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process in which some modules are not installed."""
    return subprocess.run([sys.executable, "-c", WITHOUT.format(modules=modules), *words], capture_output=True, text=True)


HEAVY = ("demo", "capture a b --out c", "solve a --out b", "evaluate a", "plan a b", "inspect demo:source", "merge a --out b")


@pytest.mark.parametrize("words", [*HEAVY, "fit a b", "refine a --out b"])
def test_a_heavy_verb_without_the_extra_is_one_line(tmp_path: Path, words: str) -> None:
    gone = tuple(module for module in console.EXTRAS["fit"] if module != "click")
    done = without(gone, *(str(tmp_path / word) if word in "abc" else word for word in words.split()))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvfit: {words.split()[0]}: found no module ")
    assert last.endswith('needed the extra "fit": pip install "kvfit-mappers[fit]"')
    assert "Traceback" not in done.stderr


def test_light_verbs_work_without_the_extra() -> None:
    gone = tuple(module for module in console.EXTRAS["fit"] if module != "click")
    for words in ("list", "env", "verify demo-bundle"):
        done = without(gone, *words.split())
        assert "needed the extra" not in done.stderr
        assert "Traceback" not in done.stderr


def test_a_module_that_no_extra_brings_is_not_hidden() -> None:
    done = without(("safetensors",), "verify", "bundle")
    assert "Traceback" in done.stderr
