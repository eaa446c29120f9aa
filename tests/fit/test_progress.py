"""Progress without a terminal: which lines a log gets, on a clock that the test moves."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from kvfit.fit.progress import Progress, duration, track


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "kvfit")
    return caplog


def test_a_run_says_its_start_its_state_and_its_result(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with Progress("capture", 100, "sequences", plan="about 4 min", clock=clock) as shown:
        for _ in range(4):
            clock.now += 60
            shown.advance(25)
        shown.finish("pair.zarr", then="kvfit solve pair.zarr --out bundle")
    assert lines.messages == [
        "capture: 100 sequences; about 4 min",
        "capture: 25 of 100 sequences (25%), 0.417 a second, 3 min 0 s left",
        "capture: 50 of 100 sequences (50%), 0.417 a second, 2 min 0 s left",
        "capture: 75 of 100 sequences (75%), 0.417 a second, 1 min 0 s left",
        "capture: 100 of 100 sequences (100%), 0.417 a second, 0 s left",
        "capture: 100 sequences in 4 min 0 s; pair.zarr; next: kvfit solve pair.zarr --out bundle",
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.1, 0),  # 10 s in all: never 30 s between two lines
        (2, 6),  # 200 s: every 30 s
        (60, 20),  # 6,000 s: every 5 %
    ],
)
def test_the_rarer_of_half_a_minute_and_a_twentieth(lines: pytest.LogCaptureFixture, seconds: float, expected: int) -> None:
    clock = Clock()
    with Progress("solve", 100, "layers", clock=clock) as shown:
        for _ in range(100):
            clock.now += seconds
            shown.advance()
    assert len(lines.messages) - 1 == expected


def test_a_resumed_run_counts_its_rate_from_where_it_began(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with Progress("capture", 100, "sequences", initial=80, clock=clock) as shown:
        clock.now += 40
        shown.advance(10)
    assert lines.messages == [
        "capture: 100 sequences, 80 of them done before",
        "capture: 90 of 100 sequences (90%), 0.25 a second, 40 s left",
    ]


def test_an_unknown_total_and_a_total_of_nothing(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with Progress("push", None, "files", clock=clock) as shown:
        clock.now += 31
        shown.advance(2)
    with Progress("push", 0, "files", clock=clock):
        pass
    assert lines.messages == ["push: files of unknown number", "push: 2 files, 0.0645 a second", "push: 0 files"]


def test_silence_where_nothing_is_to_be_shown(lines: pytest.LogCaptureFixture) -> None:
    with Progress("capture", 3, "sequences", show=False) as shown:
        shown.advance(3)
        shown.finish("pair.zarr")
    assert list(track([1, 2], "probe", "layers", show=False)) == [1, 2]
    assert lines.messages == []


def test_a_terminal_gets_a_bar_and_no_lines(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(range(3), "probe", "layers")) == [0, 1, 2]
    assert "probe: 100%" in terminal.getvalue()
    assert lines.messages == []


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (425, "7 min 5 s"), (12_000, "3 h 20 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
