"""The store's write side: kills, failing disks, locks, quarantine, budgets, and what resuming refuses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import random_pair
import torch
from random_pair import SOURCE, TARGET, TOKEN_BYTES, Batch, batches, budget, capture, model, scratch, worst_error

from kvfit.errors import MismatchError, StoreError
from kvfit.fit.stats import budget as budgets
from kvfit.fit.stats import layout, moments, updater
from kvfit.fit.stats.record import read_record
from kvfit.fit.stats.store import Accumulator, Store
from kvfit.fit.stats.updater import CopyDone, working_bytes
from kvfit.fit.stats.writer import StoreWriter

RECIPE = {"seed": 0}
SIZES = [30] * 10


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as path:
        yield path


def create(path: Path, **options: object) -> Accumulator:
    settings = {"source": SOURCE, "target": TARGET, "recipe": RECIPE, "memory_budget": budget(64), **options}
    return random_pair.create(path, **settings)


def resume(path: Path, **options: object) -> Accumulator:
    return Accumulator.resume(path, **{"recipe": RECIPE, "memory_budget": budget(64), **options})


def go_on(accumulator: Accumulator, given: list[Batch]) -> None:
    for number in range(accumulator.cursor or 0, len(given)):
        split, source, target = given[number]
        accumulator.add(split, source, target, number + 1)


def content(path: Path) -> dict[str, object]:
    """Everything that makes a store what it is: its record and the bytes of its chunks."""
    Store.open(path).verify()
    chunks = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("c.*")}
    return {"record": json.loads((path / "commit.json").read_bytes())["record"], **chunks}


def statistics(path: Path) -> dict[str, object]:
    """The same without how often, and to which generation, it was written."""
    store = Store.open(path)
    store.verify()
    record = store.record
    plain = {name: getattr(record, name) for name in ("tokens", "batches", "cursor", "recipe", "buffer_tokens", "lexical_lags")}
    chunks = {
        (array.name, name.split("/")[0], number): (path / name / chunk.key).read_bytes()
        for name, array in record.live_arrays().items()
        for number, chunk in enumerate(array.chunks)
    }
    return {**plain, **chunks}


# -- kills ------------------------------------------------------------------------------------------------------------


def test_killed_processes_leave_no_trace(tmp_path: Path) -> None:
    seed, kills = 2, 30
    script = Path(__file__).parents[2] / "support" / "killable_capture.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(seed), str(kills)], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert sum(told["kills"]) == kills
    assert len({cursor for cursor in told["cursors"] if type(cursor) is int}) >= 4  # killed in many places, not in one
    whole = content(tmp_path / "whole.zarr")
    stores = sorted(tmp_path.glob("killed*.zarr"))
    assert len(stores) == len(told["kills"])
    for store in stores:
        assert content(store) == whole


# -- blocks in memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Settings that keep all blocks in memory beside the same small buffer."""
    monkeypatch.setattr(budgets, "RESIDENT_BUFFER", 64)
    return {"memory_budget": 1 << 30}


@pytest.mark.parametrize("snapshot_seconds", [0.0, 0.02, 600.0])
@pytest.mark.parametrize("stats_dtype", ["float32", "float64"])
def test_blocks_in_memory_give_the_bits_of_blocks_on_disk(
    tmp_path: Path, roomy: dict[str, int], snapshot_seconds: float, stats_dtype: str
) -> None:
    given = batches(SIZES, mean=30.0)
    capture(tmp_path / "disk.zarr", given, stats_dtype=stats_dtype)
    with create(tmp_path / "s.zarr", snapshot_seconds=snapshot_seconds, stats_dtype=stats_dtype, **roomy) as accumulator:
        assert (accumulator.in_memory, accumulator.buffer_tokens) == (True, 64)
        go_on(accumulator, given)
        accumulator.finish(len(given))
        commits = read_record(accumulator.path).commit
    assert statistics(tmp_path / "s.zarr") == statistics(tmp_path / "disk.zarr")
    flushes = read_record(tmp_path / "disk.zarr").commit
    assert commits == (1 if snapshot_seconds == 600 else flushes if snapshot_seconds == 0 else commits) <= flushes


