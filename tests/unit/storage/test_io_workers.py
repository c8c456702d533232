"""Worker threads: short transfers, completion callbacks, references to memory, exit."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Callable

import pytest
from support.fake_device import FakeDevice, FakeRequest
from support.io_bench import DEMANDED, PAGE, PREFETCH, READ, WRITE, WRITE_BACK, IOBench
from support.patience import SECONDS, wait_until

from zero_infinity.errors import EngineClosedError, UsageError
from zero_infinity.storage.io_engine import IOEngine, IOTicket


def test_a_direct_transfer_goes_on_at_a_block_after_a_short_one(make: Callable[..., IOBench]) -> None:
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


def test_a_demanded_transfer_is_spread_over_all_threads(make: Callable[..., IOBench]) -> None:
    together = threading.Barrier(4)

    def latency(request: FakeRequest) -> float:
        together.wait(SECONDS)
        return 0.0

    engine = IOEngine(FakeDevice(latency=latency), 4, PAGE)
    engine.reserve(4 * PAGE)
    engine.submit(READ, memoryview(bytearray(4 * PAGE)), 0, DEMANDED).wait(SECONDS)
    engine.close()


def test_callbacks_run_once_without_a_lock_and_before_anyone_is_told(make: Callable[..., IOBench]) -> None:
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


def test_waiting_in_a_callback_is_refused_instead_of_hanging(make: Callable[..., IOBench]) -> None:
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
    make: Callable[..., IOBench], caplog: pytest.LogCaptureFixture
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


def test_nothing_refers_to_the_memory_once_the_ticket_is_done(make: Callable[..., IOBench]) -> None:
    bench = make(held=False, num_threads=2)
    memory = mmap.mmap(-1, 4 * PAGE)
    ticket = bench.engine.submit(WRITE, memoryview(memory), 0, PREFETCH)
    ticket.wait(SECONDS)
    memory.close()  # raises BufferError while any view is alive, in a ticket or in a sleeping worker


def test_an_engine_closed_by_its_own_callback_does_not_wait_for_itself(make: Callable[..., IOBench]) -> None:
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
