"""Copies between host memory and tensors on a device, for a thread of their own, which may wait for them.

For what is no copy of a unit: saved tensors. Host memory that is not pinned goes through a ring of pinned buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_infinity.tiers.compute_device import DeviceTransfer
from zero_infinity.tiers.pinned_ring import PinnedRing


class Link:
    """Both directions of one device's link. Used by one thread."""

    def __init__(
        self,
        up: torch.Stream,
        down: torch.Stream,
        ring: PinnedRing,
        transfer: Callable[[torch.Event], DeviceTransfer],
        make_room: Callable[[], None],
    ) -> None:
        self._up = up
        self._down = down
        self._ring = ring
        self._transfer = transfer
        self._make_room = make_room

    def download(self, source: torch.Tensor, target: torch.Tensor, computed: torch.Event) -> None:
        """Copy a tensor that is there after `computed` into host memory, and wait for it."""
        with self._down:
            self._down.wait_event(computed)
            if target.is_pinned():
                target.copy_(source, non_blocking=True)
                self._down.record_event().synchronize()
            else:
                self._ring.download(source, target, self._down)

    def upload(self, source: torch.Tensor) -> tuple[torch.Tensor, DeviceTransfer]:
        """Return a copy in new device memory. `source` must not change before the transfer is done.

        The memory belongs to the stream of uploads: who uses it elsewhere calls `record_stream`.
        """
        with self._up:
            target = self._empty(source)
            if source.is_pinned():
                target.copy_(source, non_blocking=True)
            else:
                self._ring.upload(source, target, self._up)
            return target, self._transfer(self._up.record_event())

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        try:
            return torch.empty_like(like, device=self._up.device)
        except torch.OutOfMemoryError:
            self._make_room()
            return torch.empty_like(like, device=self._up.device)