@pytest.mark.parametrize(("n_threads", "unit_numbers"), [(1, 1), (4, 1), (4, 2**23)])
def test_the_bits_on_disk_do_not_depend_on_the_threads(
    tmp_path: Path, roomy: dict[str, int], monkeypatch: pytest.MonkeyPatch, n_threads: int, unit_numbers: int
) -> None:
    """With chunks of one pair of layers, so that there are many to write; against blocks that never left memory."""
    monkeypatch.setattr(layout, "SMALLEST_CHUNK", 1)
    monkeypatch.setattr(updater, "UNIT_NUMBERS", unit_numbers)
    given = batches(SIZES, mean=30.0)
    with create(tmp_path / "memory.zarr", **roomy) as accumulator:
        go_on(accumulator, given)
        accumulator.finish(len(given))
    monkeypatch.setattr(updater, "WRITING_THREADS", n_threads)
    capture(tmp_path / "disk.zarr", given)
    assert len(list((tmp_path / "disk.zarr").rglob("c.*"))) > 40
    assert statistics(tmp_path / "disk.zarr") == statistics(tmp_path / "memory.zarr")


def test_chunks_are_hashed_and_written_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks wait for each other: with one thread alone the barrier would break."""
    monkeypatch.setattr(updater, "WRITING_THREADS", 2)
    met, plain = threading.Barrier(2), StoreWriter.add_to_chunk

    def waiting(self: StoreWriter, *arguments: object) -> str:
        if not passed.is_set():
            met.wait(30)
            passed.set()
        return plain(self, *arguments)

    passed = threading.Event()
    monkeypatch.setattr(StoreWriter, "add_to_chunk", waiting)
    capture(tmp_path / "s.zarr", batches(SIZES))
    assert passed.is_set()
    Store.open(tmp_path / "s.zarr").verify()


def test_memory_and_disk_take_turns(tmp_path: Path, roomy: dict[str, int]) -> None:
    """Left and resumed after every few batches, each time the other way; what the buffer held is given again."""
    given = batches(SIZES, mean=30.0)
    capture(tmp_path / "whole.zarr", given)
    path, turns = tmp_path / "s.zarr", 0
    create(path, **roomy).close()
    while (cursor := read_record(path).cursor or 0) < len(given) - 4:
        with resume(path, **(roomy if turns % 2 else {})) as accumulator:
            assert accumulator.in_memory is bool(turns % 2)
            go_on(accumulator, given[: cursor + 4])
        assert (read_record(path).cursor or 0) > cursor  # leaving commits where the buffer was emptied last
        turns += 1
    with resume(path, **roomy) as accumulator:
        go_on(accumulator, given)
        accumulator.finish(len(given))
    assert turns >= 3
    assert statistics(path) == statistics(tmp_path / "whole.zarr")


def test_an_error_amid_the_products_commits_nothing(
    tmp_path: Path, roomy: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were half brought up to date never reach the disk."""
    given = batches(SIZES)
    capture(tmp_path / "whole.zarr", given)
    path = tmp_path / "s.zarr"
    with create(path, **roomy) as accumulator:
        go_on(accumulator, given[:5])
    before, calls = read_record(path), 0
    plain = moments.sum_products

    def interrupted(*arguments: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        plain(*arguments, **options)

    def run() -> None:
        with resume(path, **roomy) as accumulator:
            go_on(accumulator, given)

    with monkeypatch.context() as patch:
        patch.setattr(moments, "sum_products", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert read_record(path) == before
    with resume(path, **roomy) as accumulator:
        go_on(accumulator, given)
        accumulator.finish(len(given))
    assert statistics(path) == statistics(tmp_path / "whole.zarr")


def test_a_full_disk_under_a_snapshot_stops_the_run(
    tmp_path: Path, roomy: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = batches(SIZES)
    capture(tmp_path / "whole.zarr", given)
    path = tmp_path / "s.zarr"

    def run() -> None:
        with resume(path, snapshot_seconds=0, **roomy) as accumulator:
            go_on(accumulator, given)

    create(path, **roomy).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Disk(full_at=60))
        with pytest.raises(StoreError, match="No space left on device; the last commit is intact"):
            run()
    assert 0 < read_record(path).cursor < len(given)
    with resume(path, **roomy) as accumulator:
        go_on(accumulator, given)
        accumulator.finish(len(given))
    assert statistics(path) == statistics(tmp_path / "whole.zarr")


def test_batches_are_taken_while_a_snapshot_is_written(
    tmp_path: Path, roomy: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = batches([30] * 6)
    held, entered = threading.Event(), threading.Event()
    plain = os.fsync

    def slow(handle: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert held.wait(30)
        plain(handle)

    with create(tmp_path / "s.zarr", snapshot_seconds=0, **roomy) as accumulator:
        go_on(accumulator, given[:2])
        monkeypatch.setattr(os, "fsync", slow)
        for number in (2, 3):  # the first of them empties the buffer and begins a snapshot, which is held
            accumulator.add(*given[number], number + 1)
        assert entered.wait(30)
        assert accumulator.cursor is None
        held.set()
        accumulator.add(*given[4], 5)  # needs the buffer, so it waits for the snapshot to end
        assert accumulator.cursor in (2, 4)  # 4 where the snapshot that it begins has ended, too
        accumulator.finish(6)


class Card:
    """What torch.cuda is told, by a machine that has no card: the device of every event and stream."""

    def __init__(self) -> None:
        self.current, self.recorded = 0, []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        card = self

        class Within:
            def __init__(self, device: torch.device) -> None:
                self.device, self.before = torch.device(device).index, card.current

            def __enter__(self) -> None:
                self.before, card.current = card.current, self.device

            def __exit__(self, *_error: object) -> None:
                card.current = self.before

        class Event:
            def __init__(self) -> None:
                self.made_on = card.current

            def record(self, stream: int | None = None) -> None:
                card.recorded.append((self.made_on, card.current if stream is None else stream))

        monkeypatch.setattr(torch.cuda, "device", Within)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: card.current if device is None else device.index)


def test_a_copy_is_done_when_its_own_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the second card, while the first is current: an event of the first would be done before the copy."""
    card = Card()
    card.install(monkeypatch)
    done = CopyDone(torch.device("cuda:1"))
    done.record()
    assert card.recorded == [(1, 1)]
    torch.cuda.Event().record()  # negative control: this is what recording without a device does
    assert card.recorded[-1] == (0, 0)


def test_resuming_does_not_hang_on_the_budget(tmp_path: Path) -> None:
    """The buffer of the first run is used again, so that another budget gives the same bits."""
    given = batches(SIZES)
    capture(tmp_path / "whole.zarr", given)
    with create(tmp_path / "s.zarr") as accumulator:
        go_on(accumulator, given[:5])
        assert accumulator.cursor == 4  # two batches of 30 in a buffer of 64
    with resume(tmp_path / "s.zarr", memory_budget=1 << 30) as accumulator:
        assert accumulator.buffer_tokens == 64
        go_on(accumulator, given)
        accumulator.finish(len(given))
    assert statistics(tmp_path / "s.zarr") == statistics(tmp_path / "whole.zarr")


def test_a_smaller_budget_is_obeyed_on_resume(tmp_path: Path) -> None:
    given = batches(SIZES)
    with create(tmp_path / "s.zarr") as accumulator:
        go_on(accumulator, given[:5])
    with resume(tmp_path / "s.zarr", memory_budget=budget(10)) as accumulator:
        assert accumulator.buffer_tokens == 10
        go_on(accumulator, given)
        accumulator.finish(len(given))
    assert worst_error(Store.open(tmp_path / "s.zarr"), given, "all") < 1e-6


def test_resume_clears_what_no_commit_names(tmp_path: Path) -> None:
    path, given = tmp_path / "s.zarr", batches(SIZES)
    with create(path) as accumulator:
        go_on(accumulator, given[:7])
    dead = "b" if read_record(path).live.fit == "a" else "a"
    strays = [
        path / "commit.json.partial",
        path / f"fit/{dead}/source_sum/c.0.0.0",
        path / f"fit/{dead}/cross/keys-keys/c.9.0.0",
    ]
    for stray in strays:
        stray.write_bytes(b"stale")
    with resume(path) as accumulator:
        assert not any(stray.exists() for stray in strays)
        go_on(accumulator, given)
        accumulator.finish(len(given))
    capture(tmp_path / "whole.zarr", given)
    assert content(path) == content(tmp_path / "whole.zarr")


def test_resume_refuses_a_damaged_chunk_when_it_needs_it(tmp_path: Path) -> None:
    path, given = tmp_path / "s.zarr", batches(SIZES)
    with create(path) as accumulator:
        go_on(accumulator, given[:7])
    chunk = path / f"fit/{read_record(path).live.fit}/source/keys-keys/c.0.0.0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with resume(path) as accumulator, pytest.raises(StoreError, match="source/keys-keys does not match its digest"):
        go_on(accumulator, given)


def test_a_finished_store_can_be_extended(tmp_path: Path) -> None:
    given = batches(SIZES)
    capture(tmp_path / "s.zarr", given[:6])
    with resume(tmp_path / "s.zarr") as accumulator:
        assert accumulator.finished
        go_on(accumulator, given)
        with pytest.raises(StoreError, match="is incomplete: 240 tokens committed"):
            Store.open(tmp_path / "s.zarr")
        accumulator.finish("end")
    store = Store.open(tmp_path / "s.zarr")
    assert worst_error(store, given, "all") < 1e-6
    assert store.record.cursor == "end"


def test_leaving_without_finishing_leaves_an_incomplete_store(tmp_path: Path) -> None:
    with create(tmp_path / "s.zarr") as accumulator:
        go_on(accumulator, batches(SIZES))
    with pytest.raises(StoreError, match=r"s\.zarr is incomplete"):
        Store.open(tmp_path / "s.zarr")
    with pytest.raises(StoreError, match="closed"):
        accumulator.finish(None)


# -- disks that refuse ------------------------------------------------------------------------------------------------


class Disk:
    """In place of os.fsync: counts, and finds the disk full at the n-th call."""

    def __init__(self, full_at: int = 0) -> None:
        self.full_at, self.calls, self.fsync = full_at, 0, os.fsync

    def __call__(self, handle: int) -> None:
        self.calls += 1
        if self.calls == self.full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.fsync(handle)


def test_a_full_disk_at_any_moment_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batches(SIZES)
    capture(tmp_path / "whole.zarr", given)
    with create(tmp_path / "begun.zarr") as accumulator:
        go_on(accumulator, given[:5])
    path = tmp_path / "s.zarr"

    def run(disk: Disk) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "begun.zarr", path)
        with resume(path) as accumulator, monkeypatch.context() as patch:
            patch.setattr(os, "fsync", disk)
            go_on(accumulator, given[:8])

    healthy = Disk()
    run(healthy)
    assert healthy.calls > 20  # one commit of both splits
    for call in range(1, healthy.calls + 1):
        with pytest.raises(StoreError, match="No space left on device; the last commit is intact"):
            run(Disk(full_at=call))
        with resume(path) as accumulator:
            assert accumulator.cursor == (6 if call == healthy.calls else 4)  # the last one is after the rename
            go_on(accumulator, given)
            accumulator.finish(len(given))
        assert content(path) == content(tmp_path / "whole.zarr")


def test_nothing_is_committed_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batches(SIZES)
    with create(tmp_path / "s.zarr") as accumulator:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Disk(full_at=5))
            with pytest.raises(StoreError, match="No space left"):
                go_on(accumulator, given)
        with pytest.raises(StoreError, match=r"after an error .*No space left.*; open it again with resume"):
            accumulator.finish(0)


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    """A real refusal, by the limit on the size of a file, in place of a full disk."""
    given = batches(SIZES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with create(tmp_path / "s.zarr") as accumulator:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            with pytest.raises(StoreError, match=r"cannot be written: .*; nothing was committed before: free space and run"):
                go_on(accumulator, given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with resume(tmp_path / "s.zarr") as accumulator:
        go_on(accumulator, given)
        accumulator.finish(len(given))
    capture(tmp_path / "whole.zarr", given)
    assert content(tmp_path / "s.zarr") == content(tmp_path / "whole.zarr")


def test_a_disk_that_is_full_at_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Disk(full_at=3))
        with pytest.raises(StoreError, match="No space left"):
            create(tmp_path / "s.zarr")
    assert not list(tmp_path.iterdir())
    create(tmp_path / "s.zarr").close()


# -- locks ------------------------------------------------------------------------------------------------------------


def in_another_process(work: Callable[[], object]) -> str:
    """The message of the error that `work` raises in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = "no error"
        try:
            work()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, message.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    with create(path) as accumulator:
        message = in_another_process(lambda: resume(path))
        assert message.startswith("StoreError")
        assert f"{path} is being written by another process" in message
        with pytest.raises(StoreError, match="another process"):  # nor twice in one process
            resume(path)
        accumulator.finish(0)
    assert in_another_process(lambda: resume(path).close()) == "no error"


def test_two_processes_do_not_create_one_store(tmp_path: Path) -> None:
    with layout_lock(tmp_path / ".s.zarr.partial"):
        # Named as its user knows it, not by the folder that it is built in.
        message = in_another_process(lambda: create(tmp_path / "s.zarr"))
        assert f"{tmp_path / 's.zarr'} is being written by another process" in message
    create(tmp_path / "s.zarr").close()
    with pytest.raises(StoreError, match=r"s\.zarr exists; continue it with --resume"):
        create(tmp_path / "s.zarr")


def layout_lock(root: Path) -> contextlib.AbstractContextManager[None]:
    from kvfit.fit.stats.writer import take_lock

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        root.mkdir()
        handle = take_lock(root, root)
        yield
        handle.release()

    return held()


# -- what resuming refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": {"seed": 1, "names": ["a", "b"]}, "versions": {}}, r"recipe\.text\.seed = 0, this run has 1"),
        ({"text": {"seed": 0, "names": ["a", "c"]}, "versions": {}}, r"recipe\.text\.names\[1\] = 'b', this run has 'c'"),
        ({"text": {"seed": 0, "names": ["a"]}, "versions": {}}, r"recipe\.text\.names = \['a', 'b'\], this run has \['a'\]"),
        ({"text": {"seed": 0, "names": ["a", "b"]}}, r"recipe\.versions = \{\}, this run has '<nothing>'"),
        (
            {"text": {"seed": 0, "names": ["a", "b"], "x": None}, "versions": {}},
            r"text\.x = '<nothing>', this run has None",
        ),
        ({"text": {"seed": False, "names": ["a", "b"]}, "versions": {}}, r"recipe\.text\.seed = 0, this run has False"),
    ],
)
def test_another_recipe_is_refused_by_field(tmp_path: Path, given: dict[str, object], message: str) -> None:
    create(tmp_path / "s.zarr", recipe={"text": {"seed": 0, "names": ("a", "b")}, "versions": {}}).close()
    with pytest.raises(StoreError, match=message):
        resume(tmp_path / "s.zarr", recipe=given)
    resume(tmp_path / "s.zarr", recipe={"versions": {}, "text": {"names": ["a", "b"], "seed": 0}}).close()  # and let go


def test_other_models_are_refused_by_field(tmp_path: Path) -> None:
    create(tmp_path / "s.zarr").close()
    with pytest.raises(StoreError, match=r"target\.n_heads = 3, this run has 4"):
        resume(tmp_path / "s.zarr", layout=layout.Layout(SOURCE, model(4, 4, 4)))
    resume(tmp_path / "s.zarr", layout=layout.Layout(SOURCE, TARGET)).close()


def test_recipes_are_json(tmp_path: Path) -> None:
    for value in (object(), float("nan"), {1, 2}, os.fsdecode(b"text-\xff.jsonl"), 1 << 64):
        with pytest.raises(StoreError, match=r"recipe: found .*, needed values of strict JSON"):
            create(tmp_path / "s.zarr", recipe={"value": value})
    assert not list(tmp_path.iterdir())


def test_a_cursor_that_could_not_be_read_again_is_not_committed(tmp_path: Path) -> None:
    with create(tmp_path / "s.zarr") as accumulator:
        accumulator.add(*batches([9])[0], 1)
        with pytest.raises(StoreError, match="commit record holds half of a surrogate pair"):
            accumulator.finish(os.fsdecode(b"\xff"))
    assert read_record(tmp_path / "s.zarr").cursor is None


@pytest.mark.parametrize("add", ['"commit": 1, ', '"x": NaN, ', '"x": 1e999, ', '"x": "\\ud800", '])
def test_a_record_is_read_strictly(tmp_path: Path, add: str) -> None:
    create(tmp_path / "s.zarr").close()
    path = tmp_path / "s.zarr" / "commit.json"
    path.write_text(path.read_text().replace('"record": {', '"record": {' + add, 1))
    with pytest.raises(StoreError, match="is damaged: it is not a commit record"):
        read_record(tmp_path / "s.zarr")


# -- batches that are not right ---------------------------------------------------------------------------------------


def spoiled(batch: Batch, side: int, kind: str, layer_index: int, value: float) -> Batch:
    copy = (batch[0], *({k: [x.clone() for x in batch[s][k]] for k in ("keys", "values")} for s in (1, 2)))
    copy[side][kind][layer_index][-1, 3] = value  # type: ignore[index]
    return copy  # type: ignore[return-value]


@pytest.mark.parametrize("where", [0, 3, 119])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_bad_batch_is_set_aside_whole(tmp_path: Path, where: int, value: float) -> None:
    good = batches([5] * 119)
    given = [*good[:where], spoiled(batches([5] * 3, seed=9)[2], 2, "values", 2, value), *good[where:]]
    capture(tmp_path / "s.zarr", given)
    store = Store.open(tmp_path / "s.zarr")
    assert store.quarantined() == {
        "seen": 120, "quarantined": 1, "first": {"model": "target", "kind": "values", "layer_index": 2},
    }  # fmt: skip
    assert max(worst_error(store, good, split) for split in ("fit", "holdout")) < 1e-6


def test_a_bad_batch_larger_than_the_buffer_is_set_aside_whole(tmp_path: Path) -> None:
    good = batches([5] * 119)
    given = [*good[:50], spoiled(batches([500] * 3, seed=9)[2], 1, "keys", 0, float("nan")), *good[50:]]
    capture(tmp_path / "s.zarr", given)
    assert max(worst_error(Store.open(tmp_path / "s.zarr"), good, split) for split in ("fit", "holdout")) < 1e-6


def test_more_than_one_in_a_hundred_is_an_error(tmp_path: Path) -> None:
    given = batches([2] * 150)
    for number in (20, 70):
        given[number] = spoiled(given[number], 1, "keys", 1, float("nan"))
    message = "2 of 100 batches hold values that are not finite, first the keys of source layer 1"
    with create(tmp_path / "s.zarr") as accumulator, pytest.raises(StoreError, match=message):
        go_on(accumulator, given)
    with resume(tmp_path / "s.zarr") as accumulator:
        assert accumulator.cursor > 60  # the last commit is intact


def test_the_share_is_checked_at_the_end_however_few_there_were(tmp_path: Path) -> None:
    given = batches([20] * 6)
    given[1] = spoiled(given[1], 1, "values", 0, float("inf"))
    with create(tmp_path / "s.zarr") as accumulator:
        go_on(accumulator, given)
        with pytest.raises(StoreError, match="1 of 6 batches"):
            accumulator.finish(6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pair: pair[0]["keys"].pop(), "source gave keys of 2 layers, the store needs 3"),
        (lambda pair: pair[1].pop("values"), "target gave values of 0 layers"),
        (
            lambda pair: pair[0]["values"].__setitem__(1, torch.zeros(30, 17)),
            r"source values of layer 1 are .*\(30, 17\)",
        ),
        (lambda pair: pair[1]["keys"].__setitem__(3, torch.zeros(29, 12)), r"target keys of layer 3 .*needs floats \(30, 12\)"),
        (lambda pair: pair[1]["keys"].__setitem__(0, torch.zeros(30, 12, dtype=torch.int64)), "int64"),
        (lambda pair: pair[0]["keys"].__setitem__(0, torch.zeros(1, 30, 16)), r"source keys of layer 0 .*\(1, 30, 16\)"),
    ],
)
def test_wrong_shapes_are_refused_and_change_nothing(tmp_path: Path, change: Callable[..., object], message: str) -> None:
    given = batches(SIZES)
    with create(tmp_path / "s.zarr") as accumulator:
        go_on(accumulator, given[:1])
        split, source, target = spoiled(given[1], 1, "keys", 0, 0.0)
        change((source, target))
        with pytest.raises(MismatchError, match=message):
            accumulator.add(split, source, target, 0)
        with pytest.raises(MismatchError, match="split 'all', needs fit or holdout"):
            accumulator.add("all", given[0][1], given[0][2], 0)
        for number in range(1, 10):
            accumulator.add(*given[number], number)
        accumulator.finish(None)
    assert worst_error(Store.open(tmp_path / "s.zarr"), given, "all") < 1e-6


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_what_was_given_is_copied(tmp_path: Path) -> None:
    given = batches(SIZES)
    kept = batches(SIZES)
    with create(tmp_path / "s.zarr") as accumulator:
        for number, (split, source, target) in enumerate(given):
            accumulator.add(split, source, target, number)
            for side in (source, target):
                for tensor in (*side["keys"], *side["values"]):
                    tensor.fill_(float("nan"))
        accumulator.finish(None)
    assert worst_error(Store.open(tmp_path / "s.zarr"), kept, "all") < 1e-6


