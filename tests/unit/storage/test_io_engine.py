"""The I/O engine: order, priority, inheritance, splitting, counters, lifetimes."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.errors import ConfigError, EngineClosedError, SwapSpaceError, UsageError
from zero_infinity.policy.sizes import ALIGNMENT
from zero_infinity.storage.fake_device import FakeDevice, FakeRequest
from zero_infinity.storage.io_engine import IOEngine, IOTicket
from zero_infinity.storage.io_types import Direction, Priority

READ, WRITE = Direction.READ, Direction.WRITE
DEMANDED, PREFETCH, WRITE_BACK = Priority.DEMANDED, Priority.PREFETCH, Priority.WRITE_BACK
PAGE = 4096
SECONDS = 20  # far more than anything here takes: a hang fails instead of blocking


class Bench:
    """An engine over a scripted device whose requests are held until `open` is called (when `held`)."""

    def __init__(
        self, *, num_threads: int = 1, request_bytes: int = PAGE, pages: int = 64, held: bool = True, **script: object
    ) -> None:
        self.gate = threading.Event()
        if not held:
            self.gate.set()
        self.device = FakeDevice(latency=self._hold, **script)  # type: ignore[arg-type]
        self.engine = IOEngine(self.device, num_threads, request_bytes)
        self.engine.reserve(pages * PAGE)

    def _hold(self, request: FakeRequest) -> float:
        self.gate.wait(SECONDS)
        return 0.0

    def submit(
        self, direction: Direction, page: int, num_pages: int = 1, priority: Priority = PREFETCH, fill: int = 0
    ) -> IOTicket:
        memory = memoryview(bytearray([fill]) * (num_pages * PAGE))
        return self.engine.submit(direction, memory, page * PAGE, priority)

    def plug(self, num_requests: int = 1) -> list[IOTicket]:
        """Occupy the workers with reads at the end of the space, so that what follows stays queued."""
        last = self.engine.capacity // PAGE - 1
        tickets = [self.submit(READ, last - index, priority=DEMANDED) for index in range(num_requests)]
        wait_until(lambda: len(self.device.requests) == num_requests)
        return tickets

    def pages(self) -> list[int]:
        return [request.offset // PAGE for request in self.device.requests]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.0005)


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(**options: object) -> Bench:
        made.append(Bench(**options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for bench in made:
        bench.gate.set()
        bench.engine.close()


# Moving bytes


@given(
    lengths=st.lists(st.integers(1, 6 * PAGE), min_size=1, max_size=6),
    num_threads=st.integers(1, 4),
    stripe=st.sampled_from([None, 1000, PAGE, 3 * PAGE]),
    short=st.sampled_from([None, 1, 700, PAGE]),
    data=st.integers(0, 2**32).map(random.Random),
)
def test_what_was_written_is_read_back_whatever_the_splits(
    lengths: list[int], num_threads: int, stripe: int | None, short: int | None, data: random.Random
) -> None:
    short = None if short == 1 and sum(lengths) > 2 * PAGE else short  # a byte at a time is slow
    device = FakeDevice(stripe_bytes=stripe, transfer=short)
    engine = IOEngine(device, num_threads, request_bytes=2 * PAGE)
    blocks = [(engine.reserve(length), data.randbytes(length)) for length in lengths]
    tickets = [engine.submit(WRITE, memoryview(block), offset, WRITE_BACK) for offset, block in blocks]
    targets = [bytearray(len(block)) for _, block in blocks]
    reads = [
        engine.submit(READ, memoryview(target), offset, PREFETCH)
        for (offset, _), target in zip(blocks, targets, strict=True)
    ]
    for ticket in [*tickets, *reads]:
        ticket.wait(SECONDS)
    engine.close()
    assert targets == [block for _, block in blocks]
    assert all(request.length <= 2 * PAGE for request in device.requests)
    if stripe is not None:
        assert all(request.offset % stripe + request.length <= stripe for request in device.requests)


def test_a_direct_transfer_goes_on_at_a_block_after_a_short_one(make: Callable[..., Bench]) -> None:
    def short(request: FakeRequest) -> int:
        assert request.offset % PAGE == 0
        return PAGE + 100

    device = FakeDevice(alignment=PAGE, transfer=short)
    engine = IOEngine(device, 1, 8 * PAGE)
    engine.reserve(8 * PAGE)
    memory = mmap.mmap(-1, 8 * PAGE)
    memory[:] = os.urandom(8 * PAGE)
    engine.submit(WRITE, memoryview(memory), 0, DEMANDED).wait(SECONDS)
    engine.close()
    assert device.contents() == memory[:]


def test_a_demanded_transfer_is_spread_over_all_threads(make: Callable[..., Bench]) -> None:
    together = threading.Barrier(4)

    def latency(request: FakeRequest) -> float:
        together.wait(SECONDS)
        return 0.0

    engine = IOEngine(FakeDevice(latency=latency), 4, PAGE)
    engine.reserve(4 * PAGE)
    engine.submit(READ, memoryview(bytearray(4 * PAGE)), 0, DEMANDED).wait(SECONDS)
    engine.close()


def test_memory_of_other_formats_is_taken_as_bytes(make: Callable[..., Bench]) -> None:
    bench = make(held=False)
    numbers = memoryview(bytearray(range(256)) * 32).cast("I")
    bench.engine.submit(WRITE, numbers, 0, PREFETCH).wait(SECONDS)
    assert bench.device.contents()[: 2 * PAGE] == numbers.tobytes()


def test_read_only_memory_can_be_written_from(make: Callable[..., Bench]) -> None:
    bench = make(held=False)
    bench.engine.submit(WRITE, memoryview(b"x" * PAGE), 0, PREFETCH).wait(SECONDS)
    assert bench.device.contents()[:PAGE] == b"x" * PAGE


# Priority


def test_priority_first_then_order_of_submission(make: Callable[..., Bench]) -> None:
    bench = make()
    plug = bench.plug()
    wanted = [(0, WRITE_BACK), (1, PREFETCH), (2, DEMANDED), (3, PREFETCH), (4, DEMANDED), (5, WRITE_BACK)]
    tickets = [bench.submit(READ, page, priority=priority) for page, priority in wanted]
    bench.gate.set()
    wait_until(lambda: all(ticket.done() for ticket in plug + tickets))
    assert bench.pages()[1:] == [2, 4, 1, 3, 0, 5]


def test_a_demanded_read_overtakes_the_rest_of_a_long_write_back(make: Callable[..., Bench]) -> None:
    bench = make()
    long = bench.submit(WRITE, 0, 8, WRITE_BACK)
    wait_until(lambda: len(bench.device.requests) == 1)
    short = bench.submit(READ, 20, priority=DEMANDED)
    bench.gate.set()
    for ticket in (long, short):
        wait_until(ticket.done)
    assert bench.pages() == [0, 20, 1, 2, 3, 4, 5, 6, 7]


def test_raise_priority_overtakes_and_never_lowers(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.plug()
    tickets = [bench.submit(READ, page, priority=PREFETCH) for page in range(4)]
    tickets[2].raise_priority(DEMANDED)
    tickets[0].raise_priority(WRITE_BACK)
    bench.gate.set()
    wait_until(lambda: all(ticket.done() for ticket in tickets))
    assert bench.pages()[1:] == [2, 0, 1, 3]


def test_waiting_makes_a_transfer_demanded(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.plug()
    tickets = [bench.submit(READ, page, priority=WRITE_BACK) for page in range(3)]
    with pytest.raises(TimeoutError, match="read of 4096 bytes at offset 8192"):
        tickets[2].wait(timeout=0.01)
    bench.gate.set()
    wait_until(lambda: all(ticket.done() for ticket in tickets))
    assert bench.pages()[1:] == [2, 0, 1]


# Order of overlapping transfers


def test_a_demanded_read_sees_the_write_back_before_it_and_lends_it_its_priority(make: Callable[..., Bench]) -> None:
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


def test_inheritance_reaches_through_a_chain_and_by_a_later_wait(make: Callable[..., Bench]) -> None:
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


def test_a_write_waits_for_the_reads_before_it(make: Callable[..., Bench]) -> None:
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


def test_reads_of_the_same_bytes_run_together(make: Callable[..., Bench]) -> None:
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


# Refusals at the door


@pytest.mark.parametrize(
    ("offset", "start", "length", "text"),
    [
        (100, 0, PAGE, "offset 100 is not a multiple of 4096"),
        (0, 0, 100, "length 100 is not a multiple of 4096"),
        (0, 8, PAGE, "memory address .* is not a multiple of 4096"),
        (64 * PAGE, 0, PAGE, "exceeds the swap space, which has 262144 bytes"),
        (63 * PAGE, 0, 2 * PAGE, "exceeds the swap space"),
        (-PAGE, 0, PAGE, "exceeds the swap space"),
        (0, 0, 0, "0 bytes"),
    ],
)
def test_what_direct_io_would_refuse_is_refused_before_it_is_queued(
    make: Callable[..., Bench], offset: int, start: int, length: int, text: str
) -> None:
    bench = make(held=False, alignment=ALIGNMENT)
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))[start : start + length]
    for direction in (READ, WRITE):
        with pytest.raises(ValueError, match=text):
            bench.engine.submit(direction, memory, offset, PREFETCH)
    assert bench.device.requests == []


def test_reading_into_read_only_memory_is_refused(make: Callable[..., Bench]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().engine.submit(READ, memoryview(bytes(PAGE)), 0, PREFETCH)


def test_a_device_without_alignment_takes_anything(make: Callable[..., Bench]) -> None:
    bench = make(held=False)
    bench.engine.submit(WRITE, memoryview(b"abc"), 5, PREFETCH).wait(SECONDS)
    assert bench.device.contents()[4:9] == b"\0abc\0"


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        IOEngine(FakeDevice(), num_threads=0)
    with pytest.raises(ConfigError, match="request_bytes"):
        IOEngine(FakeDevice(), request_bytes=5000)


def test_reserve_rounds_up_and_leaves_everything_when_it_is_full() -> None:
    engine = IOEngine(FakeDevice(limit=4 * PAGE))
    assert [engine.reserve(1), engine.reserve(PAGE + 1), engine.reserve(0)] == [0, PAGE, 3 * PAGE]
    with pytest.raises(SwapSpaceError, match=r"8\.0 KiB of swap space is needed.* 4\.0 KiB free") as caught:
        engine.reserve(PAGE + 1)
    assert caught.value.errno == errno.ENOSPC
    assert engine.capacity == 3 * PAGE
    engine.submit(READ, memoryview(bytearray(3 * PAGE)), 0, DEMANDED).wait(SECONDS)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.reserve(1)


# Completion


def test_callbacks_run_once_without_a_lock_and_before_anyone_is_told(make: Callable[..., Bench]) -> None:
    bench = make()
    ticket = bench.submit(READ, 0)
    heard: list[BaseException | None] = []
    follow_up: list[IOTicket] = []

    def callback(error: BaseException | None) -> None:
        bench.engine.counters()  # takes the lock: would hang if it were held
        follow_up.append(bench.submit(READ, 1))
        assert not ticket.done()
        heard.append(error)

    ticket.add_done_callback(callback)
    bench.gate.set()
    ticket.wait(SECONDS)
    assert heard == [None]
    ticket.add_done_callback(heard.append)  # at once
    assert heard == [None, None]
    follow_up[0].wait(SECONDS)


def test_waiting_in_a_callback_is_refused_instead_of_hanging(make: Callable[..., Bench]) -> None:
    bench = make()
    first, second = bench.submit(READ, 0), bench.submit(READ, 1)
    caught: list[BaseException] = []

    def callback(error: BaseException | None) -> None:
        try:
            second.wait()
        except UsageError as refusal:
            caught.append(refusal)

    first.add_done_callback(callback)
    bench.gate.set()
    first.wait(SECONDS)
    second.wait(SECONDS)
    assert "callback" in str(caught[0])


def test_an_exception_in_a_callback_stops_the_engine_and_is_logged(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    first, second = bench.submit(READ, 0), bench.submit(READ, 1)

    def callback(error: BaseException | None) -> None:
        raise ZeroDivisionError("of all things")

    first.add_done_callback(callback)
    bench.gate.set()
    first.wait(SECONDS)  # the transfer itself went well
    with pytest.raises(EngineClosedError, match="of all things") as caught:
        second.wait(SECONDS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineClosedError, match="of all things"):
        bench.submit(READ, 2)
    assert "a completion callback failed" in caplog.text


def test_nothing_refers_to_the_memory_once_the_ticket_is_done(make: Callable[..., Bench]) -> None:
    bench = make(held=False, num_threads=2)
    memory = mmap.mmap(-1, 4 * PAGE)
    ticket = bench.engine.submit(WRITE, memoryview(memory), 0, PREFETCH)
    ticket.wait(SECONDS)
    memory.close()  # raises BufferError while any view is alive, in a ticket or in a sleeping worker


# Counters


def test_counters_count_bytes_requests_and_time(make: Callable[..., Bench]) -> None:
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


# The end


def test_close_finishes_what_runs_fails_what_waits_and_gives_everything_back(make: Callable[..., Bench]) -> None:
    bench = make(num_threads=2)
    threads = bench.engine._threads  # its own: those of another test may still be about to leave
    assert len(threads) == 2
    running = bench.submit(WRITE, 0, 6, fill=9)
    wait_until(lambda: len(bench.device.requests) == 2)
    queued = bench.submit(READ, 0)
    closing = threading.Thread(target=bench.engine.close)
    closing.start()
    with pytest.raises(EngineClosedError, match="closed"):
        queued.wait(SECONDS)
    assert not bench.device.closed
    bench.gate.set()
    running.wait(SECONDS)
    closing.join(SECONDS)
    assert bench.device.contents()[: 6 * PAGE] == bytes([9]) * (6 * PAGE)
    assert bench.device.closed
    assert not any(thread.is_alive() for thread in threads)
    bench.engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        bench.submit(READ, 0)


def test_an_engine_closed_by_its_own_callback_does_not_wait_for_itself(make: Callable[..., Bench]) -> None:
    bench = make(num_threads=2)
    ticket = bench.submit(READ, 0)
    returned: list[bool] = []

    def callback(error: BaseException | None) -> None:
        bench.engine.close()
        returned.append(True)

    ticket.add_done_callback(callback)
    bench.gate.set()
    ticket.wait(SECONDS)
    assert returned == [True]
    wait_until(lambda: bench.device.closed)


def test_an_engine_that_nobody_holds_does_what_is_queued_and_goes() -> None:
    before = set(threading.enumerate())
    device = FakeDevice(latency=0.005)
    engine = IOEngine(device, 2, PAGE)
    engine.reserve(8 * PAGE)
    ticket = engine.submit(WRITE, memoryview(b"z" * (8 * PAGE)), 0, WRITE_BACK)
    del engine
    gc.collect()
    ticket.wait(SECONDS)
    assert device.contents() == b"z" * (8 * PAGE)
    wait_until(lambda: device.closed)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_forked_child_is_told_and_the_parent_goes_on(make: Callable[..., Bench]) -> None:
    bench = make()
    ticket = bench.submit(WRITE, 0, fill=4)
    wait_until(lambda: len(bench.device.requests) == 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:  # whatever happens, the child must not come back into pytest
            report = []
            for call in (
                lambda: bench.submit(READ, 0),
                ticket.wait,
                bench.engine.counters,
                lambda: bench.engine.reserve(1),
            ):
                try:
                    call()
                except UsageError as error:
                    report.append("forked" if "forked child" in str(error) else str(error))
            bench.engine.close()
            os.write(writer, "|".join(report).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "|".join(["forked"] * 4)
    assert os.waitpid(child, 0)[1] == 0
    bench.gate.set()
    ticket.wait(SECONDS)
    assert bench.device.contents()[:PAGE] == bytes([4]) * PAGE
