"""Folders that appear whole or not at all, on a disk that is full, beside runs that were killed."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bundle_factory import basis, lexical_spec, mapper_spec, weights

from kvfit.bundle.bundle import write_bundle
from kvfit.bundle.files import remove_abandoned, scratch_folder, whole_folder
from kvfit.errors import BundleError


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_run(destination: Path) -> None:
    """A process that is killed while it works in its scratch folder."""
    child = os.fork()
    if child == 0:
        with scratch_folder(destination) as scratch:
            (scratch / "data").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_a_killed_run_left_goes_with_the_next_run(tmp_path):
    killed_run(tmp_path / "out")
    killed_run(tmp_path / "another")
    assert len(left_over(tmp_path)) == 2
    assert all(name.endswith(".partial") for name in left_over(tmp_path))
    (tmp_path / ".out.mine.partial").mkdir()  # not of the form that kvfit gives
    spec = mapper_spec()
    write_bundle(tmp_path / "out", spec, weights(spec), recipe={}, solve={})
    names = left_over(tmp_path)
    assert [name for name in names if name.startswith(".out.")] == [".out.mine.partial"]
    assert any(name.startswith(".another.") for name in names)
    assert ".in-use" not in left_over(tmp_path / "out")


def test_the_scratch_folder_of_a_run_that_goes_on_is_left_alone(tmp_path):
    with scratch_folder(tmp_path / "out") as scratch:
        (scratch / "data").write_bytes(b"x")
        done = subprocess.run(
            [sys.executable, "-c", f"from kvfit.bundle.files import *; remove_abandoned(Path({str(tmp_path / 'out')!r}))"],
            check=False,
        )
        assert done.returncode == 0
        remove_abandoned(tmp_path / "out")
        assert (scratch / "data").read_bytes() == b"x"
    assert left_over(tmp_path) == []


def test_a_run_that_works_in_one_may_write_the_destination(tmp_path):
    """As `solve` does: the scratch folder of the run itself is not taken for an abandoned one."""
    spec = mapper_spec()
    with scratch_folder(tmp_path / "out") as scratch:
        (scratch / "data").write_bytes(b"x")
        write_bundle(tmp_path / "out", spec, weights(spec), recipe={}, solve={})
        assert (scratch / "data").read_bytes() == b"x"
    assert left_over(tmp_path) == ["out"]


def test_a_scratch_folder_without_a_lock_is_old_before_it_is_removed(tmp_path):
    scratch = tmp_path / ".out.01234567.partial"
    scratch.mkdir()
    remove_abandoned(tmp_path / "out")
    assert scratch.is_dir()
    os.utime(scratch, (1, 1))
    remove_abandoned(tmp_path / "out")
    assert not scratch.exists()


@pytest.mark.parametrize("limit", [100, 6000])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, limit):
    """The disk is full at the size that the system lets the child's files have: mapper.json has more, or the weights have."""
    spec = lexical_spec(rank=40)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write_bundle(tmp_path / "out", spec, weights(spec), recipe={}, solve={}, basis=basis(spec))
        except BundleError as error:
            os.write(writer, str(error).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as stream:
        message = stream.read()
    assert message.startswith(f"{tmp_path / 'out'}: cannot be written (")
    assert "File too large" in message
    assert "\n" not in message
    assert left_over(tmp_path) == []


def test_a_whole_folder_takes_no_ones_place(tmp_path):
    def make() -> None:
        with whole_folder(tmp_path / "out") as scratch:
            (scratch / "x").write_bytes(b"x")
            (tmp_path / "out").mkdir()

    with pytest.raises(BundleError, match="already exists"):
        make()
    assert left_over(tmp_path) == ["out"]
    assert left_over(tmp_path / "out") == []
