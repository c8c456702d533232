"""One piece of memory for everything that lives from forward to backward: ZeRO-R's M_D.

Activations that are kept lie between others that die at once, and leave holes when they go. Here they are copied into
one tensor on the device that computes: it is as large as the fullest moment of all steps so far, and stays. The first
step has none yet, and tells how large it has to be; what exceeds it later has memory of its own until that step ends.
"""

from __future__ import annotations

import torch

from zero_infinity.policy.sizes import round_up
from zero_infinity.storage.free_extents import FreeExtents


class ActivationArena:
    """A shelf in the memory of the device that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._extents = FreeExtents(_full)
        self._num_inside = 0  # slots that are not on memory of their own
        self.held_bytes = 0
        self._most_bytes = 0  # held at any moment so far

    @property
    def total_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def room(self) -> int:
        """Memory of torch's has no limit that is known here."""
        return 1 << 62

    def put(self, data: torch.Tensor) -> ArenaSlot:
        size = round_up(data.nbytes)
        self.held_bytes += size
        self._most_bytes = max(self._most_bytes, self.held_bytes)
        try:
            start = self._extents.allocate(data.nbytes)
        except _FullError:
            return ArenaSlot(self, None, data.clone())
        self._num_inside += 1
        kept = self._memory[start : start + data.nbytes]
        kept.copy_(data)
        return ArenaSlot(self, start, kept)

    def end_cycle(self) -> None:
        """Grow to what was needed, unless a graph that is still to be used has something here."""
        if self._most_bytes > self._memory.nbytes and not self._num_inside:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)  # the old one first: never both
            self._memory = torch.empty(self._most_bytes, dtype=torch.uint8, device=self._device)
            self._extents = FreeExtents(_full)
            self._extents.add(0, self._most_bytes)

    def give_back(self, start: int | None, num_bytes: int) -> None:
        self.held_bytes -= round_up(num_bytes)
        if start is not None:
            self._num_inside -= 1
            self._extents.free(start, num_bytes)


class ArenaSlot:
    """A part of the arena, or (there was no room) memory of its own."""

    __slots__ = ("_arena", "_kept", "_start")

    def __init__(self, arena: ActivationArena, start: int | None, kept: torch.Tensor) -> None:
        self._arena = arena
        self._start = start
        self._kept = kept

    def take(self, into: torch.Tensor) -> None:
        into.copy_(self._kept)
        self.drop()

    def drop(self) -> None:
        self._arena.give_back(self._start, self._kept.nbytes)


class _FullError(Exception):
    """No free range is large enough."""


def _full(_: int) -> int:
    raise _FullError
