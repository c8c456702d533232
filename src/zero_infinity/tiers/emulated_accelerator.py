"""An emulated accelerator: the CPU with memory of its own behind a slow link.

It measures how transfers over links of a given bandwidth overlap with computation. It does not test asynchronous
execution: its copies are made at once.
"""

from __future__ import annotations

import threading
import time

import torch

from zero_infinity.tiers.compute_device import FINISHED, CpuDevice, DeviceTransfer


class EmulatedAccelerator(CpuDevice):
    """A CPU that emulates an accelerator: its own memory, and a link of given bandwidth and latency per direction."""

    def __init__(self, memory: int, *, bytes_per_second: float = 12e9, latency_seconds: float = 1e-5) -> None:
        super().__init__(memory)
        self._up = SlowLink(bytes_per_second, latency_seconds)
        self._down = SlowLink(bytes_per_second, latency_seconds)

    @property
    def bytes_uploaded(self) -> int:
        return self._up.num_bytes

    @property
    def bytes_downloaded(self) -> int:
        return self._down.num_bytes

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> DeviceTransfer:
        target.copy_(source)
        self._up.carry(source.nbytes)
        return FINISHED

    def download(self, source: torch.Tensor) -> tuple[torch.Tensor, DeviceTransfer]:
        copied = source.clone()
        self._down.carry(source.nbytes)
        return copied, FINISHED


class SlowLink:
    """Delays each transfer as a link of this bandwidth would; transfers are queued."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.num_bytes = 0

    def carry(self, num_bytes: int) -> None:
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + num_bytes / self._bytes_per_second
            done = self._free_at + self._latency_seconds
            self.num_bytes += num_bytes
        time.sleep(max(0.0, done - time.monotonic()))