def test_views_and_inference_tensors(tmp_path: Path) -> None:
    given = batches(SIZES)
    with create(tmp_path / "s.zarr") as accumulator:
        for split, source, target in given:
            with torch.inference_mode():
                sides = [{k: [x.T.contiguous().T for x in side[k]] for k in side} for side in (source, target)]
            accumulator.add(split, sides[0], sides[1], None)
        accumulator.finish(None)
    assert worst_error(Store.open(tmp_path / "s.zarr"), given, "all") < 1e-6


def test_the_buffer_is_sized_by_the_budget(tmp_path: Path) -> None:
    pair = {"source": model(10, 8, 128), "target": model(16, 8, 128)}
    for number, size in enumerate((1 << 20, 1 << 28, 1 << 30)):
        with create(tmp_path / f"{number}.zarr", memory_budget=size, **pair) as accumulator:
            in_buffer = accumulator.buffer_tokens * layout.Layout(*pair.values(), "same", "float32").token_bytes
            assert size / 2 < in_buffer <= size
    with create(tmp_path / "least.zarr", memory_budget=1) as accumulator:
        assert accumulator.buffer_tokens == 1
    with create(tmp_path / "most.zarr", memory_budget=1 << 40) as accumulator:
        assert accumulator.buffer_tokens == budgets.RESIDENT_BUFFER
        assert accumulator.in_memory
    with create(tmp_path / "disk.zarr", memory_budget=1 << 40, **pair) as accumulator:
        assert accumulator.in_memory
    assert not budgets.fits_in_memory(layout.Layout(*pair.values(), "same", "float32"), 2 << 30)
    assert 0 < budgets.free_share() < 1 << 50


