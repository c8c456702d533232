"""Compute devices: the memory that computes the model, and the transfers to and from it.

Everything above uses `ComputeDevice`. Implementations:
- `CpuDevice`: the CPU, computing in another dtype than parameters are stored in.
- `torch_accelerator.TorchAccelerator`: an accelerator that torch knows.
- `emulated_accelerator.EmulatedAccelerator`: the CPU behind a slow link, to measure overlap without an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from zero_infinity.storage.buffer import Buffer
from zero_infinity.storage.buffer_pool import BufferPool


class DeviceTransfer(Protocol):
    """A copy between host and device that may still be under way."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until the copy is done: its source may be reused, its target read by the host."""

    def order(self) -> None:
        """Make what this thread launches on the device from now on run after the copy. Blocks no thread."""


class DeviceMemory(Protocol):
    """A piece of device memory."""

    @property
    def leases(self) -> int:
        """Number of live tensors over it."""

    def tensor(self) -> torch.Tensor:
        """Return a new uint8 tensor over it."""

    def used(self) -> None:
        """What this thread launches on the device from now on may use it, until it is released."""

    def release(self) -> None:
        """Free it as soon as no tensor over it is alive and the device has done what was launched with it."""


class ComputeDevice(Protocol):
    """The device that computes the model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def budget(self) -> int:
        """Bytes for copies of parameters."""

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Allocate memory for a copy; waits until there is room."""

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> DeviceTransfer:
        """Copy host memory to the device. `source` must not change before the transfer is done."""

    def uploading(self) -> AbstractContextManager[None]:
        """Inside, what this thread launches runs in the order of uploads."""

    def uploaded(self) -> DeviceTransfer:
        """Return what was launched inside `uploading`, and all uploads, so far."""

    def download(self, source: torch.Tensor) -> tuple[torch.Tensor, DeviceTransfer]:
        """Return a copy in host memory, to be read when the transfer is done. `source` may be freed at once."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, written: torch.Event | None) -> DeviceTransfer:
        """Copy device memory in the order of uploads, once `written` has happened. Converts dtypes."""

    def computed(self) -> torch.Event | None:
        """Return an event after what this thread has launched so far; None if that is done already."""

    def set_aside(self, num_bytes: int) -> None:
        """Take these bytes from the budget for copies: something else lives there."""

    def close(self) -> None: ...


class FinishedTransfer:
    """A copy that was made at once."""

    is_done = True

    def wait(self) -> None:
        """Nothing to wait for."""

    def order(self) -> None:
        """Nothing to order."""


FINISHED = FinishedTransfer()


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

    def allocate(self, num_bytes: int) -> DeviceMemory:
        return CpuMemory(self.pool.take(num_bytes))

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> DeviceTransfer:
        target.copy_(source)
        return FINISHED

    def uploading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def uploaded(self) -> DeviceTransfer:
        return FINISHED

    def download(self, source: torch.Tensor) -> tuple[torch.Tensor, DeviceTransfer]:
        return source, FINISHED

    def copy(self, source: torch.Tensor, target: torch.Tensor, written: torch.Event | None) -> DeviceTransfer:  # noqa: ARG002 - the CPU has written it
        target.copy_(source)
        return FINISHED

    def computed(self) -> torch.Event | None:
        return None

    def set_aside(self, num_bytes: int) -> None:
        self.pool.charge(num_bytes)

    def close(self) -> None:
        self.pool.close()


class CpuMemory:
    """A buffer of a pool."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    @property
    def leases(self) -> int:
        return self._buffer.leases

    def tensor(self) -> torch.Tensor:
        return self._buffer.tensor()

    def used(self) -> None:
        """Nothing to note: the CPU computes when it is called."""

    def release(self) -> None:
        self._buffer.release()


def memory_of(pool: BufferPool) -> Callable[[int], DeviceMemory]:
    """Return a function that allocates host memory from a pool."""
    return lambda num_bytes: CpuMemory(pool.take(num_bytes))


def memory_to_compute_into(device: ComputeDevice) -> Callable[[int], DeviceMemory]:
    """Return a function that allocates memory of a device which this thread's kernels, and not uploads, write first."""

    def allocate(num_bytes: int) -> DeviceMemory:
        memory = device.allocate(num_bytes)
        device.uploaded().order()  # its earlier contents may still be on their way
        return memory

    return allocate
