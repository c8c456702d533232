"""What every swap device promises, checked on each implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_device import FakeDevice
from support.swap import aligned, round_trip

from benchmarks.throttled_device import ThrottledDevice
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.swap_device import SwapDevice

DEVICES: dict[str, Callable[[Path], SwapDevice]] = {
    "fake": lambda _: FakeDevice(),
    "file": lambda path: FileDevice(path),
    "two files": lambda path: FileDevice([path, path], stripe_bytes=ALIGNMENT),
    "throttled": lambda _: ThrottledDevice(FakeDevice(), 1e12),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_a_device_grows_keeps_bytes_and_closes_twice(kind: str, tmp_path: Path) -> None:
    device = DEVICES[kind](tmp_path)
    assert device.capacity == 0
    device.extend(2 * ALIGNMENT)
    device.extend(2 * ALIGNMENT)
    assert device.capacity == 4 * ALIGNMENT
    assert device.alignment in (1, ALIGNMENT)
    for offset in range(0, 4 * ALIGNMENT, ALIGNMENT):
        assert device.max_request(offset) >= ALIGNMENT
        assert round_trip(device, offset, ALIGNMENT)
    assert str(ALIGNMENT) in device.describe(2 * ALIGNMENT) or str(2 * ALIGNMENT) in device.describe(2 * ALIGNMENT)
    assert device.read(aligned(bytes(ALIGNMENT)), 4 * ALIGNMENT) == 0  # past the end
    device.close()
    device.close()
