"""Anonymous memory taken from the kernel, and the free list over it.

The kernel's facts:
- Python's `mmap.mmap(-1, n)` is MAP_SHARED: it is charged as page cache, gets no huge pages and cannot be given
  back in parts. malloc keeps what was freed, per thread. So memory is mapped here, through libc, with
  MAP_PRIVATE | MAP_ANONYMOUS; it costs nothing until it is touched, and munmap takes any range of whole pages.
- A huge page (2 MiB) needs an address and a length of 2 MiB inside one mapping, and under the usual setting
  ("madvise") also MADV_HUGEPAGE. With it a fault costs 1/512 and direct I/O pins 512 times fewer pages.
- munmap of a part of a huge page leaves the other part as small pages, and the kernel takes the freed part back
  only under pressure. So ranges are cut on huge-page boundaries where that is possible.
- mremap moves pages to another address without touching their bytes: a huge page is one entry of a page table, where a
  fresh one is a fault and 2 MiB of zeros. It takes one mapping at a time (several since Linux 6.17), and pages from
  different places stay different mappings.
- A private mapping is copied on write after a fork, so a child's munmap touches nothing of its parent's.
- A process may have 65,530 mappings (vm.max_map_count). Neighbours count as one, so it is live buffers with holes
  on both sides that add up.

This means: map large, aligned regions, keep what was freed for the next taker, and, when free memory lies in
pieces that are too small, move free huge pages side by side. Where these do not suffice, give pieces back and map the
wanted size afresh. Fragmentation then costs system calls and page faults, never memory.

`Arena` owns the mapped ranges that nobody uses, and the registration of regions with an accelerator. It knows
neither budgets (each call brings its limit), nor who uses the memory, nor locks: the pool above does.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from zero_infinity.errors import CapacityError
from zero_infinity.policy.sizes import ALIGNMENT, HUGE_PAGE_BYTES, round_up

PAGE_BYTES = max(ALIGNMENT, mmap.PAGESIZE)

# Free huge pages are moved while no more than this is mapped: each may end as a mapping of its own, a quarter of what a
# process may have by default. A pool beyond that has room for pieces.
_MAX_MOVABLE_BYTES = (65_530 // 4) * HUGE_PAGE_BYTES

_MREMAP_MAYMOVE_FIXED = 1 | 2
_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_ssize_t  # an address, or -1
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_ssize_t
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
_PYBUF_WRITE = 0x200


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def move_bytes(target: memoryview, source: memoryview) -> None:
    """Copy what may overlap, while other Python threads go on."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


def map_pages(num_bytes: int) -> int:
    """Map `num_bytes` (whole pages) of fresh zeros; return the address, huge-page aligned from 2 MiB on."""
    if num_bytes < HUGE_PAGE_BYTES:
        return _mmap(num_bytes, _READ_WRITE)
    start = _aligned_place(num_bytes)
    if _libc.mprotect(start, num_bytes, _READ_WRITE) != 0:
        error = _refusal("map", num_bytes)
        unmap_pages(start, num_bytes)
        raise error
    # Advice: a kernel without huge pages refuses it, and then there are none.
    _libc.madvise(start, num_bytes, mmap.MADV_HUGEPAGE)
    return start


