"""An index of byte ranges: finds those that overlap a given range without a scan over all of them.

Owns sorted lists of ranges; it does not know what a range means.

Ranges are grouped by size class (lengths below 2, 4, 8, ... bytes) and sorted by start. In the class below 2**k a range
that overlaps [start, stop) begins after start - 2**k, so the candidates are one slice of the list, and nearly all of
them do overlap. With one list for all sizes every look-up would be as wide as the longest range.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RangeIndex(Generic[Item]):
    """Items, each with a byte range and a unique key."""

    def __init__(self) -> None:
        # (start, key, stop, item); keys are unique, so items are never compared.
        self._classes: dict[int, list[tuple[int, int, int, Item]]] = {}

    def add(self, start: int, stop: int, key: int, item: Item) -> None:
        """Add `item` for [start, stop); `key` distinguishes it from others with the same start."""
        insort(self._classes.setdefault((stop - start).bit_length(), []), (start, key, stop, item))

    def remove(self, start: int, stop: int, key: int) -> None:
        entries = self._classes[(stop - start).bit_length()]
        index = bisect_left(entries, (start, key))
        if index == len(entries) or entries[index][:3] != (start, key, stop):
            raise KeyError((start, stop, key))
        del entries[index]

    def overlapping(self, start: int, stop: int) -> list[Item]:
        """The items whose range overlaps [start, stop)."""
        found: list[Item] = []
        for size_class, entries in self._classes.items():
            first = bisect_left(entries, (start - (1 << size_class) + 1,))
            last = bisect_left(entries, (stop,), lo=first)
            found.extend(entry[3] for entry in entries[first:last] if entry[2] > start)
        return found
