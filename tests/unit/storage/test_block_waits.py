"""Waiting for blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from support.block_bench import BlockBench, in_thread
from support.patience import SECONDS, wait_until

from zero_infinity.errors import EngineClosedError, UsageError


def test_what_was_not_fetched_is_not_waited_for(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    with pytest.raises(UsageError, match="'a' is waited for, but it was not fetched"):
        b.store.wait(block)
    with pytest.raises(UsageError, match="not in memory"):
        b.store.lease(block)
    with pytest.raises(UsageError, match="not in memory"):
        b.store.mark_dirty(block)


def test_wait_and_read_see_what_workers_have_still_to_change(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.fetch(block)
    b.store.hold(block)
    b.store.hold_to_read(block)

    def look() -> int:
        with b.store.reading(block) as memory:
            return int(memory[0])

    reader, read = in_thread(look)
    waiter, waited = in_thread(lambda: b.store.wait(block))
    with b.store.changing(block) as memory:
        memory.fill_(2)
        time.sleep(0.02)
        assert read == waited == []
    b.store.unhold(block, dirty=True)
    reader.join(SECONDS)
    waiter.join(SECONDS)
    assert read == [2]
    assert waited == [None]


def test_closing_wakes_those_who_wait(bench: Callable[..., BlockBench]) -> None:
    b = bench(1)
    b.fetched("a")
    queued = b.block("b")
    b.store.fetch(queued)
    thread, results = in_thread(lambda: b.store.wait(queued))
    time.sleep(0.01)
    b.store.close()
    b.store.close()
    thread.join(SECONDS)
    assert isinstance(results[0], EngineClosedError)
    with pytest.raises(EngineClosedError, match="store is closed"):
        b.store.fetch(queued)
    b.store.evict(queued)
    b.store.drop(queued)


def test_closing_while_io_is_in_flight(bench: Callable[..., BlockBench]) -> None:
    b = bench(4)
    made = [b.block(str(index), 1) for index in range(4)]
    b.gate.clear()
    for block in made:
        b.store.fetch(block)
    threads = [in_thread(lambda block=block: b.store.wait(block)) for block in made]
    closer, _ = in_thread(b.store.close)
    wait_until(lambda: b.store._monitor.error is not None)
    b.gate.set()
    closer.join(SECONDS)
    for thread, results in threads:
        thread.join(SECONDS)
        assert isinstance(results[0], EngineClosedError)
    assert b.pool.held_bytes == 0


def test_closing_waits_for_a_worker_that_uses_a_block(bench: Callable[..., BlockBench]) -> None:
    b = bench(1)
    block = b.fetched("a")
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with b.store.changing(block) as memory:
            inside.set()
            leave.wait(SECONDS)
            memory.fill_(2)  # its memory is still there

    worker, _ = in_thread(work)
    assert inside.wait(SECONDS)
    closer, closed = in_thread(b.store.close)
    time.sleep(0.05)
    assert closed == []
    leave.set()
    for thread in (worker, closer):
        thread.join(SECONDS)
    assert closed == [None]
