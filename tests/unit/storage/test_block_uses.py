"""The order of the uses of a block: as pure rules, and through the store."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.block_bench import PAGE, BlockBench, filled, in_thread, room
from support.blocks import read_block, write_block
from support.patience import SECONDS, wait_until

from zero_infinity.errors import UsageError
from zero_infinity.storage.block import BlockStay, BlockUses, Residence, UseKind

CHANGE, READ = UseKind.CHANGE, UseKind.READ


def test_changes_are_due_one_at_a_time_in_the_order_of_their_requests() -> None:
    uses, stay = BlockUses(), BlockStay()
    first, second = uses.begin(CHANGE, stay), uses.begin(CHANGE, stay, claimed=True)
    assert (uses.is_due(first), uses.is_due(second)) == (True, False)
    assert uses.next_of(CHANGE) is first
    uses.end(first)
    assert uses.is_due(second)
    assert uses.next_of(CHANGE) is None  # claimed: it is nobody else's
    assert (len(uses), stay.num_uses) == (1, 1)


def test_reads_overlap_each_other_but_no_change() -> None:
    uses, stay = BlockUses(), BlockStay()
    reads = [uses.begin(READ, stay) for _ in range(2)]
    change, late = uses.begin(CHANGE, stay), uses.begin(READ, stay)
    assert [uses.is_due(use) for use in (*reads, change, late)] == [True, True, False, False]
    uses.end(reads[1])  # not in order
    assert not uses.is_due(change)
    uses.end(reads[0])
    assert (uses.is_due(change), uses.is_due(late)) == (True, False)
    uses.end(change)
    assert uses.is_due(late)


def test_a_content_expires_after_the_uses_before_it() -> None:
    uses, stay = BlockUses(), BlockStay()
    first = uses.begin(CHANGE, stay)
    uses.expire()
    second = uses.begin(READ, stay)
    assert not uses.pop_expired()
    assert not uses.is_due(second)
    uses.end(first)
    assert uses.pop_expired()
    assert not uses.pop_expired()
    assert uses.is_due(second)


def test_changes_are_found_by_stay_and_move_to_another_one() -> None:
    uses, old, new = BlockUses(), BlockStay(), BlockStay()
    uses.begin(READ, old)
    change = uses.begin(CHANGE, new)
    assert (uses.has_changes(), uses.has_changes(new), uses.has_changes(old)) == (True, True, False)
    uses.move(new, old)
    assert (old.num_uses, new.num_uses) == (2, 0)
    assert (change.stay, uses.has_changes(new), uses.has_changes(old)) == (old, False, True)


def test_holds_are_checked(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    with pytest.raises(UsageError, match="'a' is to be held, but it was not fetched"):
        b.store.hold(block)
    b.store.fetch(block)
    with pytest.raises(UsageError, match="'a' is released, but nobody holds it"):
        b.store.unhold(block, dirty=False)
    with pytest.raises(UsageError, match="was not held for one"), b.store.reading(block):
        pass


def test_a_reader_sees_the_changes_before_it_and_not_those_after(bench: Callable[..., BlockBench]) -> None:
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


def test_a_reader_keeps_the_block(bench: Callable[..., BlockBench]) -> None:
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


def test_expired_content_is_never_written(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.fetched("a")
    b.store.mark_dirty(block)
    b.store.expire(block)
    assert block.residence is Residence.ABSENT
    assert b.device.requests == []
    b.store.fetch(block)
    b.store.wait(block)
    assert b.device.requests == []


def test_expiry_of_an_absent_block(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    b.store.expire(block)
    assert not block.has_content
    with pytest.raises(UsageError, match="read before anything"):
        b.store.peek(block, 0, PAGE, room(3 * PAGE))


def test_expiry_waits_for_the_holds_before_it(bench: Callable[..., BlockBench]) -> None:
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
def test_what_is_written_after_an_expiry_lives(bench: Callable[..., BlockBench], waiters: bool) -> None:
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


def test_expiry_of_a_second_stay_that_is_cancelled(bench: Callable[..., BlockBench]) -> None:
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
