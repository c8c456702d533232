"""The allocator of host memory: mapped ranges that nobody uses, kept for the next buffer.

Kernel facts that decide the design (see also `pages`):
- munmap of a part of a huge page leaves the rest as small pages, and the kernel reclaims the unmapped part only under
  memory pressure. So ranges are cut at huge-page boundaries where possible.
- A process may have 65,530 mappings (vm.max_map_count). Adjacent ones count as one, so only live buffers with holes on
  both sides add up.

Consequences: map large, aligned regions and keep freed ranges for reuse. When free memory is fragmented, move free huge
pages side by side. If that is not enough, unmap fragments and map the requested size anew. Fragmentation then costs
system calls and page faults, never memory.

`Arena` owns the free ranges and the registration of mapped regions with an accelerator. It has no budget (each call
passes a limit), does not know who uses the memory, and takes no lock: `BufferPool` provides all three.
"""

from __future__ import annotations

import bisect

from zero_infinity.policy.alignment import HUGE_PAGE_BYTES, round_up
from zero_infinity.storage.pages import map_pages, move_huge_page, reserve_addresses, unmap_pages
from zero_infinity.storage.pinning import Pinning

# Free huge pages are moved only while no more than this is mapped: each may end as a mapping of its own, and together
# they may take a quarter of the mappings that a process can have. A larger pool can afford fragments.
_MAX_MOVABLE_BYTES = (65_530 // 4) * HUGE_PAGE_BYTES


class Arena:
    """Mapped memory: taken ranges belong to the caller, free ranges wait in a free list."""

    def __init__(self, pinning: Pinning | None = None) -> None:
        self.mapped_bytes = 0  # taken and free
        self._pinning = pinning
        self._free: dict[int, int] = {}  # start -> size
        self._start_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        # start -> end of each registration. A copy may not cross from one registration into the next, so free ranges do
        # not coalesce across these borders. Empty without pinning.
        self._registered: dict[int, int] = {}

    def take(self, num_bytes: int, *, limit: int) -> int:
        """Return the address of `num_bytes` (whole pages), with at most `limit` bytes mapped afterwards.

        The caller has checked that all taken ranges and `num_bytes` are within the limit together.
        """
        best = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if best == len(self._by_size) and self._gather(round_up(num_bytes, HUGE_PAGE_BYTES)):
            best = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if best < len(self._by_size):
            size, start = self._by_size[best]
        else:
            # Small buffers share a huge page, unless the limit leaves no room for a whole one.
            size = round_up(num_bytes, HUGE_PAGE_BYTES)
            if self.mapped_bytes + size > limit:
                size = num_bytes
            self.shrink(limit - size)
            start = self._map(size)
            self.give(start, size)
            # It may have coalesced with the range below it; the result is now the best fit.
            size, start = self._by_size[bisect.bisect_left(self._by_size, (num_bytes, 0))]
        self._remove(start)
        if size > num_bytes:
            self._insert(start + num_bytes, size - num_bytes)
        return start

    def give(self, address: int, num_bytes: int) -> None:
        """Return a range to the free list."""
        end = address + num_bytes
        below = self._start_by_end.get(address)
        if below is not None and address not in self._registered:
            self._remove(below)
            address = below
        above = self._free.get(end)
        if above is not None and end not in self._registered:
            self._remove(end)
            end += above
        self._insert(address, end - address)

    def shrink(self, limit: int) -> None:
        """Unmap free memory until at most `limit` bytes are mapped, smallest (least useful) ranges first."""
        while (excess := self.mapped_bytes - limit) > 0:
            size, start = self._by_size[0]
            keep = max(0, (start + size - excess) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - start)
            self._unmap(start + keep, size - keep)
            self._remove(start)
            if keep:
                self._insert(start, keep)

    def _gather(self, num_bytes: int) -> bool:
        """Move free huge pages, from the smallest ranges first, into one range; False if there are too few."""
        if self._pinning is not None or self.mapped_bytes > _MAX_MOVABLE_BYTES:
            return False  # registered memory cannot be moved
        runs = self._runs_of_huge_pages(num_bytes)
        if sum(len(run) for _, run in runs) * HUGE_PAGE_BYTES < num_bytes:
            return False
        start = end = reserve_addresses(num_bytes)
        for free, run in runs:
            moved = 0
            while moved < len(run) and move_huge_page(run[moved], end):
                moved += 1
                end += HUGE_PAGE_BYTES
            self._cut_out(free, run.start, moved * HUGE_PAGE_BYTES)
            if moved < len(run):
                unmap_pages(end, start + num_bytes - end)
                break
        if end > start:
            self.give(start, end - start)
        return end == start + num_bytes

    def _runs_of_huge_pages(self, num_bytes: int) -> list[tuple[int, range]]:
        """Starts of free ranges with the addresses of whole huge pages in them, `num_bytes` in total at most."""
        runs: list[tuple[int, range]] = []
        missing = num_bytes
        for size, start in self._by_size:
            pages = range(round_up(start, HUGE_PAGE_BYTES), start + size - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
            if pages and missing:
                runs.append((start, pages[: missing // HUGE_PAGE_BYTES]))
                missing -= len(runs[-1][1]) * HUGE_PAGE_BYTES
        return runs

    def _cut_out(self, start: int, address: int, num_bytes: int) -> None:
        """Remove `num_bytes` at `address` from the free range that begins at `start`."""
        end = start + self._free[start]
        self._remove(start)
        for begin, stop in ((start, address), (address + num_bytes, end)):
            if begin < stop:
                self._insert(begin, stop - begin)

    def clear(self) -> None:
        """Unregister everything and unmap free ranges. Taken ranges are from now on unmapped by their owners."""
        if self._pinning is not None and self._registered:
            self._pinning.synchronize()
            for start in self._registered:
                self._pinning.unregister(start)
            self._registered.clear()
        for start, size in list(self._free.items()):
            self._remove(start)
            unmap_pages(start, size)
        self.mapped_bytes = 0

    def _map(self, num_bytes: int) -> int:
        start = map_pages(num_bytes)
        if self._pinning is not None:
            try:
                self._pinning.register(start, num_bytes)
            except BaseException:
                unmap_pages(start, num_bytes)
                raise
            self._registered[start] = start + num_bytes
        self.mapped_bytes += num_bytes
        return start

    def _unmap(self, address: int, num_bytes: int) -> None:
        rest: list[tuple[int, int]] = []
        if self._pinning is not None:
            # Only a whole registration can be undone, so what remains mapped on either side is registered again.
            region = max(start for start in self._registered if start <= address)
            end = self._registered.pop(region)
            rest = [(region, address), (address + num_bytes, end)]
            self._pinning.synchronize()
            self._pinning.unregister(region)
        unmap_pages(address, num_bytes)
        self.mapped_bytes -= num_bytes
        for start, end in rest:
            if self._pinning is not None and start < end:
                self._pinning.register(start, end - start)
                self._registered[start] = end

    def _insert(self, start: int, size: int) -> None:
        self._free[start] = size
        self._start_by_end[start + size] = start
        bisect.insort(self._by_size, (size, start))

    def _remove(self, start: int) -> None:
        size = self._free.pop(start)
        del self._start_by_end[start + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