def test_the_least_budget_is_what_one_token_and_the_blocks_take() -> None:
    shapes = layout.Layout(SOURCE, TARGET, "same", "float32")
    least = TOKEN_BYTES + working_bytes(shapes)
    budgets.check_budget(shapes, least)
    with pytest.raises(MismatchError, match=rf"--memory-budget: found {least - 1} bytes, needed at least \d+KiB"):
        budgets.check_budget(shapes, least - 1)
    # A large pair: three float64 slots of 64 MiB, a float32 product, and on each thread two chunks of 4 MB.
    large = layout.Layout(model(40, 8, 128), model(64, 8, 128), "same", "float32")
    assert 224 << 20 < working_bytes(large) < (224 << 20) + 2 * updater.WRITING_THREADS * 5_000_000


def test_only_the_upper_triangle_is_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = 0

    def counting(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scratch: torch.Tensor) -> None:
        assert scratch.numel() >= total.numel()
        nonlocal multiplied
        assert len(left) == len(right)
        multiplied += total.numel() * len(left)
        total.zero_()

    monkeypatch.setattr("kvfit.fit.stats.moments.sum_products", counting)
    capture(tmp_path / "s.zarr", batches(SIZES))
    assert multiplied == 2 * sum(SIZES) * (6 * 16 * 16 + 12 * 16 * 12)
