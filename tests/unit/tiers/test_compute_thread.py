"""The computing thread and the update worker: who runs an update, and what counts as waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.patience import wait_until

from zero_infinity.optim.state_records import Chunk
from zero_infinity.run_trace import RunTrace
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers import compute_thread as compute_threads
from zero_infinity.tiers import update_worker as update_workers
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.update_worker import UpdateWorker
from zero_infinity.trace import Category


class Store:
    """What an update worker asks of a store."""

    def trim_heap_if_grown(self) -> None:
        """There is no heap."""

    def changeable(self, _: object) -> bool:
        return True

    def fail(self, _: BaseException) -> None:
        """Nobody waits for a block."""


class Job:
    """One chunk, which notes the thread that runs it."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self.chunks = cast("list[Chunk]", [0])
        self.is_ready = False
        self._threads = threads

    def blocks(self, _: Chunk) -> list[Any]:
        return []

    def apply(self, _: Chunk, __: BlockStore) -> None:
        self._threads.append(threading.current_thread())

    def finish(self, _: BlockStore) -> None:
        """Nothing is left to do."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[UpdateWorker]:
    """Never steps in on its own."""
    monkeypatch.setattr(update_workers, "_PATIENCE_SECONDS", 1000.0)
    made = UpdateWorker(cast(BlockStore, Store()))
    yield made
    made.close()


def script_clock(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    monkeypatch.setattr(compute_threads, "time", SimpleNamespace(perf_counter=iter(times).__next__))


def test_passing_by_runs_the_updates_that_are_ready(worker: UpdateWorker) -> None:
    ran: list[threading.Thread] = []
    thread, job = ComputeThread(worker, None), Job(ran)
    worker.submit(job, is_shared=True)
    thread.pass_by()
    assert ran == []
    job.is_ready = True
    thread.pass_by()
    assert ran == [threading.current_thread()]


def test_the_worker_takes_over_while_the_thread_waits(worker: UpdateWorker) -> None:
    ran: list[threading.Thread] = []
    thread = ComputeThread(worker, None)
    worker.submit(Job(ran), is_shared=True)
    with thread.waiting("a"):
        wait_until(lambda: not worker.num_pending)
    assert len(ran) == 1
    assert ran[0] is not threading.current_thread()


def test_waits_add_up(worker: UpdateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = ComputeThread(worker, None)
    script_clock(monkeypatch, 10.0, 10.5, 20.0, 22.0)
    for name in "ab":
        with thread.waiting(name):
            pass
    assert thread.waited_seconds == 2.5


def test_a_trace_shows_what_was_waited_for(
    worker: UpdateWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = RunTrace(tmp_path / "trace.json", 1, None)
    thread = ComputeThread(worker, trace)
    script_clock(monkeypatch, 10.0, 10.5)
    with thread.waiting("layer.3"):
        pass
    spans = [span for span in trace.trace.spans if span.category is Category.WAIT]
    assert [(span.name, span.start, span.seconds) for span in spans] == [("layer.3", 10.0, 0.5)]


def test_a_wait_that_ends_in_an_error_counts() -> None:
    thread = ComputeThread(cast(UpdateWorker, SimpleNamespace(take_over=lambda: None)), None)
    with pytest.raises(InterruptedError), thread.waiting("a block"):
        raise InterruptedError
    assert thread.waited_seconds > 0
