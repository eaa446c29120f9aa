"""The streams of a real process: closed, full, or interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
        [sys.executable, "-m", "kvfit", "demo", "--out", str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores interrupts, and its children would with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("1/4")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "kvfit: interrupted"
    assert "Traceback" not in err
