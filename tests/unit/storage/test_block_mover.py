"""Fetching and evicting: when an eviction takes effect, and a block that is fetched again before it did."""

from __future__ import annotations

import time
from collections.abc import Callable

from support.block_bench import PAGE, BlockBench, filled, in_thread
from support.blocks import flush_blocks, read_block, write_block
from support.patience import SECONDS, wait_until

from zero_infinity.storage.block import Block, BlockStay, Residence
from zero_infinity.storage.io_types import Direction, Priority


def test_a_clean_block_is_not_written_again(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    read_block(b.store, block)
    b.store.evict(block)
    assert b.directions() == [Direction.WRITE, Direction.READ]


def test_write_back_keeps_the_block_in_memory(bench: Callable[..., BlockBench]) -> None:
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


def test_a_block_that_a_worker_still_changes_is_not_written_back(bench: Callable[..., BlockBench]) -> None:
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


def test_room_is_granted_in_the_order_of_the_fetches(bench: Callable[..., BlockBench]) -> None:
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


def test_a_queued_fetch_that_is_evicted_leaves_the_queue(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    b.fetched("first")
    large, small = b.block("large", pages=2), b.block("small")
    b.store.fetch(large)
    b.store.fetch(small)
    b.store.evict(large)
    b.store.wait(small)
    assert large.residence is Residence.ABSENT


def test_fetching_twice_is_fetching_once(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.fetch(block)
    b.store.fetch(block, Priority.DEMANDED)
    b.store.wait(block)
    b.store.fetch(block)
    assert b.pool.held_bytes == PAGE
    assert b.num_reads() == 1


def test_a_lease_keeps_the_memory_until_it_dies(bench: Callable[..., BlockBench]) -> None:
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


def test_eviction_while_reading_takes_effect_after_the_read(bench: Callable[..., BlockBench]) -> None:
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


def test_eviction_of_a_dirty_block_takes_effect_after_the_write(bench: Callable[..., BlockBench]) -> None:
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


def test_eviction_of_a_held_block_waits_for_the_worker(bench: Callable[..., BlockBench]) -> None:
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


def test_a_worker_can_hold_what_is_still_queued(bench: Callable[..., BlockBench]) -> None:
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


def test_a_stay_that_is_to_end_at_once_is_not_read(bench: Callable[..., BlockBench]) -> None:
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


def test_fetched_again_with_nobody_waiting_the_eviction_is_forgotten(bench: Callable[..., BlockBench]) -> None:
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


def test_fetched_again_with_a_waiter_the_block_goes_and_queues_for_another_stay(
    bench: Callable[..., BlockBench],
) -> None:
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


def test_a_later_stay_that_is_granted_room_first_joins_the_current_one(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block, other, waiter = b.block("a", 1), b.fetched("b"), b.block("c")
    b.store.fetch(block)
    b.store.hold(block)
    b.store.evict(block)
    b.store.fetch(waiter)
    b.store.fetch(block)  # a second stay, behind the waiter
    b.store.hold(block)
    assert len(block.stays) == 2
    b.store.evict(other)
    b.store.wait(waiter)
    b.store.evict(waiter)  # its room goes to the second stay, which does not need it: the first is still here
    assert len(block.stays) == 1
    assert b.pool.held_bytes == PAGE
    for value in (1, 2):
        with b.store.changing(block) as memory:
            assert memory[0] == value
            memory.fill_(value + 1)
        b.store.unhold(block, dirty=True)
    b.store.wait(block)
    assert b.num_reads() == 1


def test_two_stays_whose_grants_are_reported_in_the_wrong_order_join_all_the_same(
    bench: Callable[..., BlockBench],
) -> None:
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
    b.store.fetch(block)  # a third stay: this is the last word
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


def test_a_worker_of_a_later_stay_waits_for_it(bench: Callable[..., BlockBench]) -> None:
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


def test_a_worker_that_gives_up_releases_its_own_stay(bench: Callable[..., BlockBench]) -> None:
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
