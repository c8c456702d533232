"""The computing thread's time is cut into computation and waits, without gaps and without counting anything twice."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from zero_infinity import run_trace as recordings
from zero_infinity import trace as traces
from zero_infinity.errors import ConfigError
from zero_infinity.run_trace import BACKWARD, FORWARD, STEP, RunTrace
from zero_infinity.trace import Category, TraceSpan


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(recordings.time, "perf_counter", lambda: now[0])
    return now


def lane(run_trace: RunTrace, name: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.seconds) for span in run_trace.trace.spans if span.lane == name]


def test_time_is_cut(clock: list[float], tmp_path: Path) -> None:
    run_trace = RunTrace(tmp_path / "t.json", 100, None)
    run_trace.computing("outside of a phase")
    run_trace.begin(FORWARD)
    clock[0] = 1.0
    run_trace.computing("a")
    clock[0] = 4.0
    run_trace.waited("b", 3.0, 1.0)
    run_trace.computing("b")
    clock[0] = 6.0
    run_trace.computing("b")
    clock[0] = 7.0
    run_trace.end(FORWARD)
    clock[0] = 8.0
    run_trace.begin(BACKWARD)
    run_trace.begin(BACKWARD)
    run_trace.computing("b")
    clock[0] = 10.0
    run_trace.updated(9.0)
    clock[0] = 12.0
    run_trace.begin(STEP)
    clock[0] = 13.0
    run_trace.end(BACKWARD)  # has ended already
    run_trace.end(STEP)
    assert lane(run_trace, "phase") == [("forward", 0.0, 7.0), ("backward", 8.0, 4.0), ("step", 12.0, 1.0)]
    assert lane(run_trace, "compute") == [("a", 1.0, 2.0), ("b", 4.0, 3.0), ("b", 8.0, 1.0), ("b", 10.0, 2.0)]
    assert lane(run_trace, "wait") == [("b", 3.0, 1.0)]


def test_a_wait_inside_of_an_update_is_not_computation(clock: list[float], tmp_path: Path) -> None:
    run_trace = RunTrace(tmp_path / "t.json", 100, None)
    run_trace.begin(STEP)
    run_trace.computing("a")
    clock[0] = 5.0
    run_trace.waited("room", 2.0, 1.0)
    run_trace.updated(1.0)
    clock[0] = 6.0
    run_trace.end(STEP)
    assert lane(run_trace, "compute") == [("a", 0.0, 2.0), ("a", 5.0, 1.0)]


def test_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RunTrace(tmp_path / "t.json", 100, None).write()
    RunTrace(tmp_path / "t.json", 100, 3).write()
    RunTrace(tmp_path / "plain", 100, 0).write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.rank0", "t.json", "t.rank3.json"]
    assert traces.read(tmp_path / "t.json").budgets == {"RAM": 100}
    gone = RunTrace(tmp_path / "no" / "t.json", 100, None)
    with pytest.raises(ConfigError, match=r"trace: .* cannot be written: No such file"):
        gone.write()
    with caplog.at_level(logging.ERROR):
        gone.close()
    assert "cannot be written" in caplog.text


def test_a_forked_child_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trace = RunTrace(tmp_path / "t.json", 100, None)
    monkeypatch.setattr(recordings.os, "getpid", lambda: -1)
    run_trace.write()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_it_is_bounded(tmp_path: Path) -> None:
    run_trace = RunTrace(tmp_path / "t.json", 100, None)
    for number in range(recordings.MAX_EVENTS + 5):
        run_trace.trace.span("x", Category.UPDATE, "update", float(number), 0.5)
    assert run_trace.trace.num_dropped == 5
    assert next(run_trace.trace.spans) == TraceSpan("x", Category.UPDATE, "update", 5.0, 0.5)
