"""Who runs updates, and when: without a store, with jobs that only count."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from zero_infinity.errors import EngineClosedError
from zero_infinity.runtime import updater as updaters
from zero_infinity.runtime.record import Chunk
from zero_infinity.runtime.updater import Updater
from zero_infinity.store.blocks import BlockStore

SECONDS = 20.0


class Heap:
    def look(self) -> None:
        """Nothing to see."""


class Store:
    """What the updater asks of a store."""

    heap = Heap()

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def changeable(self, _: object) -> bool:
        return True

    def fail(self, error: BaseException) -> None:
        self.error = error


class Job:
    def __init__(self, log: list[tuple[str, bool]], name: str, *, num_chunks: int = 1, is_ready: bool = True) -> None:
        self.log, self.name, self.is_ready = log, name, is_ready
        self.chunks = cast("list[Chunk]", list(range(num_chunks)))

    def blocks(self, _: Chunk) -> list[Any]:
        return []

    def apply(self, _: Chunk, __: BlockStore) -> None:
        self.log.append((self.name, threading.current_thread() is threading.main_thread()))

    def finish(self, _: BlockStore) -> None:
        """Nothing is left to do."""


@pytest.fixture
def log() -> list[tuple[str, bool]]:
    return []


def make(*, shares_cores: bool) -> Updater:
    return Updater(cast(BlockStore, Store()), shares_cores=shares_cores)


def wait_for_all(updater: Updater) -> None:
    deadline = time.monotonic() + SECONDS
    while updater.num_pending:
        assert time.monotonic() < deadline, f"{updater.num_pending} jobs are left"
        time.sleep(0.001)


def test_the_computing_thread_runs_what_is_ready(log: list[tuple[str, bool]]) -> None:
    updater = make(shares_cores=True)
    updater.submit(Job(log, "a", num_chunks=3))
    assert log == [("a", True)] * 3
    late = Job(log, "late", is_ready=False)
    updater.submit(late)
    updater.submit(Job(log, "b"))
    assert len(log) == 3, "b comes after late"
    late.is_ready = True
    updater.help()
    assert log[3:] == [("late", True), ("b", True)]
    updater.close()


def test_with_cores_of_its_own_the_worker_runs_everything(log: list[tuple[str, bool]]) -> None:
    updater = make(shares_cores=False)
    for name in "abc":
        updater.submit(Job(log, name))
    updater.drain()
    assert log == [("a", False), ("b", False), ("c", False)]
    updater.close()


def test_the_worker_runs_all_that_is_left_when_nobody_comes_by(
    log: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is patient once, not before every chunk: those of a model that was dropped would keep it for minutes."""
    monkeypatch.setattr(updaters, "_PATIENCE_SECONDS", SECONDS / 10)
    updater = make(shares_cores=True)
    for number in range(30):
        updater.submit(Job(log, str(number), is_ready=False))
    wait_for_all(updater)
    assert log == [(str(number), False) for number in range(30)]
    updater.close()


def test_the_worker_takes_over_while_the_computing_thread_waits(
    log: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updaters, "_PATIENCE_SECONDS", 1000.0)
    updater = make(shares_cores=True)
    updater.submit(Job(log, "a", is_ready=False))
    updater.take_over()
    wait_for_all(updater)
    assert log == [("a", False)]
    updater.close()


def test_an_error_reaches_who_comes_next(log: list[tuple[str, bool]]) -> None:
    class Broken(Job):
        def apply(self, _: Chunk, __: BlockStore) -> None:
            raise ValueError("broken")

    updater = make(shares_cores=False)
    updater.submit(Broken(log, "a"))
    with pytest.raises(ValueError, match="broken"):
        updater.drain()
    with pytest.raises(ValueError, match="broken"):
        updater.submit(Job(log, "b"))
    updater.close()
    helped = make(shares_cores=True)
    with pytest.raises(ValueError, match="broken"):
        helped.submit(Broken(log, "a"))
    with pytest.raises(ValueError, match="broken"):
        helped.check()
    helped.close()
    assert log == []


def test_closing_drops_what_waits(log: list[tuple[str, bool]]) -> None:
    updater = make(shares_cores=True)
    updater.submit(Job(log, "a", is_ready=False))
    updater.close()
    updater.close()
    assert log == []
    with pytest.raises(EngineClosedError):
        updater.submit(Job(log, "b"))


def test_the_worker_leaves_it_to_the_computing_thread_once_that_is_back(
    log: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updaters, "_PATIENCE_SECONDS", 1000.0)
    updater = make(shares_cores=True)
    updater.submit(Job(log, "a", is_ready=False))
    updater.take_over()
    wait_for_all(updater)
    late = Job(log, "b", is_ready=False)
    updater.submit(late)
    time.sleep(0.1)
    late.is_ready = True
    updater.help()
    assert log == [("a", False), ("b", True)]
    updater.close()


def test_the_worker_sleeps_while_the_computing_thread_does_it_all(
    log: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    class Calls(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal looks
            looks += 1
            return super().wait(timeout)

    monkeypatch.setattr(updaters.threading, "Condition", Calls)
    updater = make(shares_cores=True)
    try:
        for number in range(50):
            updater.submit(Job(log, str(number)))
        assert [is_main for _, is_main in log] == [True] * 50
        assert looks <= 2
    finally:
        updater.close()


def test_whoever_waits_is_told_that_it_was_closed_also_between_two_jobs(log: list[tuple[str, bool]]) -> None:
    updater = make(shares_cores=True)
    job = Job(log, "late", is_ready=False)
    updater._is_running = True  # somebody works all the time, so that the worker does not step in
    updater.submit(job)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            updater.drain()
        except EngineClosedError as error:
            found.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    updater.close()
    waiter.join(SECONDS)
    assert not waiter.is_alive()
    assert len(found) == 1
    assert log == []


def test_the_worker_stays_away_while_the_computing_thread_comes_by_in_vain(
    log: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updaters, "_PATIENCE_SECONDS", 0.2)
    updater = make(shares_cores=True)
    try:
        updater.submit(Job(log, "late", is_ready=False))
        for _ in range(30):
            time.sleep(0.02)
            updater.help()
        assert log == []
        updater.drain()
        assert log == [("late", False)]
    finally:
        updater.close()
