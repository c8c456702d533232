"""Waits that nothing can end are errors; waits that something can end are not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.block_bench import BlockBench, in_thread
from support.blocks import read_block
from support.patience import SECONDS, wait_until

from zero_infinity.errors import CapacityError
from zero_infinity.storage import block_waits


def test_room_that_nothing_can_free_is_an_error_that_names_the_holders(
    bench: Callable[..., BlockBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_waits, "STUCK_SECONDS", 0.05)
    b = bench(3)
    b.fetched("the large one", pages=2)
    leased = read_block(b.store, b.block("the leased one", 1))
    block = b.block("a", pages=2)
    b.store.fetch(block)
    with pytest.raises(CapacityError) as caught:
        b.store.wait(block)
    message = str(caught.value)
    assert "block 'a' needs 8.0 KiB, but 0 B of 12.0 KiB are free" in message
    assert "held:  8.0 KiB by the large one" in message
    assert "held:  4.0 KiB by the leased one" in message
    del leased


def test_a_worker_that_waits_while_it_uses_a_block_is_told_too(
    bench: Callable[..., BlockBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what it waits for, and is inside `changing` of something else: neither will free anything."""
    monkeypatch.setattr(block_waits, "STUCK_WHILE_HELD_SECONDS", 0.05)
    b = bench(1)
    first, second = b.fetched("a"), b.block("b")
    b.store.hold(first)
    b.store.fetch(second)
    b.store.hold(second)
    with b.store.changing(first), pytest.raises(CapacityError, match="'b' needs"), b.store.changing(second):
        pass
    b.store.unhold(first, dirty=False)
    b.store.unhold(second, dirty=False)


class Clock:
    """The time that waits see: it stands still unless a test lets it run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.num_looks = 0
        monkeypatch.setattr(block_waits, "time", SimpleNamespace(monotonic=self.look))

    def look(self) -> float:
        self.num_looks += 1
        return self.now

    def run_past_patience(self) -> None:
        """Far more time than a wait is patient for, in steps that somebody who waits looks at."""
        for _ in range(10):
            self._wait_for_a_look()
            self.now += 1000.0
        self._wait_for_a_look()

    def _wait_for_a_look(self) -> None:
        looks = self.num_looks
        wait_until(lambda: self.num_looks > looks + 2)


def test_a_worker_that_computes_is_waited_for(
    bench: Callable[..., BlockBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    b = bench(1)
    first, second = b.fetched("a"), b.block("b")
    b.store.hold(first)
    b.store.evict(first)
    b.store.fetch(second)

    def work() -> None:
        with b.store.changing(first):
            clock.run_past_patience()
        b.store.unhold(first, dirty=True)

    thread, _ = in_thread(work)
    wait_until(lambda: any(b.store._waits._using.values()) or not first.stays)
    b.store.wait(second)
    thread.join(SECONDS)


def test_a_wait_for_room_is_not_stuck_during_a_snapshot(
    bench: Callable[..., BlockBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker uses a block and waits for another that is guarded; a third thread waits for room."""
    clock = Clock(monkeypatch)
    made = bench(2)
    store = made.store
    third, first, second = made.block("third", 3), made.fetched("first", 1), made.fetched("second", 2)
    store.snapshot.begin([second])
    for block in (first, second):
        store.hold(block)

    def worker() -> None:
        with store.changing(first), store.changing(second):
            pass
        for block in (first, second):
            store.unhold(block, dirty=False)

    thread = threading.Thread(target=worker)
    thread.start()
    store.evict(first)
    store.fetch(third)
    releasing, _ = in_thread(lambda: (clock.run_past_patience(), store.snapshot.release(second)))
    store.wait(third)
    releasing.join(SECONDS)
    thread.join(SECONDS)


def test_a_queued_block_is_stuck_only_while_nothing_can_free_room(bench: Callable[..., BlockBench]) -> None:
    b = bench(1)
    waits, busy, idle = b.store._waits, 1, 2
    b.fetched("holder")
    queued = b.block("queued")
    assert not waits._is_stuck(queued)  # it does not wait for room
    b.store.fetch(queued)
    assert waits._is_stuck(queued)
    waits._using[busy] += 1
    waits._waiting[idle] += 1
    assert not waits._is_stuck(queued)  # a thread works
    waits._waiting[busy] += 1
    assert waits._is_stuck(queued)  # it waits too
    waits._waiting[busy] -= 1
    waits._using[busy] -= 1
    assert waits._is_stuck(queued)
    assert waits._patience == block_waits.STUCK_SECONDS
    waits.count_holds(1)
    assert waits._patience == block_waits.STUCK_WHILE_HELD_SECONDS
