"""Anonymous memory from the kernel: map, unmap and move whole pages, and view them as bytes.

Thin wrappers over libc. They keep no state: `arena.py` decides which pages to map and which to reuse.

Kernel facts:
- Python's `mmap.mmap(-1, n)` is MAP_SHARED: it is charged as page cache, gets no huge pages and cannot be unmapped in
  parts. malloc keeps freed memory, per thread. So memory is mapped here, through libc, with MAP_PRIVATE |
  MAP_ANONYMOUS: it costs nothing until it is touched, and munmap accepts any range of whole pages.
- A huge page (2 MiB) needs an aligned 2 MiB range inside one mapping and, under the usual setting ("madvise"), also
  MADV_HUGEPAGE. It makes page faults 512 times rarer, and direct I/O pins 512 times fewer pages.
- mremap moves pages to another address without touching their bytes: a huge page is one page table entry, where a fresh
  one costs a fault and 2 MiB of zeros. It accepts one mapping at a time (several since Linux 6.17), and
  pages from different places remain different mappings.
- A private mapping is copied on write after a fork, so munmap in a child does not affect its parent.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from zero_infinity.errors import CapacityError
from zero_infinity.policy.alignment import ALIGNMENT, HUGE_PAGE_BYTES

PAGE_BYTES = max(ALIGNMENT, mmap.PAGESIZE)

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
    """The address of the first byte. By numpy, because ctypes does not accept read-only memory."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def move_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, which may overlap. Releases the GIL."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


def map_pages(num_bytes: int) -> int:
    """Map `num_bytes` (whole pages) of zeros; return the address, aligned to 2 MiB if the size is 2 MiB or more."""
    if num_bytes < HUGE_PAGE_BYTES:
        return _mmap(num_bytes, _READ_WRITE)
    start = reserve_addresses(num_bytes)
    if _libc.mprotect(start, num_bytes, _READ_WRITE) != 0:
        error = _refusal("map", num_bytes)
        unmap_pages(start, num_bytes)
        raise error
    # Only advice: a kernel without huge pages rejects it, and small pages are used.
    _libc.madvise(start, num_bytes, mmap.MADV_HUGEPAGE)
    return start


def reserve_addresses(num_bytes: int) -> int:
    """Reserve `num_bytes` of addresses, aligned to 2 MiB; not accessible until mprotect, or until pages move there."""
    # mmap guarantees page alignment only, so map with some slack and unmap the slack. Memory without access is not
    # charged, so never more than `num_bytes` can become resident. The kernel maps downwards: the highest aligned
    # address is adjacent to the previous mapping, and the two coalesce.
    base = _mmap(num_bytes, _PROT_NONE, slack=HUGE_PAGE_BYTES)
    start = (base + HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    slack_above = base + HUGE_PAGE_BYTES - start
    unmap_pages(base, start - base)
    if slack_above:
        unmap_pages(start + num_bytes, slack_above)
    return start


def move_huge_page(source: int, destination: int) -> bool:
    """Move one huge page to a reserved address; False if the kernel refuses (it may be out of mappings)."""
    size = HUGE_PAGE_BYTES
    return int(_libc.mremap(source, size, size, _MREMAP_MAYMOVE_FIXED, destination)) == destination


def unmap_pages(address: int, num_bytes: int) -> None:
    """Unmap a range of whole pages, which may be any part of what was mapped."""
    if _libc.munmap(address, num_bytes) != 0:
        raise _refusal("unmap", num_bytes)


def view_memory(address: int, num_bytes: int) -> memoryview:
    """A writable view. It does not keep the memory mapped."""
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
