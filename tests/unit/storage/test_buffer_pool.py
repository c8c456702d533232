"""The buffer pool: budget, accounting, threads, fork, close."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.forkserver import in_own_process
from support.patience import SECONDS

from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.storage import arena
from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.pages import PAGE_BYTES
from zero_infinity.storage.pinning import Pinning

MIB = 1 << 20


PAGE = PAGE_BYTES


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(16 * PAGE)
    yield pool
    pool.close()


def test_bytes_are_counted_in_whole_pages(pool: BufferPool) -> None:
    buffer = pool.take(PAGE + 1)
    assert (buffer.num_bytes, buffer.requested_bytes, len(buffer.view), buffer.tensor().numel()) == (
        2 * PAGE,
        PAGE + 1,
        2 * PAGE,
        PAGE + 1,
    )
    assert buffer.address % PAGE == 0
    assert (pool.held_bytes, pool.free_bytes) == (2 * PAGE, 14 * PAGE)
    buffer.release()
    pool.collect()
    assert (pool.held_bytes, pool.free_bytes, pool.peak_bytes) == (0, 16 * PAGE, 2 * PAGE)


def test_what_can_never_fit_is_refused_with_both_numbers(pool: BufferPool) -> None:
    for call in (pool.take, pool.try_take, pool.charge, lambda n: pool.request(n, lambda _: None)):
        with pytest.raises(CapacityError, match=r"memory: 65,537 bytes .*65,536 bytes"):
            call(16 * PAGE + 1)
    assert pool.num_waiting == 0


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_nothing_cannot_be_taken(pool: BufferPool, num_bytes: int) -> None:
    with pytest.raises(UsageError, match="the minimum is 1"):
        pool.take(num_bytes)


def test_charges_count_against_the_budget_and_add_up(pool: BufferPool) -> None:
    pool.charge(0)  # an empty gradient
    assert pool.try_charge(100)
    assert pool.try_charge(2 * PAGE)
    assert pool.held_bytes == 2 * PAGE + 100
    assert pool.try_take(14 * PAGE) is None
    pool.discharge(2 * PAGE + 100)
    with pytest.raises(UsageError, match="cannot discharge 1 of 0"):
        pool.discharge(1)
    pool.take(16 * PAGE)
    assert not pool.try_charge(1)


def test_a_charge_unmaps_free_memory_so_that_the_process_stays_within_the_budget() -> None:
    pool = BufferPool(16 * MIB)
    pool.take(16 * MIB).release()
    assert pool.mapped_bytes == 16 * MIB
    pool.charge(5 * MIB)
    assert pool.mapped_bytes <= 11 * MIB
    pool.close()


def test_holders_are_named_by_their_labels(pool: BufferPool) -> None:
    pool.take(10 * PAGE).label = "block 3"
    pool.charge(5)
    assert pool.holders() == [("block 3", 10 * PAGE)]
    pool.take(5 * PAGE)
    assert pool.holders() == [("block 3", 10 * PAGE), ("unnamed", 5 * PAGE)]


def held_after(pool: BufferPool) -> int:
    pool.collect()
    return pool.held_bytes


def test_a_steady_state_calls_neither_mmap_nor_munmap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("map_pages", "unmap_pages"):
        real = getattr(arena, name)
        monkeypatch.setattr(arena, name, lambda *args, real=real: (calls.append(""), real(*args))[1])
    pool = BufferPool(64 * MIB)

    def step() -> None:
        live: list[Buffer] = []
        for num_bytes in (5 * MIB, 300, 12 * MIB, 3 * MIB + 5, 8 * MIB, 7000, 9 * MIB) * 3:
            if len(live) == 4:
                live.pop(0).release()
            live.append(pool.take(num_bytes))
        for buffer in live:
            buffer.release()

    step()
    step()
    assert calls
    calls.clear()
    for _ in range(50):
        step()
    assert calls == []
    pool.close()


def test_the_process_never_maps_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool(20 * MIB + 1234)
    mapped, most = 0, 0
    real_map, real_unmap = arena.map_pages, arena.unmap_pages

    def spy_map(num_bytes: int) -> int:
        nonlocal mapped, most
        address = real_map(num_bytes)
        mapped += num_bytes
        most = max(most, mapped + pool._charged_bytes)
        return address

    def spy_unmap(address: int, num_bytes: int) -> None:
        nonlocal mapped
        mapped -= num_bytes
        real_unmap(address, num_bytes)

    monkeypatch.setattr(arena, "map_pages", spy_map)
    monkeypatch.setattr(arena, "unmap_pages", spy_unmap)
    draw = random.Random(7)
    live: list[Buffer] = []
    charges: list[int] = []
    for _ in range(5000):
        num_bytes = draw.choice((draw.randrange(1, 4 * PAGE), draw.randrange(1, 9 * MIB)))
        if (buffer := pool.try_take(num_bytes)) is not None:
            live.append(buffer)
        elif live:
            live.pop(draw.randrange(len(live))).release()
        if draw.random() < 0.2 and pool.try_charge(num_bytes):
            charges.append(num_bytes)
        elif charges and draw.random() < 0.3:
            pool.discharge(charges.pop())
        assert mapped == pool.mapped_bytes
        assert mapped + sum(charges) <= pool.budget
    assert 19 * MIB < most <= pool.budget
    pool.close()
    assert pool.mapped_bytes == 0


@in_own_process
def test_touched_memory_stays_within_the_budget() -> None:
    def anonymous_bytes() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    pool = BufferPool(48 * MIB)
    draw = random.Random(3)
    live: list[Buffer] = []
    before = anonymous_bytes()
    for _ in range(60):
        num_bytes = draw.randrange(1, 20 * MIB)
        while (buffer := pool.try_take(num_bytes)) is None:
            live.pop(draw.randrange(len(live))).release()
        buffer.tensor().fill_(1)
        live.append(buffer)
        assert anonymous_bytes() - before < 48 * MIB + 4 * MIB  # 4 MiB for the interpreter's own
    pool.close()


def test_a_refusal_of_the_kernel_leaves_the_pool_and_its_queue_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool(1 << 60)
    with pytest.raises(CapacityError, match=f"refused to map {1 << 60:,} bytes"):
        pool.take(1 << 60)
    assert (pool.held_bytes, pool.mapped_bytes) == (0, 0)
    pool.take(PAGE).release()

    held = pool.take(PAGE)
    granted: list[Buffer] = []
    pool.charge((1 << 60) - 2 * PAGE)
    pool.request(2 * PAGE, granted.append)

    def refuse(num_bytes: int) -> int:
        raise CapacityError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "map_pages", refuse)
        with pytest.raises(CapacityError, match="refused"):
            held.release()
    assert held not in pool._live.values()
    assert pool.num_waiting == 1
    pool.collect()
    assert [b.num_bytes for b in granted] == [2 * PAGE]
    pool.close()


def test_pinned_pool_registers_what_it_maps_and_unregisters_before_it_unmaps() -> None:
    registered: dict[int, int] = {}
    calls: list[str] = []

    def register(address: int, num_bytes: int) -> None:
        registered[address] = num_bytes
        calls.append("register")

    def unregister(address: int) -> None:
        del registered[address]
        calls.append("unregister")

    pool = BufferPool(8 * MIB, pinning=Pinning(register, unregister, lambda: calls.append("synchronize")))
    buffer = pool.take(3 * MIB)
    assert any(a <= buffer.address and buffer.address + 3 * MIB <= a + n for a, n in registered.items())
    lease = buffer.tensor()
    pool.close()
    assert calls == ["register", "synchronize", "unregister"]
    lease.fill_(1)


def test_close_unmaps_all_but_leased_memory_which_goes_with_its_last_lease(pool: BufferPool) -> None:
    leased, plain, free = (pool.take(PAGE) for _ in range(3))
    leases = [leased.tensor(), leased.tensor()]
    free.release()
    pool.close()
    pool.close()
    assert pool.mapped_bytes == pool.held_bytes == PAGE
    leases[0].fill_(9)
    assert leases[1].sum() == 9 * PAGE
    leased.release()  # its owner need not know
    plain.release()
    leases.pop()
    assert pool.mapped_bytes == PAGE
    leases.pop()
    assert pool.mapped_bytes == pool.held_bytes == 0
    for call in (lambda: pool.take(1), lambda: pool.request(1, lambda _: None), leased.tensor):
        with pytest.raises(UsageError):
            call()


def test_close_ends_a_blocked_take(pool: BufferPool) -> None:
    pool.take(16 * PAGE)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            pool.take(PAGE)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    while not pool.num_waiting:
        time.sleep(0.001)
    pool.close()
    thread.join(SECONDS)
    assert "was closed" in str(errors[0])


def test_a_dropped_pool_gives_its_free_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped: list[tuple[int, int]] = []
    monkeypatch.setattr(arena, "unmap_pages", lambda address, num_bytes: unmapped.append((address, num_bytes)))
    pool = BufferPool(MIB)
    buffer = pool.take(PAGE)
    buffer.release()
    address, alive = buffer.address, weakref.ref(pool)
    del pool, buffer
    gc.collect()
    assert alive() is None
    assert (address, PAGE) in unmapped


def test_a_forked_child_returns_nothing_and_the_parent_goes_on(pool: BufferPool) -> None:
    leased, plain = pool.take(PAGE), pool.take(PAGE)
    leases = [leased.tensor().fill_(3)]
    leased.release()
    with pool._lock:  # as another thread might hold it at the moment of the fork
        child = os.fork()
        if child == 0:
            code = 4
            signal.alarm(5)  # a child that hangs on the lock ends by this
            try:
                code = _child(pool, plain, leases)
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (held_after(pool), leased.leases, int(leases[0].sum())) == (2 * PAGE, 1, 3 * PAGE)


def _child(pool: BufferPool, plain: Buffer, leases: list[torch.Tensor]) -> int:
    """Exit code: 0 when nothing was given back, nothing hung on the lock, and taking is refused."""
    mapped = pool.mapped_bytes
    leases.clear()
    for call in (pool.collect, plain.release, lambda: pool.discharge(1), pool.close):
        call()
    if (pool.held_bytes, pool.mapped_bytes) != (2 * PAGE, mapped):
        return 2
    try:
        pool.take(PAGE)
    except UsageError:
        return 0
    return 3


class AnySequence(RuleBasedStateMachine):
    """Random takes, releases, leases and charges against a plain list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(12 * MIB + 77)
        self.live: list[tuple[Buffer, int]] = []
        self.leased: list[tuple[Buffer, int, torch.Tensor]] = []  # released, but leased
        self.charges: list[int] = []
        self.stamp = 0

    sizes = st.one_of(st.integers(1, 8 * PAGE), st.integers(1, 6 * MIB))

    def write(self, buffer: Buffer) -> None:
        self.stamp = self.stamp % 250 + 1
        view = buffer.view
        for offset in range(0, buffer.num_bytes, max(PAGE, buffer.num_bytes // 8)):
            view[offset] = self.stamp
        view[-1] = self.stamp
        self.live.append((buffer, self.stamp))

    @rule(num_bytes=sizes)
    def take(self, num_bytes: int) -> None:
        self.pool.collect()
        fits = -(-num_bytes // PAGE) * PAGE <= self.pool.free_bytes
        buffer = self.pool.try_take(num_bytes)
        assert (buffer is not None) == fits
        if buffer is not None:
            self.write(buffer)

    @rule()
    def take_all_that_is_free(self) -> None:
        self.pool.collect()
        num_bytes = self.pool.free_bytes // PAGE * PAGE
        if num_bytes:
            buffer = self.pool.try_take(num_bytes)
            assert buffer is not None
            buffer.view[0] = buffer.view[-1] = 255
            buffer.release()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep_lease=st.booleans())
    def release(self, data: st.DataObject, keep_lease: bool) -> None:
        buffer, stamp = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        if keep_lease:
            self.leased.append((buffer, stamp, buffer.tensor()[:1]))
        buffer.release()

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def drop_lease(self, data: st.DataObject) -> None:
        del self.leased[data.draw(st.integers(0, len(self.leased) - 1))]

    @rule(num_bytes=sizes)
    def charge(self, num_bytes: int) -> None:
        self.pool.collect()
        fits = num_bytes <= self.pool.free_bytes
        assert self.pool.try_charge(num_bytes) == fits
        if fits:
            self.charges.append(num_bytes)

    @precondition(lambda self: self.charges)
    @rule()
    def discharge(self) -> None:
        self.pool.discharge(self.charges.pop(0))

    @invariant()
    def accounts_are_exact_and_within_the_budget(self) -> None:
        self.pool.collect()
        buffers = [b for b, _ in self.live] + [lease[0] for lease in self.leased]
        live_bytes = sum(b.num_bytes for b in buffers)
        assert self.pool.held_bytes == live_bytes + sum(self.charges) <= self.pool.peak_bytes <= self.pool.budget
        assert live_bytes <= self.pool.mapped_bytes
        assert self.pool.mapped_bytes + sum(self.charges) <= self.pool.budget
        assert len(self.pool.holders()) == len(buffers)

    @invariant()
    def live_buffers_are_apart_and_keep_their_bytes(self) -> None:
        buffers = sorted([b for b, _ in self.live] + [lease[0] for lease in self.leased], key=lambda b: b.address)
        for below, above in itertools.pairwise(buffers):
            assert below.address + below.num_bytes <= above.address
        for buffer, stamp in self.live:
            view = buffer.view
            for offset in range(0, buffer.num_bytes, max(PAGE, buffer.num_bytes // 8)):
                assert view[offset] == stamp
            assert view[-1] == stamp
        assert all(int(tensor[0]) == stamp for _, stamp, tensor in self.leased)

    def teardown(self) -> None:
        self.leased.clear()
        self.pool.close()
        assert self.pool.mapped_bytes == 0


TestAnySequence = AnySequence.TestCase


TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_many_threads_take_lease_charge_and_release() -> None:
    pool = BufferPool(3 * MIB)
    errors: list[BaseException] = []

    def use(buffer: Buffer, stamp: int, draw: random.Random) -> None:
        lease = buffer.tensor() if draw.random() < 0.5 else None
        buffer.view[0] = buffer.view[-1] = stamp
        if draw.random() < 0.5:
            time.sleep(0)  # let another thread at it
        assert buffer.view[0] == buffer.view[-1] == stamp
        buffer.release()
        if lease is not None:
            assert lease[0] == stamp

    def work(stamp: int) -> None:
        draw = random.Random(stamp)
        served = threading.Semaphore(0)

        def use_and_tell(buffer: Buffer) -> None:
            use(buffer, stamp, draw)
            served.release()

        try:
            for _ in range(250):
                num_bytes = draw.choice((PAGE, 10 * PAGE, MIB, 2 * MIB)) - draw.randrange(3)
                way = draw.random()
                if way < 0.5:
                    use(pool.take(num_bytes), stamp, draw)
                elif way < 0.75:
                    pool.charge(num_bytes)
                    pool.discharge(num_bytes)
                else:
                    request = pool.request(num_bytes, use_and_tell)
                    if not (draw.random() < 0.3 and request.cancel()):
                        while not served.acquire(timeout=0.002):
                            pool.collect()
                assert pool.held_bytes <= pool.budget
        except (AssertionError, CapacityError, UsageError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(stamp,), daemon=True) for stamp in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert errors == []
    assert (held_after(pool), pool.num_waiting) == (0, 0)
    assert pool.peak_bytes > 2 * MIB
    pool.close()
