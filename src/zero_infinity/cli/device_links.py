"""Accelerators as torch sees them: facts, speed of their link to host memory, overlap.

Owns short measurements of one device. `doctor` and `bench device` print them. Only public, device-generic torch API is
used; what only CUDA can tell is asked there and unknown elsewhere.

Copies run later, on streams. A measurement launches its copies, waits until the device has done them, and takes the
best of a few rounds: a link's speed, not the machine's current load.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_MIB = 1 << 20
_NUM_ROUNDS = 3
_MATMUL_SIZE = 1024  # 2 GFLOP, 12 MiB of device memory
_MAX_MATMULS = 1000
_PART_OF_FREE = 8  # a measurement allocates at most two eighths of the free memory


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What torch tells about a device. The driver is None if torch does not know it."""

    device: str
    name: str
    driver: str | None
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second between host memory and a device. Up is to the device."""

    num_bytes: int  # of one copy
    up_pinned: float
    down_pinned: float
    up_unpinned: float
    down_unpinned: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a pinned upload and of matrix products, each alone and both at once on two streams."""

    copy_seconds: float
    compute_seconds: float
    together_seconds: float

    @property
    def hidden_fraction(self) -> float:
        """The part of the shorter one that the longer one hides: 1 is full overlap, 0 is one after the other."""
        hidden = self.copy_seconds + self.compute_seconds - self.together_seconds
        return max(0.0, min(1.0, hidden / min(self.copy_seconds, self.compute_seconds)))


def accelerators() -> list[torch.device]:
    """Return every accelerator that torch finds."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [] if kind is None else [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def facts_of(device: torch.device) -> DeviceFacts:
    free, total = torch.accelerator.get_memory_info(device)
    name, driver = _name_and_driver(device)
    return DeviceFacts(str(device), name, driver, total, free)


def _name_and_driver(device: torch.device) -> tuple[str, str | None]:
    module = torch.get_device_module(device)
    # Not every device type has these functions.
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    driver = getattr(properties, "driver_version", None)
    if driver is None and device.type == "cuda":
        from torch.utils import collect_env  # starts nvidia-smi

        driver = collect_env.get_nvidia_driver_version(collect_env.run)
    return str(name), None if driver is None else str(driver)


def copy_size(device: torch.device, most: int) -> int:
    """Return the bytes of one copy: `most`, or less if the device has little free memory."""
    free, _ = torch.accelerator.get_memory_info(device)
    return max(_MIB, min(most, free // _PART_OF_FREE // _MIB * _MIB))


def link_rates(device: torch.device, num_bytes: int) -> LinkRates:
    """Measure each direction alone, from and to pinned and ordinary host memory."""
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def rates(*, pinned: bool) -> tuple[float, float]:
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        up = _best_seconds(device, lambda: there.copy_(here, non_blocking=pinned))
        down = _best_seconds(device, lambda: here.copy_(there, non_blocking=pinned))
        return num_bytes / up, num_bytes / down

    up_pinned, down_pinned = rates(pinned=True)
    up_unpinned, down_unpinned = rates(pinned=False)
    return LinkRates(num_bytes, up_pinned, down_pinned, up_unpinned, down_unpinned)


def both_ways(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second of an upload and a download at once, added."""
    uploaded, downloaded = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    up, down = torch.Stream(device), torch.Stream(device)

    def copy() -> None:
        with up:
            uploaded.copy_(source, non_blocking=True)
        with down:
            target.copy_(downloaded, non_blocking=True)

    return 2 * num_bytes / _best_seconds(device, copy)


def overlap(device: torch.device, num_bytes: int) -> Overlap:
    """Measure a pinned upload beside about as much computation."""
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    matrix = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, device=device)
    product = torch.empty_like(matrix)
    stream = torch.Stream(device)

    def copy() -> None:
        with stream:
            there.copy_(here, non_blocking=True)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)

    def both(count: int) -> None:
        copy()
        compute(count)

    copy_seconds = _best_seconds(device, copy)
    count = round(copy_seconds / _best_seconds(device, lambda: compute(1)))
    count = max(1, min(count, _MAX_MATMULS))
    return Overlap(
        copy_seconds,
        _best_seconds(device, lambda: compute(count)),
        _best_seconds(device, lambda: both(count)),
    )


def _best_seconds(device: torch.device, launch: Callable[[], object]) -> float:
    """The shortest time from launching until the device is done; the first, which sets things up, does not count."""
    launch()
    times = []
    for _ in range(_NUM_ROUNDS):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        launch()
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def peer_access(devices: list[torch.device]) -> str:
    """Say which devices can read each other's memory without the host."""
    if len(devices) < 2:
        return "one device only"
    if devices[0].type != "cuda":
        return f"unknown: torch does not tell for {devices[0].type}"
    pairs = list(itertools.permutations(devices, 2))
    missing = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not missing:
        return "between all devices"
    if len(missing) == len(pairs):
        return "none"
    return "all but " + ", ".join(f"{one} to {other}" for one, other in missing)
