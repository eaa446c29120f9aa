"""A store keeps entries whole, within its limit, and gives back only what was put."""

import os
import time

import pytest

from kvfit.errors import MismatchError
from kvfit.vllm.store import FolderStore, Store, open_store


def address(number):
    return f"{number:064x}"


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "store", 1000)


def aged(store, number, seconds):
    """Make an entry look unused for so long."""
    os.utime(store._path(address(number)), (time.time() - seconds,) * 2)


def test_what_was_put_is_there_and_nothing_else(store):
    assert store.put(address(1), b"one")
    assert (store.has(address(1)), store.get(address(1))) == (True, b"one")
    assert (store.has(address(2)), store.get(address(2))) == (False, None)
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_two_processes_see_the_same_folder(store):
    store.put(address(1), b"one")
    assert FolderStore(store.folder, 1000).get(address(1)) == b"one"


def test_the_entries_unused_for_longest_make_room(store):
    for number in range(9):
        store.put(address(number), bytes(100))
        aged(store, number, 100 - number)
    assert store.get(address(0)) is not None  # used now
    store._puts = 10**6  # time for a scan
    assert store.put(address(9), bytes(200))
    assert store.has(address(0))
    assert not store.has(address(1))
    assert store.has(address(9))
    assert sum(path.stat().st_size for path in store.folder.rglob("*.kv")) <= 1000


def test_the_limit_holds_however_much_is_put(store):
    for number in range(200):
        assert store.put(address(number), bytes(90))
        assert sum(path.stat().st_size for path in store.folder.rglob("*.kv")) <= 1000
    assert store.has(address(199))


def test_an_entry_larger_than_the_store_is_not_kept(store):
    assert not store.put(address(1), bytes(1001))
    assert not store.has(address(1))


def test_an_unfinished_file_is_no_entry_and_is_cleaned_up(store):
    store.put(address(1), b"one")
    part = store._path(address(2)).with_suffix(".1-0.part")
    part.write_bytes(b"half of")
    fresh = part.with_suffix(".2-0.part")
    fresh.write_bytes(b"being written")
    os.utime(part, (time.time() - 3600,) * 2)
    assert not store.has(address(2))
    store._make_room(0)
    assert (part.exists(), fresh.exists()) == (False, True)


def test_a_failed_write_leaves_nothing(store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not store.put(address(1), b"one")
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("bad", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "/b"])
def test_an_address_that_is_none_is_refused(store, bad):
    for call in (store.has, store.get, lambda it: store.put(it, b"")):
        with pytest.raises(MismatchError, match="hexadecimal"):
            call(bad)


def test_a_store_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "their_store.py").write_text(
        "class Kept(dict):\n"
        "    def __init__(self, options): self.options = options\n"
        "    def put(self, address, data): self[address] = data; return True\n"
        "    def has(self, address): return address in self\n"
        "def nothing(options): return object()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    store = open_store("their_store:Kept", 1, {"host": "somewhere"})
    assert isinstance(store, Store)
    assert store.options == {"host": "somewhere"}
    with pytest.raises(MismatchError, match="put, get and has"):
        open_store("their_store:nothing", 1, {})
    with pytest.raises(MismatchError, match="needed a folder or"):
        open_store("their_store:missing", 1, {})
    assert isinstance(open_store(str(tmp_path / "folder"), 10, {}), FolderStore)


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MismatchError, match="needed a folder"):
        FolderStore(tmp_path / "file" / "store", 10)
    with pytest.raises(MismatchError, match="max_store_bytes"):
        FolderStore(tmp_path / "store", 0)
