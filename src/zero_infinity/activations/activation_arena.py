"""One contiguous buffer for activations that live from forward to backward (ZeRO-R's M_D: no fragmentation).

Saved activations lie between short-lived ones and leave holes when they are freed. Here they are copied into one tensor
on the compute device, which is as large as the peak of all steps so far and stays allocated. The first step has no
arena yet and determines its size; later tensors that exceed it get separate memory until that step ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from zero_infinity.activations.activation_storage import ActivationSlot
from zero_infinity.policy.alignment import round_up
from zero_infinity.storage.free_extents import FreeExtents


class ActivationArena:
    """Storage for saved tensors in one buffer on the compute device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._extents = FreeExtents(_full)
        self._num_inside = 0  # slots inside the arena
        self.held_bytes = 0
        self._most_bytes = 0  # peak of held bytes so far

    @property
    def total_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def room(self) -> int:
        """No known limit: memory comes from torch's allocator."""
        return 1 << 62

    def put(self, data: torch.Tensor, root: torch.Tensor) -> ActivationSlot:  # noqa: ARG002 - copied at once
        """Store bytes in the arena, or in separate memory if there is no room."""
        size = round_up(data.nbytes)
        self.held_bytes += size
        self._most_bytes = max(self._most_bytes, self.held_bytes)
        try:
            start = self._extents.allocate(data.nbytes)
        except _FullError:
            return _ArenaSlot(data.clone(), partial(self._give_back, None, data.nbytes))
        self._num_inside += 1
        kept = self._memory[start : start + data.nbytes]
        kept.copy_(data)
        return _ArenaSlot(kept, partial(self._give_back, start, data.nbytes))

    def end_cycle(self) -> None:
        """Grow to the peak, unless a live graph still has slots in the arena."""
        if self._most_bytes > self._memory.nbytes and not self._num_inside:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)  # free the old one first
            self._memory = torch.empty(self._most_bytes, dtype=torch.uint8, device=self._device)
            self._extents = FreeExtents(_full)
            self._extents.add(0, self._most_bytes)

    def _give_back(self, start: int | None, num_bytes: int) -> None:
        self.held_bytes -= round_up(num_bytes)
        if start is not None:
            self._num_inside -= 1
            self._extents.free(start, num_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class _ArenaSlot:
    """Bytes in the arena, or in separate memory."""

    kept: torch.Tensor
    drop: Callable[[], None]

    def take(self) -> torch.Tensor:
        taken = self.kept.clone()
        self.drop()
        return taken


class _FullError(Exception):
    """No free range is large enough."""


def _full(_: int) -> int:
    raise _FullError
