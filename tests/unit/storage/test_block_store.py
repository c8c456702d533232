"""The block store: every rule of its docstring, one by one, over a device whose requests can be held back."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.blocks import flush_blocks, read_block, write_block

from zero_infinity.errors import CapacityError, CorruptionError, EngineClosedError, TransferError, UsageError
from zero_infinity.policy.memory_budget import Home
from zero_infinity.storage import deadlock
from zero_infinity.storage.block import Block
from zero_infinity.storage.block_stay import BlockStay, Residence
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.fake_device import FakeDevice, FakeFault, FakeRequest
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.striped_files import FileDevice

PAGE = 4096
SECONDS = 20  # far more than anything here takes: a hang fails instead of blocking


def filled(value: int, num_bytes: int = PAGE) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


class Bench:
    """A store of `pages` pages of memory, over a device whose requests wait while `gate` is closed."""

    def __init__(self, pages: int, *, verify: bool = False, faults: tuple[FakeFault, ...] = ()) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.device = FakeDevice(latency=self._hold, faults=faults)
        self.pool = BufferPool(pages * PAGE)
        self.engine = IOEngine(self.device, 2)
        self.store = BlockStore(self.pool, self.engine, verify=verify)

    def _hold(self, request: FakeRequest) -> float:
        self.gate.wait(SECONDS)
        return 0.0

    def block(self, name: str, value: int | None = None, pages: int = 1, home: Home = Home.NVME) -> Block:
        """A block; with a `value` it has that content, and is only at home."""
        block = self.store.create(name, pages * PAGE, home)
        if value is not None:
            write_block(self.store, block, filled(value, pages * PAGE))
            self.store.evict(block)
            if home is Home.NVME:
                wait_until(lambda: not block.stays)
        return block

    def fetched(self, name: str, value: int | None = None, pages: int = 1) -> Block:
        block = self.block(name, value, pages)
        self.store.fetch(block)
        self.store.wait(block)
        return block

    def directions(self) -> list[Direction]:
        return [request.direction for request in self.device.requests]

    def num_reads(self) -> int:
        """Blocks read so far: none here is larger than one request."""
        return self.directions().count(Direction.READ)

    def num_writes(self) -> int:
        return self.directions().count(Direction.WRITE)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*args: object, **options: object) -> Bench:
        made.append(Bench(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.gate.set()
        each.store.close()


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run it beside us; the list receives what it returned or raised."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# Content and home


def test_what_is_written_comes_back_after_it_left_memory(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 7)
    assert block.residence is Residence.ABSENT
    assert b.pool.held_bytes == 0
    assert read_block(b.store, block).tolist() == [7] * PAGE
    counters = b.engine.counters()
    assert (b.num_reads(), b.num_writes(), counters.bytes_read) == (1, 1, PAGE)


def test_a_block_without_content_takes_room_and_reads_nothing(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.fetched("a")
    assert b.pool.held_bytes == PAGE
    b.store.evict(block)
    assert b.pool.held_bytes == 0
    assert b.device.requests == []
    with pytest.raises(UsageError, match="'a' is read before anything was written"):
        b.store.peek(block, 0, PAGE, room(3 * PAGE))


def test_a_clean_block_is_not_written_again(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    read_block(b.store, block)
    b.store.evict(block)
    assert b.directions() == [Direction.WRITE, Direction.READ]


def test_write_back_keeps_the_block_in_memory(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.fetched("a")
    b.store.lease(block).fill_(3)
    b.store.mark_dirty(block)
    flush_blocks(b.store, block)
    assert b.store.ready(block)
    assert not block.dirty
    assert b.device.contents()[:PAGE] == bytes([3]) * PAGE
    flush_blocks(b.store, block)
    assert b.directions() == [Direction.WRITE]


def test_a_block_that_a_worker_still_changes_is_not_written_back(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.fetched("a", 1)
    b.store.mark_dirty(block)
    b.store.hold(block)
    flush_blocks(b.store, block)
    with b.store.changing(block) as memory:
        memory.fill_(9)
        flush_blocks(b.store, block)
    assert b.num_writes() == 1
    assert b.device.contents()[:PAGE] == bytes([1]) * PAGE
    b.store.unhold(block, dirty=True)
    flush_blocks(b.store, block)
    assert b.num_writes() == 2
    assert b.device.contents()[:PAGE] == bytes([9]) * PAGE


def test_a_block_that_lives_in_ram_stays_until_its_content_dies(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 5, home=Home.RAM)
    b.store.evict(block)
    flush_blocks(b.store, block)
    assert read_block(b.store, block).tolist() == [5] * PAGE
    assert b.device.requests == []
    b.store.expire(block)
    b.pool.collect()
    assert b.pool.held_bytes == 0
    assert not block.has_content


def test_a_ram_block_that_dies_twice_while_held_never_looks_for_a_home_elsewhere(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 5, home=Home.RAM)
    waiter = b.fetched("full")
    other = b.block("waiting")
    b.store.fetch(other)
    b.store.hold(block)
    b.store.expire(block)
    b.store.fetch(block)
    b.store.hold(block)
    b.store.expire(block)
    assert len(block.stays) == 2
    with b.store.changing(block):
        pass
    b.store.unhold(block, dirty=True)
    b.store.evict(waiter)
    with b.store.changing(block):
        pass
    b.store.unhold(block, dirty=True)
    assert not block.has_content
    assert not block.stays
    assert b.device.requests == []


def test_ram_blocks_need_no_engine() -> None:
    store = BlockStore(BufferPool(4 * PAGE))
    block = store.create("a", 10, Home.RAM)
    write_block(store, block, filled(1, 10))
    assert read_block(store, block).tolist() == [1] * 10
    with pytest.raises(UsageError, match="'b' needs a home on NVMe"):
        store.create("b", 10, Home.NVME)
    with pytest.raises(UsageError, match="at least one byte"):
        store.create("c", 0, Home.RAM)
    store.drop(block)
    store.close()


def test_drop_gives_memory_and_home_back(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    capacity = b.engine.capacity
    b.store.fetch(block)
    b.store.drop(block)
    assert b.pool.held_bytes == 0
    again = b.block("b", 2)
    assert b.engine.capacity == capacity
    assert again.offset == 0
    b.store.drop(block)  # a second time does nothing: the home is somebody else's now
    assert read_block(b.store, again).tolist() == [2] * PAGE


def test_drop_waits_for_the_write_in_flight(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a")
    b.gate.clear()
    write_block(b.store, block, filled(1))
    b.store.evict(block)
    thread, results = in_thread(lambda: b.store.drop(block))
    time.sleep(0.02)
    assert results == []
    assert block.offset == 0
    b.gate.set()
    thread.join(SECONDS)
    assert results == [None]
    assert block.offset is None


def test_reserved_space_is_used_first(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    b.store.reserve(3 * PAGE)
    assert b.engine.capacity == 3 * PAGE
    for name in "abc":
        b.block(name, 1)
    assert b.engine.capacity == 3 * PAGE


# Room


def test_room_is_granted_in_the_order_of_the_fetches(bench: Callable[..., Bench]) -> None:
    b = bench(3)
    first = b.fetched("first", pages=2)
    large, small = b.block("large", pages=3), b.block("small")
    b.store.fetch(large)
    b.store.fetch(small)  # would fit, but does not overtake
    assert [large.residence, small.residence] == [Residence.QUEUED] * 2
    b.store.evict(first)
    b.store.wait(large)
    assert small.residence is Residence.QUEUED
    b.store.evict(large)
    b.store.wait(small)


def test_a_queued_fetch_that_is_evicted_leaves_the_queue(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    b.fetched("first")
    large, small = b.block("large", pages=2), b.block("small")
    b.store.fetch(large)
    b.store.fetch(small)
    b.store.evict(large)
    b.store.wait(small)
    assert large.residence is Residence.ABSENT


def test_fetching_twice_is_fetching_once(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.fetch(block)
    b.store.fetch(block, Priority.DEMANDED)
    b.store.wait(block)
    b.store.fetch(block)
    assert b.pool.held_bytes == PAGE
    assert b.num_reads() == 1


def test_a_lease_keeps_the_memory_until_it_dies(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, other = b.block("a", 6), b.block("b")
    leased = read_block(b.store, block)[10:20]
    assert block.leased
    b.store.evict(block)
    assert not block.leased
    b.store.fetch(other)
    b.pool.collect()
    assert other.residence is Residence.QUEUED
    assert leased.tolist() == [6] * 10
    del leased
    b.store.wait(other)


# Eviction, deferred


def test_eviction_while_reading_takes_effect_after_the_read(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, other = b.block("a", 1), b.block("b")
    b.gate.clear()
    b.store.fetch(block)
    b.store.evict(block)
    b.store.fetch(other)
    assert (block.residence, other.residence) == (Residence.READING, Residence.QUEUED)
    b.gate.set()
    b.store.wait(other)
    assert block.residence is Residence.ABSENT


def test_eviction_of_a_dirty_block_takes_effect_after_the_write(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, other = b.block("a"), b.block("b")
    write_block(b.store, block, filled(2))
    b.gate.clear()
    b.store.evict(block)
    b.store.fetch(other)
    assert (block.residence, other.residence) == (Residence.PRESENT, Residence.QUEUED)
    b.gate.set()
    b.store.wait(other)
    b.store.evict(other)
    assert read_block(b.store, block).tolist() == [2] * PAGE


def test_eviction_of_a_held_block_waits_for_the_worker(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block = b.fetched("a")
    b.store.hold(block)
    b.store.hold(block)
    b.store.evict(block)
    for value in (1, 2):
        with b.store.changing(block) as memory:
            memory.fill_(value)
        assert block.residence is Residence.PRESENT
        b.store.unhold(block, dirty=True)
    wait_until(lambda: not block.stays)
    assert read_block(b.store, block).tolist() == [2] * PAGE


def test_a_worker_can_hold_what_is_still_queued(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    first, second = b.fetched("a"), b.block("b", None)
    b.store.fetch(second)
    b.store.hold(second)
    b.store.evict(second)  # stays in the queue: the worker needs it
    assert second.residence is Residence.QUEUED
    b.store.evict(first)
    with b.store.changing(second) as memory:
        memory.fill_(1)
    b.store.unhold(second, dirty=True)
    wait_until(lambda: not second.stays)
    assert read_block(b.store, second)[0] == 1


def test_a_visit_that_is_to_leave_at_once_is_not_read(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block = b.block("a", 1)
    reads = b.num_reads()
    granted = b.store._mover._granted

    def evicted_meanwhile(which: Block, stay: BlockStay, buffer: object) -> None:
        b.store.evict(which)  # as another thread may, between the pool's decision and its callback
        granted(which, stay, buffer)  # type: ignore[arg-type]

    b.store._mover._granted = evicted_meanwhile  # type: ignore[method-assign]
    b.store.fetch(block)
    assert block.residence is Residence.ABSENT
    assert b.num_reads() == reads
    assert b.pool.held_bytes == 0


# Fetched again before the eviction has happened


def test_fetched_again_with_nobody_waiting_the_eviction_is_forgotten(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.gate.clear()
    b.store.fetch(block)
    b.store.evict(block)
    b.store.fetch(block)
    b.gate.set()
    b.store.wait(block)
    assert len(block.stays) == 1
    assert b.num_reads() == 1


def test_fetched_again_with_a_waiter_the_block_goes_and_queues_for_another_visit(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, other = b.block("a", 1), b.block("b")
    b.gate.clear()
    b.store.fetch(block)
    b.store.evict(block)
    b.store.fetch(other)
    b.store.fetch(block)
    assert len(block.stays) == 2
    assert not b.store.ready(block)
    b.gate.set()
    b.store.wait(other)
    b.store.evict(other)
    b.store.wait(block)
    assert len(block.stays) == 1
    assert b.num_reads() == 2
    assert read_block(b.store, block)[0] == 1


def test_a_later_visit_whose_turn_comes_first_joins_the_present_one(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block, other, waiter = b.block("a", 1), b.fetched("b"), b.block("c")
    b.store.fetch(block)
    b.store.hold(block)
    b.store.evict(block)
    b.store.fetch(waiter)
    b.store.fetch(block)  # a second visit, behind the waiter
    b.store.hold(block)
    assert len(block.stays) == 2
    b.store.evict(other)
    b.store.wait(waiter)
    b.store.evict(waiter)  # its room goes to the second visit, which does not need it: the first is still here
    assert len(block.stays) == 1
    assert b.pool.held_bytes == PAGE
    for value in (1, 2):
        with b.store.changing(block) as memory:
            assert memory[0] == value
            memory.fill_(value + 1)
        b.store.unhold(block, dirty=True)
    b.store.wait(block)
    assert b.num_reads() == 1


def test_two_visits_whose_turns_are_told_in_the_wrong_order_join_all_the_same(bench: Callable[..., Bench]) -> None:
    b = bench(3)
    block, first, second = b.block("a", 1), b.fetched("b"), b.fetched("c")
    waiter = b.block("d")
    b.store.fetch(block)
    b.store.hold(block)
    b.store.evict(block)
    b.store.fetch(waiter)
    late: list[Callable[[], None]] = []
    granted = b.store._mover._granted
    b.store._mover._granted = lambda *args: late.append(lambda: granted(*args))  # type: ignore[method-assign, assignment]
    b.store.fetch(block)
    b.store.hold(block)
    b.store.evict(block)
    b.store.fetch(block)  # a third visit: this is the last word
    assert len(block.stays) == 3
    b.store.evict(first)  # its room goes to the waiter
    b.store.evict(second)
    assert len(late) == 2
    late.pop(0)()
    b.store.evict(waiter)
    assert len(late) == 2
    b.store._mover._granted = granted  # type: ignore[method-assign]
    late[1]()
    late[0]()
    assert len(block.stays) == 1
    for _ in range(2):
        b.store.unhold(block, dirty=False)
    b.store.wait(block)  # it stays


def test_a_worker_of_a_later_visit_waits_for_it(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, waiter = b.block("a", 1), b.block("b")
    b.gate.clear()
    b.store.fetch(block)
    b.store.evict(block)
    b.store.fetch(waiter)
    b.store.fetch(block)
    b.store.hold(block)

    def work() -> int:
        with b.store.changing(block) as memory:
            return int(memory[0])

    thread, results = in_thread(work)
    b.gate.set()
    b.store.wait(waiter)
    time.sleep(0.02)
    assert results == []
    b.store.evict(waiter)
    thread.join(SECONDS)
    assert results == [1]
    b.store.unhold(block, dirty=False)


def test_a_worker_that_gives_up_lets_go_of_its_own_visit(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, waiter = b.block("a", 1), b.block("b")
    b.gate.clear()
    b.store.fetch(block)
    b.store.evict(block)
    b.store.fetch(waiter)
    b.store.fetch(block)
    b.store.hold(block)
    b.store.unhold(block, dirty=False)  # without having waited
    b.gate.set()
    b.store.wait(waiter)
    b.store.evict(waiter)
    b.store.wait(block)


# Turns


def test_holds_are_checked(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    with pytest.raises(UsageError, match="'a' is to be held, but it was not fetched"):
        b.store.hold(block)
    b.store.fetch(block)
    with pytest.raises(UsageError, match="'a' is released, but nobody holds it"):
        b.store.unhold(block, dirty=False)
    with pytest.raises(UsageError, match="was not held for one"), b.store.reading(block):
        pass


def test_what_was_not_fetched_is_not_waited_for(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    with pytest.raises(UsageError, match="'a' is waited for, but it was not fetched"):
        b.store.wait(block)
    with pytest.raises(UsageError, match="not in memory"):
        b.store.lease(block)
    with pytest.raises(UsageError, match="not in memory"):
        b.store.mark_dirty(block)


def test_wait_and_read_see_what_workers_have_still_to_change(bench: Callable[..., Bench]) -> None:
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


def test_a_reader_sees_the_changes_before_it_and_not_those_after(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.fetch(block)
    b.store.hold(block)
    b.store.hold_to_read(block)
    b.store.hold(block)
    b.store.evict(block)
    seen: list[int] = []

    def change(value: int) -> None:
        with b.store.changing(block) as memory:
            memory.fill_(value)
        b.store.unhold(block, dirty=True)

    def read() -> None:
        with b.store.reading(block) as memory:
            time.sleep(0.02)
            seen.append(int(memory[0]))

    reader, _ = in_thread(read)
    change(2)
    worker, _ = in_thread(lambda: change(3))
    reader.join(SECONDS)
    worker.join(SECONDS)
    assert seen == [2]
    wait_until(lambda: not block.stays)
    assert read_block(b.store, block)[0] == 3


def test_a_reader_keeps_the_block(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, other = b.block("a", 1), b.block("b")
    b.store.fetch(block)
    b.store.hold_to_read(block)
    b.store.evict(block)
    b.store.fetch(other)
    with b.store.reading(block) as memory:
        assert memory[0] == 1
        assert other.residence is Residence.QUEUED
    b.store.wait(other)


# Expiry


def test_expired_content_is_never_written(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.fetched("a")
    b.store.mark_dirty(block)
    b.store.expire(block)
    assert block.residence is Residence.ABSENT
    assert b.device.requests == []
    b.store.fetch(block)
    b.store.wait(block)
    assert b.device.requests == []


def test_expiry_of_an_absent_block(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.expire(block)
    assert not block.has_content
    with pytest.raises(UsageError, match="read before anything"):
        b.store.peek(block, 0, PAGE, room(3 * PAGE))


def test_expiry_waits_for_the_holds_before_it(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.fetch(block)
    b.store.hold(block)
    b.store.expire(block)
    with b.store.changing(block) as memory:
        assert memory[0] == 1
    b.store.unhold(block, dirty=True)
    assert not block.has_content
    assert block.residence is Residence.ABSENT
    assert b.num_writes() == 1


@pytest.mark.parametrize("waiters", [False, True])
def test_what_is_written_after_an_expiry_lives(bench: Callable[..., Bench], waiters: bool) -> None:
    b = bench(2)
    block, full, waiter = b.block("a", 1), b.fetched("b"), b.block("c")
    b.store.fetch(block)
    b.store.hold(block)
    b.store.expire(block)
    if waiters:
        b.store.fetch(waiter)
    b.store.fetch(block)  # again, before the first worker is done, and for a second one
    b.store.hold(block)
    assert len(block.stays) == 1 + waiters
    b.store.unhold(block, dirty=True)
    assert not block.has_content
    b.store.evict(full)
    with b.store.changing(block) as memory:
        memory.fill_(2)
    b.store.unhold(block, dirty=True)
    b.store.wait(block)
    b.store.evict(block)
    b.store.evict(waiter)
    wait_until(lambda: not block.stays)
    assert read_block(b.store, block).tolist() == [2] * PAGE
    assert b.num_reads() == 2


def test_expiry_of_a_second_visit_that_is_taken_back(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block, waiter = b.block("a"), b.block("b")
    write_block(b.store, block, filled(1))
    b.gate.clear()
    b.store.evict(block)
    b.store.fetch(waiter)
    b.store.fetch(block)
    assert len(block.stays) == 2
    b.store.expire(block)
    assert len(block.stays) == 1
    b.gate.set()
    b.store.wait(waiter)
    assert not block.has_content


# Errors


@pytest.mark.parametrize("direction", list(Direction))
def test_an_io_error_reaches_the_thread_that_waits(bench: Callable[..., Bench], direction: Direction) -> None:
    fault = FakeFault(errno.EIO, direction=direction, offsets=range(PAGE, 2 * PAGE))
    b = bench(2, faults=(fault,))
    b.block("a", 1)
    block, other = b.block("b"), b.block("c")
    write_block(b.store, block, filled(1))
    b.store.evict(block)
    b.store.fetch(other)
    message = f"{direction.value} of 4.0 KiB at memory at 4096 failed"
    if direction is Direction.READ:
        wait_until(lambda: not block.stays)
        b.store.fetch(block)
    with pytest.raises(TransferError, match=message) as caught:
        b.store.wait(block) if direction is Direction.READ else b.store.settle()
    assert caught.value.errno == errno.EIO
    assert "memory at 4096" in str(caught.value.filename)
    for call in (b.store.fetch, b.store.wait, b.store.lease, b.store.write_back, lambda _: b.store.settle()):
        with pytest.raises(TransferError, match="memory at 4096"):
            call(other)
    with pytest.raises(TransferError, match="memory at 4096"):
        b.store.create("d", PAGE, Home.NVME)
    b.store.drop(other)  # giving things back goes on


def test_the_error_is_the_one_of_the_transfer_that_failed(bench: Callable[..., Bench]) -> None:
    """Those that were given up because of it hear first, and only that the engine has stopped."""
    b = bench(8, faults=(FakeFault(errno.ENOSPC, direction=Direction.WRITE),))
    made = [b.store.create(str(index), PAGE, Home.NVME) for index in range(6)]
    for block in made:
        write_block(b.store, block, filled(1))
    b.gate.clear()
    for block in made:
        b.store.evict(block)
    b.gate.set()
    with pytest.raises(TransferError) as caught:
        b.store.settle()
    assert caught.value.errno == errno.ENOSPC


def test_closing_wakes_those_who_wait(bench: Callable[..., Bench]) -> None:
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


def test_closing_while_io_is_in_flight(bench: Callable[..., Bench]) -> None:
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


def test_a_lease_survives_the_store(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    leased = read_block(b.store, b.block("a", 8))
    b.store.close()
    assert leased.tolist() == [8] * PAGE


def test_room_that_nothing_can_free_is_an_error_that_names_the_holders(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "STUCK_SECONDS", 0.05)
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


def test_a_worker_that_waits_with_a_block_in_its_hands_is_told_too(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what it waits for, and is inside `changing` of something else: neither will free anything."""
    monkeypatch.setattr(deadlock, "STUCK_WHILE_HELD_SECONDS", 0.05)
    b = bench(1)
    first, second = b.fetched("a"), b.block("b")
    b.store.hold(first)
    b.store.fetch(second)
    b.store.hold(second)
    with b.store.changing(first), pytest.raises(CapacityError, match="'b' needs"), b.store.changing(second):
        pass
    b.store.unhold(first, dirty=False)
    b.store.unhold(second, dirty=False)


