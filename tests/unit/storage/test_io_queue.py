"""The order of requests: priorities, overlapping transfers, inheritance, counters."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_device import FakeDevice
from support.io_bench import DEMANDED, PAGE, PREFETCH, READ, WRITE, WRITE_BACK, IOBench
from support.patience import SECONDS, wait_until

from zero_infinity.storage.io_engine import IOEngine, IOTicket
from zero_infinity.storage.io_types import Priority


def test_priority_first_then_order_of_submission(make: Callable[..., IOBench]) -> None:
    bench = make()
    plug = bench.plug()
    wanted = [(0, WRITE_BACK), (1, PREFETCH), (2, DEMANDED), (3, PREFETCH), (4, DEMANDED), (5, WRITE_BACK)]
    tickets = [bench.submit(READ, page, priority=priority) for page, priority in wanted]
    bench.gate.set()
    wait_until(lambda: all(ticket.done() for ticket in plug + tickets))
    assert bench.pages()[1:] == [2, 4, 1, 3, 0, 5]


def test_a_demanded_read_overtakes_the_rest_of_a_long_write_back(make: Callable[..., IOBench]) -> None:
    bench = make()
    long = bench.submit(WRITE, 0, 8, WRITE_BACK)
    wait_until(lambda: len(bench.device.requests) == 1)
    short = bench.submit(READ, 20, priority=DEMANDED)
    bench.gate.set()
    for ticket in (long, short):
        wait_until(ticket.done)
    assert bench.pages() == [0, 20, 1, 2, 3, 4, 5, 6, 7]


def test_raise_priority_overtakes_and_never_lowers(make: Callable[..., IOBench]) -> None:
    bench = make()
    bench.plug()
    tickets = [bench.submit(READ, page, priority=PREFETCH) for page in range(4)]
    tickets[2].raise_priority(DEMANDED)
    tickets[0].raise_priority(WRITE_BACK)
    bench.gate.set()
    wait_until(lambda: all(ticket.done() for ticket in tickets))
    assert bench.pages()[1:] == [2, 0, 1, 3]


def test_waiting_makes_a_transfer_demanded(make: Callable[..., IOBench]) -> None:
    bench = make()
    bench.plug()
    tickets = [bench.submit(READ, page, priority=WRITE_BACK) for page in range(3)]
    with pytest.raises(TimeoutError, match="read of 4096 bytes at offset 8192"):
        tickets[2].wait(timeout=0.01)
    bench.gate.set()
    wait_until(lambda: all(ticket.done() for ticket in tickets))
    assert bench.pages()[1:] == [2, 0, 1]


def test_a_demanded_read_sees_the_write_back_before_it_and_lends_it_its_priority(make: Callable[..., IOBench]) -> None:
    bench = make()
    bench.plug()
    other = bench.submit(READ, 9, priority=PREFETCH)
    bench.submit(WRITE, 0, 2, WRITE_BACK, fill=7)
    target = bytearray(PAGE)
    read = bench.engine.submit(READ, memoryview(target), PAGE, DEMANDED)
    bench.gate.set()
    read.wait(SECONDS)
    other.wait(SECONDS)
    assert target == bytes([7]) * PAGE
    assert bench.pages()[1:] == [0, 1, 1, 9]


def test_inheritance_reaches_through_a_chain_and_by_a_later_wait(make: Callable[..., IOBench]) -> None:
    bench = make()
    bench.plug()
    other = bench.submit(READ, 9, priority=DEMANDED)
    bench.submit(WRITE, 0, 2, WRITE_BACK, fill=1)  # pages 0, 1
    bench.submit(WRITE, 1, 2, WRITE_BACK, fill=2)  # pages 1, 2: after the first
    late = bench.submit(READ, 8, priority=PREFETCH)
    last = bench.submit(READ, 2, priority=WRITE_BACK)  # after the second only
    last.raise_priority(DEMANDED)
    bench.gate.set()
    for ticket in (other, late, last):
        ticket.wait(SECONDS)
    assert bench.pages()[1:] == [9, 0, 1, 1, 2, 2, 8]


def test_a_write_waits_for_the_reads_before_it(make: Callable[..., IOBench]) -> None:
    bench = make(num_threads=4)
    bench.submit(READ, 0, 2)
    wait_until(lambda: len(bench.device.requests) == 2)
    write = bench.submit(WRITE, 1, priority=DEMANDED)
    apart = bench.submit(WRITE, 2, priority=WRITE_BACK)
    wait_until(lambda: len(bench.device.requests) == 3)
    time.sleep(0.02)  # the blocked write had every chance to start: one thread is free
    assert bench.pages() == [0, 1, 2]
    bench.gate.set()
    write.wait(SECONDS)
    apart.wait(SECONDS)


def test_reads_of_the_same_bytes_run_together(make: Callable[..., IOBench]) -> None:
    bench = make(num_threads=3)
    for _ in range(3):
        bench.submit(READ, 5)
    wait_until(lambda: len(bench.device.requests) == 3)


def test_overlapping_transfers_from_many_threads_behave_as_if_done_one_by_one() -> None:
    """Against a model: a bytearray to which every transfer is applied at the moment of its submission."""
    num_pages, num_threads, num_each = 24, 4, 150
    jitter = random.Random(1)
    device = FakeDevice(
        latency=lambda request: jitter.random() * 2e-4 if jitter.random() < 0.3 else 0.0,
        transfer=lambda request: jitter.randrange(1, 2 * PAGE),
        stripe_bytes=3 * PAGE,
    )
    engine = IOEngine(device, 4, 2 * PAGE)
    engine.reserve(num_pages * PAGE)
    model = bytearray(num_pages * PAGE)
    submitting = threading.Lock()  # the model needs to know the order
    checks: list[tuple[IOTicket, bytearray, bytes]] = []
    moved = {READ: 0, WRITE: 0}

    def submit_many(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(num_each):
            page = rng.randrange(num_pages)
            length = rng.randint(1, min(6, num_pages - page)) * PAGE
            direction, priority = rng.choice([READ, WRITE]), rng.choice(list(Priority))
            memory = bytearray(rng.randbytes(length)) if direction is WRITE else bytearray(length)
            with submitting:
                ticket = engine.submit(direction, memoryview(memory), page * PAGE, priority)
                moved[direction] += length
                if direction is WRITE:
                    model[page * PAGE : page * PAGE + length] = memory
                checks.append((ticket, memory, bytes(model[page * PAGE : page * PAGE + length])))
            if rng.random() < 0.1:
                ticket.wait(SECONDS)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(submit_many, range(num_threads)))
    for ticket, memory, expected in checks:
        ticket.wait(SECONDS)
        assert memory == expected
    counters = engine.counters()
    engine.close()
    assert device.contents() == bytes(model)
    assert (counters.bytes_read, counters.bytes_written) == (moved[READ], moved[WRITE])


def test_counters_count_bytes_requests_and_time(make: Callable[..., IOBench]) -> None:
    bench = make(num_threads=2)
    tickets = [bench.submit(WRITE, 0, 3), bench.submit(READ, 8, 2)]
    wait_until(lambda: len(bench.device.requests) == 2)
    time.sleep(0.05)
    bench.gate.set()
    for ticket in tickets:
        ticket.wait(SECONDS)
    counters = bench.engine.counters()
    assert (counters.bytes_written, counters.write_requests) == (3 * PAGE, 3)
    assert (counters.bytes_read, counters.read_requests) == (2 * PAGE, 2)
    assert counters.write_latency.max >= 0.05
    assert counters.write_latency.p50 <= counters.write_latency.p90 <= counters.write_latency.p99
    assert counters.write_latency.p99 <= counters.write_latency.max
    # Two held requests side by side are one stretch of busy time, and idle time is none.
    assert 0.05 <= counters.busy_seconds < 0.05 + 2 * counters.write_latency.max
    time.sleep(0.02)
    assert bench.engine.counters().busy_seconds == counters.busy_seconds
