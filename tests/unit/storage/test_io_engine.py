"""The I/O engine: what is submitted comes back, what is invalid is rejected, and everything is released."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_device import FakeDevice
from support.io_bench import DEMANDED, PAGE, PREFETCH, READ, WRITE, WRITE_BACK, IOBench
from support.patience import SECONDS, wait_until

from zero_infinity.errors import ConfigError, EngineClosedError, SwapSpaceError, UsageError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.io_engine import IOEngine


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


def test_memory_of_other_formats_is_taken_as_bytes(make: Callable[..., IOBench]) -> None:
    bench = make(held=False)
    numbers = memoryview(bytearray(range(256)) * 32).cast("I")
    bench.engine.submit(WRITE, numbers, 0, PREFETCH).wait(SECONDS)
    assert bench.device.contents()[: 2 * PAGE] == numbers.tobytes()


def test_read_only_memory_can_be_written_from(make: Callable[..., IOBench]) -> None:
    bench = make(held=False)
    bench.engine.submit(WRITE, memoryview(b"x" * PAGE), 0, PREFETCH).wait(SECONDS)
    assert bench.device.contents()[:PAGE] == b"x" * PAGE


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
    make: Callable[..., IOBench], offset: int, start: int, length: int, text: str
) -> None:
    bench = make(held=False, alignment=ALIGNMENT)
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))[start : start + length]
    for direction in (READ, WRITE):
        with pytest.raises(ValueError, match=text):
            bench.engine.submit(direction, memory, offset, PREFETCH)
    assert bench.device.requests == []


def test_reading_into_read_only_memory_is_refused(make: Callable[..., IOBench]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().engine.submit(READ, memoryview(bytes(PAGE)), 0, PREFETCH)


def test_a_device_without_alignment_takes_anything(make: Callable[..., IOBench]) -> None:
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


def test_close_finishes_what_runs_fails_what_waits_and_gives_everything_back(make: Callable[..., IOBench]) -> None:
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


def test_a_forked_child_is_told_and_the_parent_goes_on(make: Callable[..., IOBench]) -> None:
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