def test_a_worker_that_computes_is_waited_for(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STUCK_SECONDS", "STUCK_WHILE_HELD_SECONDS"):
        monkeypatch.setattr(deadlock, name, 0.02)
    b = bench(1)
    first, second = b.fetched("a"), b.block("b")
    b.store.hold(first)
    b.store.evict(first)
    b.store.fetch(second)

    def work() -> None:
        with b.store.changing(first):
            time.sleep(0.2)
        b.store.unhold(first, dirty=True)

    thread, _ = in_thread(work)
    wait_until(lambda: bool(b.store._detector.threads_using()) or not first.stays)
    b.store.wait(second)
    thread.join(SECONDS)


# Verification


def test_a_flipped_bit_is_found(bench: Callable[..., Bench]) -> None:
    b = bench(2, verify=True)
    b.block("a", 1)
    block = b.block("layers.3.weight", 2)
    assert read_block(b.store, block)[0] == 2
    b.store.evict(block)
    b.device._data[PAGE + 77] ^= 16
    with pytest.raises(CorruptionError, match=r"'layers.3.weight' \(4.0 KiB\) came back changed from memory at 4096"):
        read_block(b.store, block)


def test_a_flipped_bit_in_a_file_is_found(tmp_path: Path) -> None:
    device = FileDevice(tmp_path)
    store = BlockStore(BufferPool(4 * PAGE), IOEngine(device), verify=True)
    other, block = (store.create(name, 2 * PAGE - 5, Home.NVME) for name in ("other", "it"))
    for each in (other, block):
        write_block(store, each, torch.arange(2 * PAGE - 5).to(torch.uint8))
        flush_blocks(store, each)
        store.evict(each)
    with Path(f"/proc/self/fd/{device.descriptors[0]}").open("r+b", buffering=0) as file:
        file.seek(2 * PAGE + 100)
        byte = file.read(1)
        file.seek(2 * PAGE + 100)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    assert read_block(store, other)[1] == 1
    store.evict(other)
    with pytest.raises(CorruptionError) as caught:
        read_block(store, block)
    message = str(caught.value)
    assert "'it'" in message
    assert f"{tmp_path}/(swap file) at {2 * PAGE}" in message
    store.close()


def test_bytes_past_the_end_of_a_block_are_not_verified(bench: Callable[..., Bench]) -> None:
    b = bench(2, verify=True)
    block = b.store.create("a", 100, Home.NVME)
    write_block(b.store, block, filled(1, 100))
    b.store.evict(block)
    wait_until(lambda: not block.stays)
    b.device._data[100] ^= 1
    assert read_block(b.store, block).tolist() == [1] * 100


def test_a_block_is_shown_with_its_visits(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    block = b.block("a", 1)
    assert repr(block) == "<Block a 4.0 KiB absent>"
    b.store.fetch(block)
    b.store.wait(block)
    b.store.hold(block)
    b.store.mark_dirty(block)
    b.store.evict(block)
    assert repr(block) == "<Block a 4.0 KiB* present- uses=1>"
    b.store.unhold(block, dirty=True)


# ---------------------------------------------------------------------- looking


def room(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def numbered(store: BlockStore, block: Block, first: int = 0) -> bytes:
    """Give the block a content in which no two neighbours are the same."""
    data = (torch.arange(block.num_bytes) + first).remainder(251).to(torch.uint8)
    write_block(store, block, data)
    return data.numpy().tobytes()


@pytest.mark.parametrize("span", [(0, 1), (5, 9000), (4096, 8192), (4095, 8193), (12000, 3 * PAGE), (0, 3 * PAGE)])
def test_a_look_finds_the_content_in_memory_and_at_home_and_moves_nothing(
    bench: Callable[..., Bench], span: tuple[int, int]
) -> None:
    made = bench(3)
    block = made.store.create("looked at", 3 * PAGE, Home.NVME)
    content = numbered(made.store, block)
    memory = room(5 * PAGE)
    assert bytes(made.store.peek(block, *span, memory)) == content[span[0] : span[1]]
    assert block.residence is Residence.PRESENT
    assert block.dirty
    made.store.evict(block)
    wait_until(lambda: not block.stays)
    other = made.fetched("other", 7, pages=3)  # all the memory that there is
    reads = made.directions().count(Direction.READ)
    assert bytes(made.store.peek(block, *span, memory)) == content[span[0] : span[1]]
    assert made.directions().count(Direction.READ) == reads + 1
    assert not block.stays
    assert other.residence is Residence.PRESENT


def test_a_look_at_what_is_on_its_way(bench: Callable[..., Bench]) -> None:
    made = bench(2)
    block = made.store.create("moving", PAGE, Home.NVME)
    content = numbered(made.store, block, first=3)
    made.gate.clear()
    made.store.evict(block)  # it is being written: what is in memory counts
    assert bytes(made.store.peek(block, 10, 20, room(3 * PAGE))) == content[10:20]
    made.gate.set()
    wait_until(lambda: not block.stays)
    made.gate.clear()
    made.store.fetch(block)  # it is being read: what is at home counts
    thread, found = in_thread(lambda: bytes(made.store.peek(block, 10, 20, room(3 * PAGE))))
    made.gate.set()
    thread.join(SECONDS)
    assert found == [content[10:20]]


def test_there_is_nothing_to_look_at_before_the_first_write(bench: Callable[..., Bench]) -> None:
    made = bench(2)
    block = made.store.create("empty", PAGE, Home.NVME)
    with pytest.raises(UsageError, match="is read before anything was written to it"):
        made.store.peek(block, 0, 10, room(3 * PAGE))


# ---------------------------------------------------------------------- guarded blocks


def page_room() -> memoryview:
    return memoryview(mmap.mmap(-1, 3 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@pytest.mark.parametrize("use", ["wait", "changing", "hold", "reading", "claim"])
def test_nobody_uses_a_guarded_block_before_it_is_let_go(use: str, bench: Callable[..., Bench]) -> None:
    made = bench(4)
    store, block = made.store, made.fetched("a", 1)
    store.begin_snapshot([block])
    done = threading.Event()

    def worker() -> None:
        if use == "wait":
            store.wait(block)
        elif use == "changing":
            with store.changing(block) as memory:
                memory.fill_(2)
        elif use == "hold":
            store.hold(block)
            with store.changing(block) as memory:
                memory.fill_(2)
            store.unhold(block, dirty=True)
        elif use == "reading":
            store.hold_to_read(block)
            with store.reading(block):
                pass
        else:
            with store.changing_claimed(block, store.claim(block)) as memory:
                memory.fill_(2)
        done.set()

    thread = threading.Thread(target=worker)
    thread.start()
    assert not done.wait(0.05)
    assert not store.ready(block)
    assert not store.changeable(block)
    assert bytes(store.peek(block, 0, PAGE, page_room())) == bytes([1]) * PAGE
    store.release_from_snapshot(block)
    thread.join(SECONDS)
    assert done.is_set()


def test_guarded_blocks_move_and_are_seen_wherever_they_are(bench: Callable[..., Bench]) -> None:
    made = bench(2)
    store = made.store
    dirty, other = made.block("dirty"), made.block("other", 5)
    write_block(store, dirty, filled(3))  # newer than its home
    store.begin_snapshot([dirty, other])
    assert bytes(store.peek(dirty, 0, PAGE, page_room())) == bytes([3]) * PAGE
    store.evict(dirty)
    wait_until(lambda: not dirty.stays)
    assert bytes(store.peek(dirty, 8, 16, page_room())) == bytes([3]) * 8
    assert bytes(store.peek(other, 0, PAGE, page_room())) == bytes([5]) * PAGE
    store.fetch(other)
    wait_until(lambda: other.residence is Residence.PRESENT)
    assert not store.ready(other)
    assert bytes(store.peek(other, 0, PAGE, page_room())) == bytes([5]) * PAGE


def test_what_somebody_waits_for_comes_first(bench: Callable[..., Bench]) -> None:
    made = bench(8)
    store = made.store
    several = [made.fetched(name, 1) for name in "abcd"]
    store.begin_snapshot(several)
    assert store.next_in_snapshot() is several[0]
    assert not store.ready(several[2])
    assert not store.changeable(several[3])
    assert not store.ready(several[0])  # it was given already
    assert [store.next_in_snapshot() for _ in range(4)] == [several[2], several[3], several[1], None]
    store.end_snapshot()
    assert all(store.ready(block) for block in several)


def test_a_wait_for_room_is_not_stuck_while_a_guard_is_to_go(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has a block in its hands, and waits for another that is guarded; somebody waits for room."""
    monkeypatch.setattr(deadlock, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(deadlock, "STUCK_WHILE_HELD_SECONDS", 0.3)
    made = bench(2)
    store = made.store
    third, first, second = made.block("third", 3), made.fetched("first", 1), made.fetched("second", 2)
    store.begin_snapshot([second])
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
    threading.Timer(0.8, store.release_from_snapshot, (second,)).start()
    store.wait(third)
    thread.join(SECONDS)
