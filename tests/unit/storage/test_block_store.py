"""The life of blocks in a store: content, homes, looking at them, dropping them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.block_bench import PAGE, BlockBench, filled, in_thread, room
from support.blocks import flush_blocks, read_block, write_block
from support.patience import SECONDS

from zero_infinity.errors import UsageError
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Residence
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool


def test_what_is_written_comes_back_after_it_left_memory(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 7)
    assert block.residence is Residence.ABSENT
    assert b.pool.held_bytes == 0
    assert read_block(b.store, block).tolist() == [7] * PAGE
    counters = b.engine.counters()
    assert (b.num_reads(), b.num_writes(), counters.bytes_read) == (1, 1, PAGE)


def test_a_block_without_content_takes_room_and_reads_nothing(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.fetched("a")
    assert b.pool.held_bytes == PAGE
    b.store.evict(block)
    assert b.pool.held_bytes == 0
    assert b.device.requests == []
    with pytest.raises(UsageError, match="'a' is read before anything was written"):
        b.store.peek(block, 0, PAGE, room(3 * PAGE))


def test_a_block_that_lives_in_ram_stays_until_its_content_dies(bench: Callable[..., BlockBench]) -> None:
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


def test_a_ram_block_that_dies_twice_while_held_never_looks_for_a_home_elsewhere(
    bench: Callable[..., BlockBench],
) -> None:
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


def test_drop_gives_memory_and_home_back(bench: Callable[..., BlockBench]) -> None:
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


def test_drop_waits_for_the_write_in_flight(bench: Callable[..., BlockBench]) -> None:
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


def test_a_lease_survives_the_store(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    leased = read_block(b.store, b.block("a", 8))
    b.store.close()
    assert leased.tolist() == [8] * PAGE


def test_there_is_nothing_to_look_at_before_the_first_write(bench: Callable[..., BlockBench]) -> None:
    made = bench(2)
    block = made.store.create("empty", PAGE, Home.NVME)
    with pytest.raises(UsageError, match="is read before anything was written to it"):
        made.store.peek(block, 0, 10, room(3 * PAGE))
