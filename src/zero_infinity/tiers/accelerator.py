"""Compute devices and the transfers to and from them: the only interface to accelerators.

Everything above uses `ComputeDevice`: memory for copies of parameters, and the copy operations. Implementations:
- `CpuDevice`: the CPU, computing in another dtype than parameters are stored in.
- `EmulatedAccelerator`: the CPU emulating an accelerator with its own memory behind a slow link, so that three tiers
  and their overlap can be tested and measured without one.
- `TorchAccelerator`: a real device, through `torch.accelerator` and device-generic streams and events. Copies run on
  their own stream, and the compute stream waits for their event. Host memory is pageable, not pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from zero_infinity._torch import num_storage_uses
from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.buffer_pool import BufferPool


class DeviceMemory(Protocol):
    """A piece of device memory."""

    @property
    def leases(self) -> int:
        """Number of live tensors over it."""

    def tensor(self) -> torch.Tensor:
        """Return a new uint8 tensor over it."""

    def release(self) -> None:
        """Free it as soon as no tensor over it is alive."""


class ComputeDevice(Protocol):
    """The device that computes the model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def budget(self) -> int:
        """Bytes available to copies of parameters when the user sets no limit."""

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Allocate memory for a copy; waits until there is room."""

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Copy host memory to the device.

        `source` may be reused when this returns. The returned callable makes `target` safe to use.
        """

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory."""

    def close(self) -> None: ...


class CpuDevice:
    """The CPU, with a byte budget for copies."""

    def __init__(self, budget: int) -> None:
        self.pool = BufferPool(budget, name="compute copies")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def budget(self) -> int:
        return self.pool.budget

    def allocate(self, num_bytes: int) -> Buffer:
        return self.pool.take(num_bytes)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        target.copy_(source)
        return _nothing

    def download(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def close(self) -> None:
        self.pool.close()


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

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        target.copy_(source)
        self._up.carry(source.nbytes)
        return _nothing

    def download(self, source: torch.Tensor) -> torch.Tensor:
        copied = source.clone()
        self._down.carry(source.nbytes)
        return copied


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


class TorchAccelerator:
    """The accelerator that torch finds. Memory comes from torch's allocator, within the cache's byte budget."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def budget(self) -> int:
        """Half of the free memory: the rest is for activations and gradients."""
        free: int = torch.accelerator.get_memory_info(self._device)[0]
        return free // 2

    def allocate(self, num_bytes: int) -> DeviceMemory:
        return _TorchDeviceMemory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        with self._stream:
            # The allocator may have returned memory that the compute stream still reads.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        # The caller may reuse the host buffer when this returns. The copy thread has nothing else to do, so it waits.
        event.synchronize()
        return lambda: torch.accelerator.current_stream(self._device).wait_event(event)

    def download(self, source: torch.Tensor) -> torch.Tensor:
        return source.to("cpu")

    def close(self) -> None:
        torch.accelerator.synchronize(self._device)


class _TorchDeviceMemory:
    """Memory of torch's device allocator; freed when the last tensor over it dies."""

    def __init__(self, base: torch.Tensor) -> None:
        self._base: torch.Tensor | None = base
        # The uses by the base tensor and its wrapper.
        self._own_uses = num_storage_uses(base)

    @property
    def leases(self) -> int:
        if self._base is None:
            return 0
        return num_storage_uses(self._base) - self._own_uses

    def tensor(self) -> torch.Tensor:
        if self._base is None:
            raise RuntimeError("device memory was released")
        return self._base.view(-1)

    def release(self) -> None:
        self._base = None


def _nothing() -> None:
    return None
