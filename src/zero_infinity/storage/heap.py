"""The heap of the C library, which holds what blocks do not: activations, temporaries, and gradients in transit.

Facts about glibc:
- It returns the top of the heap to the kernel as soon as 64 MiB of it are free (at most; less at first), and maps
  allocations above 32 MiB separately. Each step then takes page faults for memory that the previous step returned:
  20,000 to 50,000 for a GPT of 6 x 1024 in plain PyTorch, 3% of its time.
- Small allocations are placed in the holes that tensors leave; the next tensor does not fit, and the heap grows
  although no more of it is in use. 120 MiB of layers that are built and freed one by one leave 130 MiB resident;
  training layers of 1 MiB adds some MiB per step.

Consequence: the heap keeps all its memory (`keep_heap`), and holes are returned by `malloc_trim` when it pays
(`HeapTrimmer`); glibc would not do that by itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from zero_infinity.storage.buffer_pool import BufferPool

_STATM = "/proc/self/statm"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
# Less growth than this does not justify a system call per hole.
_LEAST_GROWTH = 4 << 20


def trim_heap() -> None:
    """Return free memory of the heap to the kernel, where the library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_heap() -> None:
    """Let the heap keep freed memory and serve tensors of every size, where the library can (glibc)."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_TRIM_THRESHOLD, -1)  # never trim automatically
        set_option(_M_MMAP_MAX, 0)


class HeapTrimmer:
    """Trims the heap when holes in it add up.

    Memory that one step frees is what the next step needs: returning it each time would cost its page faults. So the
    heap is trimmed only when it has grown beyond what was ever in use by more than an eighth of the budget, and by more
    than half of what came into use since the baseline. Untrimmed, holes among large activations reach two fifths of
    these and stay there; with lower limits a GPT of 6 x 1024 was trimmed five times per step and spent a twentieth of
    its time in the page faults that followed.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool  # its memory is not part of the heap
        keep_heap()
        # Kept open: it is read some hundred times per step, and opening it takes longer than that.
        self._statm = os.open(_STATM, os.O_RDONLY) if os.path.exists(_STATM) else None
        self.close = weakref.finalize(self, _close, self._statm)
        self.close.atexit = False
        self._baseline = self._needed = self._resident_bytes()

    def trim_if_grown(self) -> None:
        """Trim if the heap has grown. Called when blocks move."""
        growth = max(_LEAST_GROWTH, self._pool.budget // 8, (self._needed - self._baseline) // 2)
        if self._resident_bytes() > self._needed + growth:
            trim_heap()
            # What is still resident is in use: the model needs more than before.
            self._needed = max(self._needed, self._resident_bytes())

    def reset_baseline(self) -> None:
        """Trim, and measure growth from here: a model has moved out of the heap, into blocks."""
        trim_heap()
        self._baseline = self._needed = self._resident_bytes()

    def _resident_bytes(self) -> int:
        if self._statm is None or not self.close.alive:
            return 0
        try:
            fields = os.pread(self._statm, 256, 0).split()
            num_pages = int(fields[1]) - int(fields[2])
        except (OSError, ValueError, IndexError):
            return 0  # another thread closes the store now
        return num_pages * mmap.PAGESIZE - self._pool.mapped_bytes


def _close(statm: int | None) -> None:
    if statm is not None:
        os.close(statm)
