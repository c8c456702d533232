"""Blocks of a background save: nobody uses one before it was saved."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.block_bench import PAGE, BlockBench, filled, room
from support.blocks import write_block
from support.patience import SECONDS, wait_until

from zero_infinity.storage.block import Residence
from zero_infinity.storage.snapshot_guard import SnapshotGuard
from zero_infinity.storage.store_monitor import StoreMonitor


@pytest.mark.parametrize("use", ["wait", "changing", "hold", "reading", "claim"])
def test_nobody_uses_a_guarded_block_before_it_is_released(use: str, bench: Callable[..., BlockBench]) -> None:
    made = bench(4)
    store, block = made.store, made.fetched("a", 1)
    store.snapshot.begin([block])
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
    assert bytes(store.peek(block, 0, PAGE, room(3 * PAGE))) == bytes([1]) * PAGE
    store.snapshot.release(block)
    thread.join(SECONDS)
    assert done.is_set()


def test_guarded_blocks_move_and_are_seen_wherever_they_are(bench: Callable[..., BlockBench]) -> None:
    made = bench(2)
    store = made.store
    dirty, other = made.block("dirty"), made.block("other", 5)
    write_block(store, dirty, filled(3))  # newer than its home
    store.snapshot.begin([dirty, other])
    assert bytes(store.peek(dirty, 0, PAGE, room(3 * PAGE))) == bytes([3]) * PAGE
    store.evict(dirty)
    wait_until(lambda: not dirty.stays)
    assert bytes(store.peek(dirty, 8, 16, room(3 * PAGE))) == bytes([3]) * 8
    assert bytes(store.peek(other, 0, PAGE, room(3 * PAGE))) == bytes([5]) * PAGE
    store.fetch(other)
    wait_until(lambda: other.residence is Residence.PRESENT)
    assert not store.ready(other)
    assert bytes(store.peek(other, 0, PAGE, room(3 * PAGE))) == bytes([5]) * PAGE


def test_what_somebody_waits_for_is_saved_first(bench: Callable[..., BlockBench]) -> None:
    made = bench(8)
    store = made.store
    several = [made.fetched(name, 1) for name in "abcd"]
    store.snapshot.begin(several)
    assert store.snapshot.next_block() is several[0]
    assert not store.ready(several[2])
    assert not store.changeable(several[3])
    assert not store.ready(several[0])  # it was given already
    assert [store.snapshot.next_block() for _ in range(4)] == [several[2], several[3], several[1], None]
    store.snapshot.end()
    assert all(store.ready(block) for block in several)


def test_a_guard_is_active_until_its_last_block_is_released(bench: Callable[..., BlockBench]) -> None:
    blocks = [bench(2).block(name) for name in "ab"]
    guard = SnapshotGuard(StoreMonitor())
    assert not guard.is_active
    guard.begin(blocks)
    for block in blocks:
        assert guard.is_active
        assert guard.refuses(block)
        guard.release(block)
        assert not guard.refuses(block)
    assert not guard.is_active
    assert [guard.next_block() for _ in range(2)] == [blocks[0], blocks[1]]
