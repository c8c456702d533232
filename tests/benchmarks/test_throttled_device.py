"""One slow link for everyone: on a clock of the test's own, and once on the real one."""

from __future__ import annotations

import time

import pytest
from support.fake_device import FakeDevice

from benchmarks.throttled_device import ThrottledDevice
from zero_infinity.errors import ConfigError
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Direction, Priority
from zero_infinity.storage.swap_device import SwapDevice


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def throttled(device: SwapDevice, clock: Clock, rate: float = 1000.0, latency: float = 0.0) -> ThrottledDevice:
    return ThrottledDevice(device, rate, latency, clock=clock, sleep=clock.sleep)


def test_a_request_takes_its_bytes_and_the_latency() -> None:
    clock = Clock()
    device = throttled(FakeDevice(), clock, latency=0.5)
    device.extend(1000)
    assert device.write(memoryview(bytes(200)), 0) == 200
    assert clock.slept == pytest.approx([0.7])
    assert device.read(memoryview(bytearray(100)), 0) == 100
    assert clock.slept == pytest.approx([0.7, 0.6])


def test_requests_queue_on_the_link_but_overlap_their_latency() -> None:
    clock = Clock()
    device = throttled(FakeDevice(), clock, latency=0.5)
    device.extend(1000)
    device.read(memoryview(bytearray(200)), 0)
    clock.now = 100.0  # as another thread that came at the same time
    device.read(memoryview(bytearray(200)), 0)
    assert clock.slept == pytest.approx([0.7, 0.9])


def test_an_idle_link_saves_nothing_up() -> None:
    clock = Clock()
    device = throttled(FakeDevice(), clock)
    device.extend(1000)
    clock.now += 1000
    device.read(memoryview(bytearray(500)), 0)
    assert clock.slept == pytest.approx([0.5])


def test_the_devices_own_time_and_short_transfers_count() -> None:
    clock = Clock()

    def latency(request: object) -> float:
        clock.now += 0.3  # the device is busy for that long
        return 0.0

    device = throttled(FakeDevice(latency=latency, transfer=400), clock)
    device.extend(1000)
    assert device.read(memoryview(bytearray(1000)), 0) == 400
    assert clock.slept == pytest.approx([0.1])


def test_everything_else_is_the_device_below() -> None:
    below = FakeDevice(alignment=512, stripe_bytes=64)
    device = throttled(below, Clock())
    device.extend(4096)
    assert (device.capacity, device.alignment, device.max_request(10)) == (4096, 512, 54)
    assert device.describe(10) == below.describe(10)
    device.close()
    assert below.closed


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1)])
def test_settings_that_cannot_be_meant(rate: float, latency: float) -> None:
    with pytest.raises(ConfigError):
        ThrottledDevice(FakeDevice(), rate, latency)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_all_threads_together_get_no_more_than_the_bandwidth_of_the_link(num_threads: int) -> None:
    engine = IOEngine(ThrottledDevice(FakeDevice(), bytes_per_second=10 << 20), num_threads, 64 << 10)
    engine.reserve(1 << 20)
    began = time.monotonic()
    engine.submit(Direction.READ, memoryview(bytearray(1 << 20)), 0, Priority.DEMANDED).wait()
    seconds = time.monotonic() - began
    engine.close()
    assert seconds >= 0.1
