"""The computing thread's time is cut into computation and waits, without gaps and without counting anything twice."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from zero_infinity import trace as traces
from zero_infinity.errors import ConfigError
from zero_infinity.runtime import recording as recordings
from zero_infinity.runtime.recording import BACKWARD, FORWARD, STEP, Recording
from zero_infinity.trace import Category, Span


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(recordings.time, "perf_counter", lambda: now[0])
    return now


def lane(recording: Recording, name: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.seconds) for span in recording.trace.spans if span.lane == name]


def test_time_is_cut(clock: list[float], tmp_path: Path) -> None:
    recording = Recording(tmp_path / "t.json", 100, None)
    recording.computing("outside of a phase")
    recording.begin(FORWARD)
    clock[0] = 1.0
    recording.computing("a")
    clock[0] = 4.0
    recording.waited("b", 3.0, 1.0)
    recording.computing("b")
    clock[0] = 6.0
    recording.computing("b")
    clock[0] = 7.0
    recording.end(FORWARD)
    clock[0] = 8.0
    recording.begin(BACKWARD)
    recording.begin(BACKWARD)
    recording.computing("b")
    clock[0] = 10.0
    recording.updated(9.0)
    clock[0] = 12.0
    recording.begin(STEP)
    clock[0] = 13.0
    recording.end(BACKWARD)  # has ended already
    recording.end(STEP)
    assert lane(recording, "phase") == [("forward", 0.0, 7.0), ("backward", 8.0, 4.0), ("step", 12.0, 1.0)]
    assert lane(recording, "compute") == [("a", 1.0, 2.0), ("b", 4.0, 3.0), ("b", 8.0, 1.0), ("b", 10.0, 2.0)]
    assert lane(recording, "wait") == [("b", 3.0, 1.0)]


def test_a_wait_inside_of_an_update_is_not_computation(clock: list[float], tmp_path: Path) -> None:
    recording = Recording(tmp_path / "t.json", 100, None)
    recording.begin(STEP)
    recording.computing("a")
    clock[0] = 5.0
    recording.waited("room", 2.0, 1.0)
    recording.updated(1.0)
    clock[0] = 6.0
    recording.end(STEP)
    assert lane(recording, "compute") == [("a", 0.0, 2.0), ("a", 5.0, 1.0)]


def test_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Recording(tmp_path / "t.json", 100, None).write()
    Recording(tmp_path / "t.json", 100, 3).write()
    Recording(tmp_path / "plain", 100, 0).write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.rank0", "t.json", "t.rank3.json"]
    assert traces.read(tmp_path / "t.json").budgets == {"RAM": 100}
    gone = Recording(tmp_path / "no" / "t.json", 100, None)
    with pytest.raises(ConfigError, match=r"trace: .* cannot be written: No such file"):
        gone.write()
    with caplog.at_level(logging.ERROR):
        gone.close()
    assert "cannot be written" in caplog.text


def test_a_forked_child_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(tmp_path / "t.json", 100, None)
    monkeypatch.setattr(recordings.os, "getpid", lambda: -1)
    recording.write()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_it_is_bounded(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "t.json", 100, None)
    for number in range(recordings.MAX_EVENTS + 5):
        recording.trace.span("x", Category.UPDATE, "update", float(number), 0.5)
    assert recording.trace.num_dropped == 5
    assert next(recording.trace.spans) == Span("x", Category.UPDATE, "update", 5.0, 0.5)
