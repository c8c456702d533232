"""The most memory that everything but the engine's cache has taken on a device at once, from torch's own statistics.

torch counts the peak of all tensors together. While the bytes of the cache do not change, that peak less these bytes is
what the others took. So the peak is read, and begins anew, before and after each change of the cache.
"""

from __future__ import annotations

import torch


class OthersPeak:
    """What others have needed on one device since `watch`. Resets torch's statistic of the peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_watching = False
        self.num_bytes = 0

    def watch(self) -> None:
        """Measure from now on."""
        self._is_watching = True
        self.num_bytes = 0
        self.restart()

    def stop(self) -> None:
        """Leave torch's statistics alone from now on."""
        self._is_watching = False

    def note(self, cache_bytes: int) -> None:
        """The cache has held these bytes since the last call."""
        if self._is_watching:
            peak = torch.accelerator.memory.max_memory_allocated(self._device)
            self.num_bytes = max(self.num_bytes, peak - cache_bytes)

    def restart(self) -> None:
        """From now on the cache holds another number of bytes."""
        if self._is_watching:
            torch.accelerator.memory.reset_peak_memory_stats(self._device)

    def capacity(self) -> int:
        """Return the bytes that tensors of this process may take in total: held, kept for reuse by torch, or free."""
        free, _ = torch.accelerator.get_memory_info(self._device)
        return free + torch.accelerator.memory.memory_reserved(self._device)

    def num_failures(self) -> int:
        """Return how often the device had no memory for a tensor, and torch raised an error."""
        return int(torch.accelerator.memory.memory_stats(self._device).get("num_ooms", 0))
