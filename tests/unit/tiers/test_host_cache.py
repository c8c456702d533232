"""Host memory over NVMe: blocks that come, are changed, and leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from support.block_bench import PAGE, BlockBench, wait_until

from zero_infinity.errors import CapacityError
from zero_infinity.policy.cache_policy import CachePolicy
from zero_infinity.policy.homes import Home
from zero_infinity.storage.block import Residence
from zero_infinity.storage.io_types import Priority
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.host_cache import HostCache, HostMover


class Waits:
    """A computing thread without updates."""

    @contextmanager
    def waiting(self, _: str) -> Iterator[None]:
        yield


class Bench(BlockBench):
    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.cache = HostCache(self.store, cast(ComputeThread, Waits()), CachePolicy, pages * PAGE, 0)


@pytest.fixture
def b() -> Iterator[Bench]:
    bench = Bench(2)
    yield bench
    bench.gate.set()
    bench.store.close()


def test_what_is_read_is_not_written_home_again(b: Bench) -> None:
    block = b.block("a", 7)
    b.cache.add(block)
    num_writes = b.num_writes()
    with b.cache.reading(block) as memory:
        assert memory.tolist() == [7] * PAGE
        del memory
    assert not block.dirty
    b.cache.drop(block)
    wait_until(lambda: not block.stays)
    assert b.num_writes() == num_writes


def test_what_is_written_is_dirty_afterwards_and_gets_home(b: Bench) -> None:
    block = b.block("a", 7)
    b.cache.add(block)
    with b.cache.writing(block) as memory:
        assert not block.dirty
        assert b.cache.is_pinned(block)
        memory.fill_(8)
        del memory
    assert block.dirty
    assert not b.cache.is_pinned(block)
    b.cache.drop(block)
    wait_until(lambda: not block.stays)
    assert b.device.contents()[:PAGE] == bytes([8]) * PAGE
    with b.cache.reading(block) as memory:
        assert memory.tolist() == [8] * PAGE


def test_a_block_at_home_in_memory_is_resident(b: Bench) -> None:
    resident = b.block("resident", home=Home.RAM)
    block = b.block("a", 1)
    for one in (resident, block):
        b.cache.add(one)
    with b.cache.writing(resident) as memory:
        memory.fill_(3)
        del memory
    b.cache.bring(block)
    assert b.cache.policy.cached_bytes == PAGE, "of the other one"
    b.cache.drop_unpinned()
    assert resident.residence is Residence.PRESENT
    wait_until(lambda: not block.stays)


def test_the_mover_fetches_what_is_used_now_first(b: Bench) -> None:
    mover = HostMover(b.store)
    ahead, now = b.block("ahead", 1), b.block("now", 2)
    b.gate.clear()
    mover.fetch(ahead, ahead=True)
    mover.fetch(now, ahead=False)
    assert (ahead.priority, now.priority) == (Priority.PREFETCH, Priority.DEMANDED)
    assert not mover.is_ready(now)
    b.gate.set()
    mover.wait(now)
    assert mover.is_ready(now)


def test_the_mover_sees_leases(b: Bench) -> None:
    mover, block = HostMover(b.store), b.fetched("a", 1)
    assert not mover.is_leased(block)
    tensor = b.store.lease(block)
    assert mover.is_leased(block)
    del tensor
    assert not mover.is_leased(block)


def test_the_error_names_what_holds_the_memory_and_how_much_would_do(b: Bench) -> None:
    blocks = [b.block(name, 1) for name in "abc"]
    for block in blocks:
        b.cache.add(block)
    for block in blocks[:2]:
        b.cache.bring(block)
        b.cache.pin(block)
    with pytest.raises(CapacityError) as caught:
        b.cache.bring(blocks[2])
    assert str(caught.value).splitlines()[:3] == [
        "'c' needs 4.0 KiB now, but everything in the 8.0 KiB for blocks is in use",
        "  held:  4.0 KiB by 'a', in use",
        "  held:  4.0 KiB by 'b', in use",
    ]
    assert 'fix:   memory="1MiB" or more' in str(caught.value)


def test_what_has_expired_is_forgotten_and_not_written(b: Bench) -> None:
    block = b.block("a", 7)
    b.cache.add(block)
    with b.cache.writing(block) as memory:
        memory.fill_(8)
        del memory
    num_writes = b.num_writes()
    b.cache.expire(block)
    assert b.cache.policy.cached_bytes == 0
    assert not block.has_content
    wait_until(lambda: not block.stays)
    assert b.num_writes() == num_writes


def test_a_removed_block_gives_its_home_back(b: Bench) -> None:
    block = b.block("a", 7)
    offset = block.offset
    b.cache.add(block)
    b.cache.bring(block)
    b.cache.remove(block)
    assert b.cache.policy.cached_bytes == 0
    assert b.block("b").offset == offset
