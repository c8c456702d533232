"""A block: its sizes, its state, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.block_bench import PAGE, BlockBench

from zero_infinity.errors import UsageError
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import BlockStay, Residence


def test_a_block_is_shown_with_its_stays(bench: Callable[..., BlockBench]) -> None:
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


def test_sizes_are_rounded_to_pages_and_to_blocks_of_the_drive(bench: Callable[..., BlockBench]) -> None:
    block = bench(4).store.create("a", PAGE + 1, Home.NVME)
    assert (block.num_bytes, block.held_bytes, block.stored_bytes) == (PAGE + 1, 2 * PAGE, 2 * PAGE)


def test_residence_idleness_and_leases_follow_the_current_stay(bench: Callable[..., BlockBench]) -> None:
    b = bench(2)
    block = b.block("a", 1)
    assert (block.residence, block.is_idle, block.leased) == (Residence.ABSENT, False, False)
    with pytest.raises(UsageError, match=r"'a' is not in memory \(it is absent\)"):
        block.present_buffer()
    b.gate.clear()
    b.store.fetch(block)
    assert (block.residence, block.is_idle) == (Residence.READING, False)
    b.gate.set()
    b.store.wait(block)
    lease = b.store.lease(block)
    assert (block.residence, block.is_idle, block.leased) == (Residence.PRESENT, True, True)
    assert block.present_buffer().view[0] == 1
    del lease
    assert not block.leased


def test_a_stay_begins_queued_unused_and_without_memory() -> None:
    stay = BlockStay()
    assert stay.residence is Residence.QUEUED
    assert (stay.buffer, stay.request, stay.num_uses, stay.evicting) == (None, None, 0, False)
