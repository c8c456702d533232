"""The measurement: which transfers it makes, and that its numbers fit the device."""

from __future__ import annotations

import pytest
from support.fake_device import FakeDevice

from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_speed import IOWorkload, measure, scratch_memory
from zero_infinity.storage.io_types import Direction

PAGE = 4096


@pytest.mark.parametrize(
    ("workload", "reads", "writes"),
    [
        (IOWorkload.READ, range(8), ()),
        (IOWorkload.WRITE, (), range(8)),
        (IOWorkload.MIXED, range(4), range(4, 8)),
    ],
)
def test_every_page_of_the_range_is_transferred_once(workload: IOWorkload, reads: range, writes: range) -> None:
    device = FakeDevice(latency=0.002)
    engine = IOEngine(device, num_threads=2, request_bytes=PAGE)
    engine.reserve(8 * PAGE)
    speed = measure(engine, memoryview(scratch_memory(2 * PAGE)), workload, PAGE, 8 * PAGE)
    engine.close()
    for direction, pages in ((Direction.READ, reads), (Direction.WRITE, writes)):
        found = sorted(request.offset // PAGE for request in device.requests if request.direction is direction)
        assert found == list(pages)
    # Two threads, and at least 2 ms for each of 8 requests: never faster than that.
    assert 0 < speed.bytes_per_second <= 8 * PAGE / 0.008
    assert 0.002 * 0.97 <= speed.p50_seconds <= speed.p99_seconds
    assert speed.cores >= 0


def test_scratch_memory_is_aligned_noise() -> None:
    memory = scratch_memory(16 * PAGE)
    pages = {bytes(memory[at : at + PAGE]) for at in range(0, 16 * PAGE, PAGE)}
    assert len(pages) == 16
    assert bytes(PAGE) not in pages
