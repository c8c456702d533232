"""A ring of pinned host buffers, through which unpinned memory is copied to a device and back.

A copy from pageable memory blocks the thread that starts it. A buffer of the ring is filled by the CPU, which also
converts dtypes, and copied to the device while the next one is filled.
"""

from __future__ import annotations

import torch

_NUM_BUFFERS = 3
_MAX_BUFFER_BYTES = 8 << 20
_MIN_BUFFER_BYTES = 64 << 10


class PinnedRing:
    """Used by one thread."""

    def __init__(self, budget: int) -> None:
        self._buffer_bytes = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, budget // 16))
        self._buffers: list[torch.Tensor] = []  # made when they are first needed
        self._events: list[torch.Event | None] = []
        self._next = 0

    def upload(self, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> None:
        """Copy host elements into a device tensor of as many elements, on the current stream, which is `stream`.

        `source` may be reused when this returns.
        """
        step = self._buffer_bytes // target.element_size()
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            place = self._free_buffer()
            staged = self._buffers[place][: part.nbytes].view(target.dtype)
            staged.copy_(source[start : start + step])
            part.copy_(staged, non_blocking=True)
            self._events[place] = stream.record_event()

    def download(self, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> None:
        """Copy a device tensor into as many host elements, on the current stream, which is `stream`; waits for it.

        While one buffer is emptied the next one is filled.
        """
        step = self._buffer_bytes // source.element_size()
        filling: tuple[torch.Tensor, torch.Tensor, torch.Event] | None = None
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            place = self._free_buffer()
            staged = self._buffers[place][: part.nbytes].view(source.dtype)
            staged.copy_(part, non_blocking=True)
            event = self._events[place] = stream.record_event()
            self._empty(filling)
            filling = target[start : start + step], staged, event
        self._empty(filling)

    @staticmethod
    def _empty(filling: tuple[torch.Tensor, torch.Tensor, torch.Event] | None) -> None:
        if filling is not None:
            target, staged, event = filling
            event.synchronize()
            target.copy_(staged)

    def _free_buffer(self) -> int:
        """Return the number of a buffer that no copy reads."""
        place = self._next
        self._next = (place + 1) % _NUM_BUFFERS
        if place == len(self._buffers):
            self._buffers.append(torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=True))
            self._events.append(None)
        event = self._events[place]
        if event is not None:
            event.synchronize()
        return place
