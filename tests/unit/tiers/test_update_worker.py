"""Who runs updates, and when: without a store, with jobs that only count."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch
from support.patience import SECONDS, wait_until

from zero_infinity.errors import EngineClosedError
from zero_infinity.optim.state_records import Chunk
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers import update_worker as updaters
from zero_infinity.tiers.update_worker import UpdateWorker


class Store:
    """What the updater asks of a store."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def trim_heap_if_grown(self) -> None:
        """There is no heap."""

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


def test_the_worker_uses_as_many_cores_as_it_is_given() -> None:
    """One while the model computes beside it, and again afterwards."""
    found: list[int] = []

    class Asking(Job):
        def apply(self, _: Chunk, __: BlockStore) -> None:
            found.append(torch.get_num_threads())

    worker = UpdateWorker(cast("BlockStore", Store()))
    for num_threads in (3, 1, 2, 1):
        worker.submit(Asking([], "", num_chunks=2), is_shared=False, num_threads=num_threads)
    worker.drain()
    worker.close()
    assert found == [3, 3, 1, 1, 2, 2, 1, 1]


@pytest.fixture(autouse=True)
def _patient_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker never steps in because the computing thread is late, as it may be on a busy machine."""
    monkeypatch.setattr(updaters, "_PATIENCE_SECONDS", 1000.0)


class Ticks(threading.Condition):
    """A condition whose waits with a timeout end when the test says that the time is over."""

    ticks = threading.Semaphore(0)
    num_waits = 0  # with a timeout

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            return super().wait()
        Ticks.num_waits += 1
        self.release()
        assert Ticks.ticks.acquire(timeout=SECONDS)
        self.acquire()
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Ticks]:
    monkeypatch.setattr(Ticks, "ticks", threading.Semaphore(0))
    monkeypatch.setattr(Ticks, "num_waits", 0)
    monkeypatch.setattr(updaters.threading, "Condition", Ticks)
    return Ticks


@pytest.fixture
def log() -> list[tuple[str, bool]]:
    return []


class Worker(UpdateWorker):
    """Whose jobs are all shared with the computing thread, or none."""

    def __init__(self, *, shares_cores: bool) -> None:
        super().__init__(cast(BlockStore, Store()))
        self._shares_cores = shares_cores

    def submit(self, job: Any, *, is_shared: bool | None = None) -> None:
        super().submit(job, is_shared=self._shares_cores if is_shared is None else is_shared)


def make(*, shares_cores: bool) -> UpdateWorker:
    return Worker(shares_cores=shares_cores)


def wait_for_all(update_worker: UpdateWorker) -> None:
    wait_until(lambda: not update_worker.num_pending)


def test_the_computing_thread_runs_what_is_ready(log: list[tuple[str, bool]]) -> None:
    update_worker = make(shares_cores=True)
    update_worker.submit(Job(log, "a", num_chunks=3))
    assert log == [("a", True)] * 3
    late = Job(log, "late", is_ready=False)
    update_worker.submit(late)
    update_worker.submit(Job(log, "b"))
    assert len(log) == 3, "b comes after late"
    late.is_ready = True
    update_worker.help()
    assert log[3:] == [("late", True), ("b", True)]
    update_worker.close()


def test_with_cores_of_its_own_the_worker_runs_everything(log: list[tuple[str, bool]]) -> None:
    update_worker = make(shares_cores=False)
    for name in "abc":
        update_worker.submit(Job(log, name))
    update_worker.drain()
    assert log == [("a", False), ("b", False), ("c", False)]
    update_worker.close()


def test_the_worker_runs_all_that_is_left_when_nobody_comes_by(log: list[tuple[str, bool]], clock: type[Ticks]) -> None:
    """It is patient once, not before every chunk: those of a model that was dropped would keep it for minutes."""
    update_worker = make(shares_cores=True)
    for number in range(30):
        update_worker.submit(Job(log, str(number), is_ready=False))
    clock.ticks.release(2)  # the first may end a wait that began before the last visit
    wait_for_all(update_worker)
    assert log == [(str(number), False) for number in range(30)]
    update_worker.close()


def test_the_worker_takes_over_while_the_computing_thread_waits(
    log: list[tuple[str, bool]],
) -> None:
    update_worker = make(shares_cores=True)
    update_worker.submit(Job(log, "a", is_ready=False))
    update_worker.take_over()
    wait_for_all(update_worker)
    assert log == [("a", False)]
    update_worker.close()


def test_an_error_reaches_who_comes_next(log: list[tuple[str, bool]]) -> None:
    class Broken(Job):
        def apply(self, _: Chunk, __: BlockStore) -> None:
            raise ValueError("broken")

    update_worker = make(shares_cores=False)
    update_worker.submit(Broken(log, "a"))
    with pytest.raises(ValueError, match="broken"):
        update_worker.drain()
    with pytest.raises(ValueError, match="broken"):
        update_worker.submit(Job(log, "b"))
    update_worker.close()
    helped = make(shares_cores=True)
    with pytest.raises(ValueError, match="broken"):
        helped.submit(Broken(log, "a"))
    with pytest.raises(ValueError, match="broken"):
        helped.check()
    helped.close()
    assert log == []


def test_closing_drops_what_waits(log: list[tuple[str, bool]]) -> None:
    update_worker = make(shares_cores=True)
    update_worker.submit(Job(log, "a", is_ready=False))
    update_worker.close()
    update_worker.close()
    assert log == []
    with pytest.raises(EngineClosedError):
        update_worker.submit(Job(log, "b"))


def test_the_worker_leaves_it_to_the_computing_thread_once_that_is_back(
    log: list[tuple[str, bool]],
) -> None:
    update_worker = make(shares_cores=True)
    update_worker.submit(Job(log, "a", is_ready=False))
    update_worker.take_over()
    wait_for_all(update_worker)
    late = Job(log, "b", is_ready=False)
    update_worker.submit(late)
    time.sleep(0.1)
    late.is_ready = True
    update_worker.help()
    assert log == [("a", False), ("b", True)]
    update_worker.close()


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
    update_worker = make(shares_cores=True)
    try:
        for number in range(50):
            update_worker.submit(Job(log, str(number)))
        assert [is_main for _, is_main in log] == [True] * 50
        assert looks <= 2
    finally:
        update_worker.close()


def test_whoever_waits_is_told_that_it_was_closed_also_between_two_jobs(log: list[tuple[str, bool]]) -> None:
    update_worker = make(shares_cores=True)
    job = Job(log, "late", is_ready=False)
    update_worker._is_running = True  # somebody works all the time, so that the worker does not step in
    update_worker.submit(job)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            update_worker.drain()
        except EngineClosedError as error:
            found.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    update_worker.close()
    waiter.join(SECONDS)
    assert not waiter.is_alive()
    assert len(found) == 1
    assert log == []


def test_the_worker_stays_away_while_the_computing_thread_comes_by_in_vain(
    log: list[tuple[str, bool]], clock: type[Ticks]
) -> None:
    update_worker = make(shares_cores=True)
    try:
        update_worker.submit(Job(log, "late", is_ready=False))
        for number in range(1, 31):
            wait_until(lambda number=number: clock.num_waits >= number)  # it waits, and has seen the visits so far
            update_worker.help()
            clock.ticks.release()
        assert log == []
        clock.ticks.release(2)
        update_worker.drain()
        assert log == [("late", False)]
    finally:
        update_worker.close()
