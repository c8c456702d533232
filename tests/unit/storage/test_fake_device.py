"""The scripted device does what its script says, and nothing else."""

from __future__ import annotations

import errno
import time

import pytest
from support.fake_device import FakeDevice, FakeFault, FakeRequest

from zero_infinity.errors import SwapSpaceError
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.swap_device import UNLIMITED, SwapDevice


def test_it_is_a_device_that_keeps_bytes() -> None:
    device = FakeDevice()
    as_device: SwapDevice = device
    as_device.extend(10)
    assert as_device.write(memoryview(b"abc"), 4) == 3
    as_device.extend(2)
    target = bytearray(5)
    assert as_device.read(memoryview(target), 3) == 5
    assert target == b"\0abc\0"
    assert (as_device.capacity, as_device.alignment, as_device.max_request(3)) == (12, 1, UNLIMITED)
    assert device.requests == [FakeRequest(0, Direction.WRITE, 4, 3), FakeRequest(1, Direction.READ, 3, 5)]


def test_transfers_end_at_the_capacity_like_a_file() -> None:
    device = FakeDevice()
    device.extend(8)
    target = bytearray(b"xxxx")
    assert device.read(memoryview(target), 6) == 2
    assert target == b"\0\0xx"
    assert device.read(memoryview(target), 8) == 0
    assert device.write(memoryview(b"abcd"), 6) == 2
    assert device.write(memoryview(b"abcd"), 9) == 0
    assert device.contents() == b"\0" * 6 + b"ab"


def test_short_transfers_and_stripes() -> None:
    device = FakeDevice(transfer=lambda request: request.index + 1, stripe_bytes=8)
    device.extend(16)
    assert [device.write(memoryview(b"abcd"), 0) for _ in range(5)] == [1, 2, 3, 4, 4]
    assert [device.max_request(offset) for offset in (0, 5, 8, 15)] == [8, 3, 8, 1]


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        (FakeFault(errno.EIO, at_request=2), [2]),
        (FakeFault(errno.EIO, direction=Direction.WRITE), [0, 2]),
        (FakeFault(errno.EIO, offsets=range(8, 9)), [2, 3]),
        (FakeFault(errno.EIO, offsets=range(8, 9), direction=Direction.READ), [3]),
        (FakeFault(errno.EIO, offsets=range(12, 20)), []),
        (FakeFault(errno.EIO), [0, 1, 2, 3]),
    ],
)
def test_a_fault_strikes_what_matches_and_moves_nothing(fault: FakeFault, failing: list[int]) -> None:
    device = FakeDevice(faults=[fault])
    device.extend(32)
    failed: list[tuple[int, int | None]] = []
    for index, offset in enumerate((0, 4, 8, 8)):
        transfer = device.read if index % 2 else device.write
        try:
            transfer(memoryview(bytearray(b"abcd")), offset)
        except OSError as error:
            failed.append((index, error.errno))
    assert failed == [(index, errno.EIO) for index in failing]
    if 2 in failing:
        assert device.contents()[8:12] == bytes(4)


def test_latency_is_slept_and_can_depend_on_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    device = FakeDevice(latency=lambda request: 0.03 if request.offset else 0.0)
    device.extend(8)
    device.read(memoryview(bytearray(4)), 0)
    assert sum(slept) == 0
    device.read(memoryview(bytearray(4)), 4)
    assert sum(slept) == 0.03


def test_a_full_device_says_how_much_is_needed_and_free() -> None:
    device = FakeDevice(limit=100)
    device.extend(90)
    with pytest.raises(SwapSpaceError, match="11 B of swap space is needed, but the memory device has 10 B free"):
        device.extend(11)
    assert device.capacity == 90
    device.extend(10)


def test_a_closed_device_refuses() -> None:
    device = FakeDevice()
    device.extend(4)
    device.close()
    device.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        device.read(memoryview(bytearray(4)), 0)
