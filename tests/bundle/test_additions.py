"""Files added to a finished bundle: all of them or none, wherever the run that adds them stops."""

import json
import os
import threading
from pathlib import Path

import pytest
from bundle_factory import evaluation, make_bundle

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.errors import BundleError

STEPS = ("replace", "fsync")


def files(folder: Path, text: str) -> dict[str, bytes]:
    """An evaluation with its report and card, all of which change with `text`."""
    document = evaluation(Bundle.open(folder)) | {"note": text}
    names = ("README.md", "evaluation.md", "r2-map.png")
    return {"evaluation.json": json.dumps(document).encode()} | {name: f"{name} {text}".encode() for name in names}


def content(folder: Path) -> dict[str, bytes]:
    """What the bundle holds, without dotted names."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def stop_at(step: str, number: int, how) -> None:
    """Make the `number`-th call of ``os.<step>`` in this process end in `how`."""
    real, calls = getattr(os, step), 0

    def counted(*arguments, **options):
        nonlocal calls
        calls += 1
        return how() if calls == number else real(*arguments, **options)

    setattr(os, step, counted)


@pytest.mark.parametrize("step", STEPS)
def test_a_run_that_is_killed_leaves_the_old_files_or_the_new_ones(tmp_path, step):
    """In a child that is ended without any clean-up at every rename and every write to disk in turn."""
    outcomes = set()
    for number in range(1, 20):
        folder = make_bundle(tmp_path / f"{number}")
        old, new = files(folder, "old"), files(folder, "new")
        add_files(folder, old)
        before = content(folder)
        child = os.fork()
        if child == 0:
            stop_at(step, number, lambda: os._exit(9))
            add_files(folder, new)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        bundle = Bundle.open(folder)
        bundle.check_weights()
        found = content(folder)
        kept, added = ({name: found[name] for name in old} == given for given in (old, new))
        assert kept or added
        assert not kept or found == before
        assert bundle.evaluation["note"] == ("new" if added else "old")
        outcomes.add(added)
        add_files(folder, new)  # the next run finds nothing in its way, and leaves nothing behind
        assert {name: data for name, data in content(folder).items() if name in new} == new
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("the run never came to its end")
    assert outcomes == {False, True}


@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_refuses_is_one_line_and_leaves_the_old_files_or_the_new_ones(tmp_path, monkeypatch, step):
    def refuse():
        raise OSError(28, "No space left on device")

    failed = 0
    for number in range(1, 20):
        folder = make_bundle(tmp_path / f"{number}")
        old, new = files(folder, "old"), files(folder, "new")
        add_files(folder, old)
        with monkeypatch.context() as patch:
            patch.setattr(os, step, getattr(os, step))
            stop_at(step, number, refuse)
            try:
                add_files(folder, new)
                break
            except BundleError as error:
                message = str(error)
        failed += 1
        assert "No space left on device" in message
        assert "\n" not in message
        Bundle.open(folder)
        found = content(folder)
        assert {name: found[name] for name in old} in (old, new)
    else:
        pytest.fail("the addition never succeeded")
    assert failed >= 4


def test_the_same_file_left_over_from_another_addition_is_not_taken(tmp_path):
    """Control: a staged file counts only where its digest is listed, and its content is what the digest says."""
    folder = make_bundle(tmp_path / "b")
    add_files(folder, {"README.md": b"one"})
    digest = Bundle.open(folder).digests["README.md"]
    (folder / f".README.md.{digest[:16]}.staged").write_bytes(b"another")
    (folder / ".README.md.0123456789abcdef.staged").write_bytes(b"two")
    (folder / f".mapper.json.{Bundle.open(folder).digests['mapper.json'][:16]}.staged").write_bytes(b"{}")
    assert (Bundle.open(folder).folder / "README.md").read_bytes() == b"one"
    add_files(folder, {"LICENSE": b"x"})
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]


def test_where_nobody_may_write_the_message_says_what_to_do(tmp_path, monkeypatch):
    folder = make_bundle(tmp_path / "b")
    child = os.fork()
    if child == 0:
        stop_at("replace", 2, lambda: os._exit(9))  # just after the commit point
        add_files(folder, {"README.md": b"new"})
    os.waitpid(child, 0)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(BundleError, match=r"README\.md: an addition was interrupted .*Permission denied.*kvfit verify"):
        Bundle.open(folder)
    monkeypatch.undo()
    Bundle.open(folder)
    assert (folder / "README.md").read_bytes() == b"new"


def test_readers_meet_the_old_files_or_the_new_ones_while_others_write(tmp_path):
    folder = make_bundle(tmp_path / "b")
    texts = ["a", "bb", "ccc"]
    given = {text: files(folder, text) for text in texts}
    add_files(folder, given["a"])
    errors: list[Exception] = []
    done = threading.Event()

    def write(text: str) -> None:
        try:
            for _ in range(5):
                add_files(folder, given[text])
        except Exception as error:
            errors.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                assert Bundle.open(folder).evaluation["note"] in texts
        except Exception as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert errors == []
    last = Bundle.open(folder).evaluation["note"]
    found = content(folder)
    assert {name: found[name] for name in given[last]} == given[last]