def _aligned_place(num_bytes: int) -> int:
    """Addresses for `num_bytes` from a multiple of 2 MiB on, without access yet."""
    # mmap promises page alignment only, so look for a place with some slack, and give the slack back. Addresses
    # without access are not charged: at no moment more than `num_bytes` could become memory. The kernel maps
    # downwards: the highest aligned place is the one next to the mapping before, with which it then coalesces.
    base = _mmap(num_bytes, _PROT_NONE, slack=HUGE_PAGE_BYTES)
    start = (base + HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    slack_above = base + HUGE_PAGE_BYTES - start
    unmap_pages(base, start - base)
    if slack_above:
        unmap_pages(start + num_bytes, slack_above)
    return start


def _move_huge_page(source: int, destination: int) -> bool:
    """Whether the kernel did: it may be out of mappings."""
    size = HUGE_PAGE_BYTES
    return int(_libc.mremap(source, size, size, _MREMAP_MAYMOVE_FIXED, destination)) == destination


def unmap_pages(address: int, num_bytes: int) -> None:
    """Give a range of whole pages back to the kernel; it may be any part of what was mapped."""
    if _libc.munmap(address, num_bytes) != 0:
        raise _refusal("unmap", num_bytes)


def view_memory(address: int, num_bytes: int) -> memoryview:
    """A writable view, which does not keep the memory mapped."""
    view: memoryview = _view_of_memory(address, num_bytes, _PYBUF_WRITE)
    return view


def _mmap(num_bytes: int, protection: int, slack: int = 0) -> int:
    address = int(_libc.mmap(None, num_bytes + slack, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    if address == -1:
        raise _refusal("map", num_bytes)
    return address


def _refusal(verb: str, num_bytes: int) -> CapacityError:
    reason = os.strerror(ctypes.get_errno())
    free, total = (os.sysconf(key) * mmap.PAGESIZE for key in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return CapacityError(
        f"the kernel refused to {verb} {num_bytes:,} bytes of memory: {reason}"
        f" ({free:,} of the machine's {total:,} bytes are free)\n"
        "  fix:   a smaller memory=..., or a higher limit: `ulimit -v`, vm.overcommit_memory, vm.max_map_count"
    )


@dataclass(frozen=True, slots=True)
class Pinning:
    """How host memory is made known to an accelerator, so that copies to and from it run asynchronously."""

    register: Callable[[int, int], None]  # (address, num_bytes)
    unregister: Callable[[int], None]  # (address), of a whole registration
    synchronize: Callable[[], None]  # returns when no copy is in flight


def accelerator_pinning() -> Pinning | None:
    """The pinning of the accelerator in use; None when there is none, or it has no call to pin memory with."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return None
    runtime = torch.cuda.cudart()

    def register(address: int, num_bytes: int) -> None:
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error != 0:
            raise CapacityError(f"the accelerator refused to pin {num_bytes:,} bytes of host memory (error {error})")

    def unregister(address: int) -> None:
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

    return Pinning(register, unregister, torch.accelerator.synchronize)


class Arena:
    """Mapped memory: what is taken is its taker's, what is free waits in a free list."""

    def __init__(self, pinning: Pinning | None = None) -> None:
        self.mapped_bytes = 0  # taken and free
        self.num_remaps = 0  # ranges mapped and unmapped so far: stands still in a steady state
        self._pinning = pinning
        self._free: dict[int, int] = {}  # start -> size
        self._start_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        # start -> end of what was registered in one call. A copy may not cross from one registration into the
        # next, so free ranges do not coalesce over these borders. Empty without pinning.
        self._registered: dict[int, int] = {}

    def take(self, num_bytes: int, *, limit: int) -> int:
        """Return the address of `num_bytes` (whole pages), with no more than `limit` bytes mapped after it.

        The caller has made sure that what is taken already and `num_bytes` are within the limit.
        """
        best = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if best == len(self._by_size) and self._gather(round_up(num_bytes, HUGE_PAGE_BYTES)):
            best = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if best < len(self._by_size):
            size, start = self._by_size[best]
        else:
            # Small buffers share huge pages, unless there is room for no more than what was asked for.
            size = round_up(num_bytes, HUGE_PAGE_BYTES)
            if self.mapped_bytes + size > limit:
                size = num_bytes
            self.shrink(limit - size)
            start = self._map(size)
            self.give(start, size)
            # It may have joined a neighbour below it, and is now what fits best.
            size, start = self._by_size[bisect.bisect_left(self._by_size, (num_bytes, 0))]
        self._remove(start)
        if size > num_bytes:
            self._insert(start + num_bytes, size - num_bytes)
        return start

    def give(self, address: int, num_bytes: int) -> None:
        """Back into the free list."""
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
        """Unmap free memory until no more than `limit` bytes are mapped: the smallest pieces, the least useful."""
        while (excess := self.mapped_bytes - limit) > 0:
            size, start = self._by_size[0]
            keep = max(0, (start + size - excess) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - start)
            self._unmap(start + keep, size - keep)
            self._remove(start)
            if keep:
                self._insert(start, keep)

    def _gather(self, num_bytes: int) -> bool:
        """Move free huge pages, those of the smallest ranges first, until `num_bytes` lie side by side; False when
        there are too few. What is registered with an accelerator stays where it is."""
        if self._pinning is not None or self.mapped_bytes > _MAX_MOVABLE_BYTES:
            return False
        runs = self._runs_of_huge_pages(num_bytes)
        if sum(len(run) for _, run in runs) * HUGE_PAGE_BYTES < num_bytes:
            return False
        start = end = _aligned_place(num_bytes)
        for free, run in runs:
            moved = 0
            while moved < len(run) and _move_huge_page(run[moved], end):
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
        """Free ranges, by their start, with the addresses of whole huge pages in them: `num_bytes` in all, or fewer."""
        runs: list[tuple[int, range]] = []
        missing = num_bytes
        for size, start in self._by_size:
            pages = range(round_up(start, HUGE_PAGE_BYTES), start + size - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
            if pages and missing:
                runs.append((start, pages[: missing // HUGE_PAGE_BYTES]))
                missing -= len(runs[-1][1]) * HUGE_PAGE_BYTES
        return runs

    def _cut_out(self, start: int, address: int, num_bytes: int) -> None:
        """`num_bytes` of the free range from `start` on are gone."""
        end = start + self._free[start]
        self._remove(start)
        for begin, stop in ((start, address), (address + num_bytes, end)):
            if begin < stop:
                self._insert(begin, stop - begin)

    def clear(self) -> None:
        """Unregister everything and unmap what is free. What is taken is from now on its taker's to unmap."""
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
        self.num_remaps += 1
        return start

    def _unmap(self, address: int, num_bytes: int) -> None:
        rest: list[tuple[int, int]] = []
        if self._pinning is not None:
            # A registration ends as a whole, so what stays mapped on either side is registered again.
            region = max(start for start in self._registered if start <= address)
            end = self._registered.pop(region)
            rest = [(region, address), (address + num_bytes, end)]
            self._pinning.synchronize()
            self._pinning.unregister(region)
        unmap_pages(address, num_bytes)
        self.mapped_bytes -= num_bytes
        self.num_remaps += 1
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
