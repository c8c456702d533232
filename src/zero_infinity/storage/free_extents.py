"""Free byte ranges of an address space.

Best fit with coalescing; the address space grows only when no free range is large enough. Bookkeeping only: it moves no
bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from zero_infinity.policy.alignment import round_up


class FreeExtents:
    """Allocates offsets; `grow(num_bytes)` returns the offset of a new range of that size."""

    def __init__(self, grow: Callable[[int], int]) -> None:
        self._grow = grow
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int:
        """The offset of a range of `num_bytes`, rounded up to ALIGNMENT."""
        size = round_up(num_bytes)
        fitting = [start for start in self._starts if self._sizes[start] >= size]
        if not fitting:
            return self._grow(size)
        start = min(fitting, key=self._sizes.__getitem__)
        self._carve(start, size)
        return start

    def free(self, start: int, num_bytes: int) -> None:
        """Free the range that `allocate(num_bytes)` returned."""
        self.add(start, round_up(num_bytes))

    def add(self, start: int, size: int) -> None:
        """Add a free range."""
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes.pop(self._starts.pop(index))
        if index and self._starts[index - 1] + self._sizes[self._starts[index - 1]] == start:
            self._sizes[self._starts[index - 1]] += size
            return
        self._starts.insert(index, start)
        self._sizes[start] = size

    def _carve(self, start: int, size: int) -> None:
        index = bisect.bisect_left(self._starts, start)
        rest = self._sizes.pop(start) - size
        if rest:
            self._starts[index] = start + size
            self._sizes[start + size] = rest
        else:
            del self._starts[index]
