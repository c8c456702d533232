"""An accelerator that torch knows: its memory, and copies over its link on streams of their own.

Nothing here blocks the thread that computes. Uploads run on one stream, downloads on another; the computing stream
waits for an upload by an event, and a download waits for the computing stream. Memory that computing kernels may still
read is reused at once, by an upload that waits for them on the device.

Streams, events and copies use public, device-generic torch API only (`torch.accelerator`, `torch.Stream`,
`torch.Event`). Downloads and the ring take pinned memory from torch, which may round it up: it is outside the budget.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_infinity._torch import num_storage_uses
from zero_infinity.tiers.compute_device import DeviceTransfer
from zero_infinity.tiers.link import Link
from zero_infinity.tiers.others_peak import OthersPeak
from zero_infinity.tiers.pinned_ring import PinnedRing


class StreamTransfer:
    """A copy on a stream, and the event after it."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device = device
        self._event = event

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)


class TorchAccelerator:
    """One accelerator, with a byte budget for copies of parameters.

    `is_measured`: the budget is a share of what was free, and not chosen by the user.
    """

    def __init__(self, device: torch.device, budget: int, *, is_measured: bool = False) -> None:
        self._device = indexed(device)
        self.is_measured = is_measured
        self._up = torch.Stream(self._device)
        self._down = torch.Stream(self._device)
        self._reduce = torch.Stream(self._device)
        self.memory = MemoryPool(self._device, self._up, budget)
        self._ring = PinnedRing(budget)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def budget(self) -> int:
        return self.memory.budget

    def allocate(self, num_bytes: int) -> StreamMemory:
        return self.memory.take(num_bytes)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> DeviceTransfer:
        with self._up:
            if source.dtype == target.dtype and source.is_pinned():
                target.copy_(source, non_blocking=True)
            else:
                self._ring.upload(source, target, self._up)
            return StreamTransfer(self._device, self._up.record_event())

    def copy(self, source: torch.Tensor, target: torch.Tensor, written: torch.Event | None) -> DeviceTransfer:
        with self._up:
            if written is not None:
                self._up.wait_event(written)
            target.copy_(source)
            return StreamTransfer(self._device, self._up.record_event())

    def set_aside(self, num_bytes: int) -> None:
        self.memory.limit(self.memory.budget - num_bytes)

    def download(self, source: torch.Tensor) -> tuple[torch.Tensor, DeviceTransfer]:
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        computed = torch.accelerator.current_stream(self._device).record_event()
        with self._down:
            self._down.wait_event(computed)
            target.copy_(source, non_blocking=True)
            event = self._down.record_event()
        source.record_stream(self._down)  # its memory must not be reused before it is copied
        return target, StreamTransfer(self._device, event)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Inside, this thread launches on the stream of uploads, in their order."""
        with self._up:
            yield

    def uploaded(self) -> DeviceTransfer:
        """Return what is launched on the stream of uploads so far."""
        return StreamTransfer(self._device, self._up.record_event())

    def link(self) -> Link:
        """Return copies for another thread than the one that uploads units."""
        ring = PinnedRing(self.budget)
        return Link(
            self._up, self._down, ring, lambda event: StreamTransfer(self._device, event), self.memory.give_back
        )

    def computed(self) -> torch.Event:
        """Return an event after what this thread has launched so far."""
        return torch.accelerator.current_stream(self._device).record_event()

    @contextmanager
    def reducing(self, computed: torch.Event) -> Iterator[None]:
        """Inside, this thread launches on the stream of reductions, after `computed`."""
        with self._reduce:
            self._reduce.wait_event(computed)
            yield

    def reduced(self) -> StreamTransfer:
        """Return what is launched on the stream of reductions so far."""
        return StreamTransfer(self._device, self._reduce.record_event())

    def read_by_reduction(self, gradient: torch.Tensor) -> None:
        """The memory of this gradient is reused only after what the stream of reductions does until now."""
        gradient.record_stream(self._reduce)

    def close(self) -> None:
        torch.accelerator.synchronize(self._device)
        self.memory.is_closed = True


class StreamMemory:
    """Memory that copies are uploaded into and computing streams read."""

    __slots__ = ("_base", "_own_uses", "_pool", "_streams")

    def __init__(self, base: torch.Tensor, pool: MemoryPool) -> None:
        self._base: torch.Tensor | None = base
        self._own_uses = num_storage_uses(base)  # by the base tensor and its wrapper
        self._pool = pool
        self._streams: dict[torch.Stream, None] = {}

    @property
    def leases(self) -> int:
        return 0 if self._base is None else num_storage_uses(self._base) - self._own_uses

    def tensor(self) -> torch.Tensor:
        if self._base is None:
            raise RuntimeError("device memory was released")
        return self._base.view(-1)

    def used(self) -> None:
        self._streams[torch.accelerator.current_stream(self._pool.device)] = None

    def release(self) -> None:
        if self._base is None:
            return
        base, self._base = self._base, None
        leased = num_storage_uses(base) > self._own_uses
        self._pool.give(base, list(self._streams), is_leased=leased)

    def __del__(self) -> None:
        # Not released: the model is gone, and its last kernels may not have run.
        if self._base is not None and not self._pool.is_closed:
            for stream in self._streams:
                self._base.record_stream(stream)


class MemoryPool:
    """Device memory within a byte budget, reused by size. All of it is allocated and first written on one stream."""

    def __init__(self, device: torch.device, stream: torch.Stream, budget: int) -> None:
        self.device = device
        self.budget = budget
        self.others = OthersPeak(device)
        self._stream = stream
        self._lock = threading.Lock()
        self._held_bytes = 0  # in use, and free
        self.is_closed = False  # nothing is launched on its memory any more
        self._free: list[tuple[torch.Tensor, list[torch.Event]]] = []  # the events after its last uses

    @property
    def held_bytes(self) -> int:
        """Bytes in use, and free ones kept for reuse."""
        return self._held_bytes

    def limit(self, budget: int) -> None:
        """Change the budget; free memory beyond it goes back to torch."""
        with self._lock:
            self.budget = budget
            self._trim()

    def give_back(self) -> None:
        """Return everything that is not in use to the device. Waits for it."""
        with self._lock:
            self._give_back()

    def take(self, num_bytes: int) -> StreamMemory:
        """Return memory that the stream may write to: it waits for what still reads it, this thread does not."""
        with self._lock, self._stream:
            found = next((place for place, (base, _) in enumerate(self._free) if base.numel() == num_bytes), None)
            if found is None:
                base = self._allocate(num_bytes)
            else:
                base, events = self._free.pop(found)
                self._wait_for(events)
        return StreamMemory(base, self)

    def give(self, base: torch.Tensor, streams: list[torch.Stream], *, is_leased: bool) -> None:
        """The memory is no longer needed; these streams have used it."""
        with self._lock:
            if is_leased:
                # A user's tensor is alive: torch frees the memory with it, after what these streams do until then.
                for stream in streams:
                    base.record_stream(stream)
                self.others.note(self._held_bytes)
                self._held_bytes -= base.numel()
                self.others.restart()
            else:
                self._free.append((base, [stream.record_event() for stream in streams]))
                self._trim()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self.others.note(self._held_bytes)
        self._trim(num_bytes)
        try:
            base = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            # The user's activations have grown, or memory is fragmented.
            self._give_back()
            base = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._held_bytes += num_bytes
        self.others.restart()
        return base

    def _trim(self, num_bytes: int = 0) -> None:
        """Drop free memory until this much more fits in the budget."""
        if self._free and self._held_bytes + num_bytes > self.budget:
            self.others.note(self._held_bytes)
            while self._free and self._held_bytes + num_bytes > self.budget:
                self._drop_oldest()
            self.others.restart()

    def _give_back(self) -> None:
        self.others.note(self._held_bytes)
        while self._free:
            self._drop_oldest()
        torch.accelerator.memory.empty_cache()  # waits for the device
        self.others.restart()

    def _drop_oldest(self) -> None:
        """Return free memory to torch, which gives it to this stream only: the stream waits for its last uses."""
        base, events = self._free.pop(0)
        self._wait_for(events)
        self._held_bytes -= base.numel()

    def _wait_for(self, events: list[torch.Event]) -> None:
        for event in events:
            self._stream.wait_event(event)


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index: "cuda" means another device in another thread."""
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
