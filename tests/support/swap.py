"""Aligned memory and round trips, for tests of swap devices."""

from __future__ import annotations

import mmap
import os

from zero_infinity.storage.swap_device import SwapDevice


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def round_trip(device: SwapDevice, offset: int, num_bytes: int) -> bool:
    data = aligned(os.urandom(num_bytes))
    back = aligned(bytes(num_bytes))
    return device.write(data, offset) == device.read(back, offset) == num_bytes and data == back
