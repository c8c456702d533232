"""The C library's heap, which holds what the engine does not: activations, and gradients on their way.

glibc's facts:
- It gives the top of the heap back as soon as 64 MiB of it are free (at most; less at first), and maps what is larger
  than 32 MiB apart. Each step then takes page faults for the memory that the one before gave back: 20,000 to 50,000
  in a GPT of 6 x 1024 in plain PyTorch, 3% of its time.
- Small allocations nibble at the holes that tensors leave, the next tensor does not fit into them, and the heap grows
  although no more is in use. 120 MiB of layers that are built and freed one by one leave 130 MiB resident; training
  layers of 1 MiB adds some MiB a step.

This means: the heap keeps all that it has (`keep_heap`), and holes are given back by `malloc_trim` when there is
something to gain (`HeapWatch`), which glibc would not do by itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from zero_infinity.storage.buffer_pool import BufferPool

_STATM = "/proc/self/statm"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
# Growth of less than this is not worth a system call for every hole.
_LEAST_GROWTH = 4 << 20


def trim_heap() -> None:
    """Give free memory of the heap back to the kernel, where the library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_heap() -> None:
    """Let the heap keep what is freed, and serve tensors of every size, where the library can (glibc)."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_TRIM_THRESHOLD, -1)  # never by itself
        set_option(_M_MMAP_MAX, 0)


class HeapWatch:
    """Keeps holes in the heap from adding up.

    What a step leaves behind free is what the next one needs: giving that back each time would cost its page faults. So
    the heap is trimmed only when it has grown beyond what was ever in use: by more than an eighth of the budget, and by
    more than half of what came into use since the engine began. Left alone, holes among large activations come to two
    fifths of these and stay there; with less patience a GPT of 6 x 1024 was trimmed five times a step, and a twentieth
    of its time went into the page faults after that.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool  # its memory is not the heap's
        keep_heap()
        # Open all the time: it is read some hundred times a step, and opening it takes longer than that.
        self._statm = _open_statm()
        self.close = weakref.finalize(self, _close, self._statm)
        self.close.atexit = False
        self._before = self._needed = self._resident_bytes()

    def look(self) -> None:
        """Blocks are moving: a good moment to see whether the heap has grown."""
        growth = max(_LEAST_GROWTH, self._pool.budget // 8, (self._needed - self._before) // 2)
        if self._resident_bytes() > self._needed + growth:
            trim_heap()
            # What is still there is in use: the model needs more than it did.
            self._needed = max(self._needed, self._resident_bytes())

    def begin_anew(self) -> None:
        """What was in use until now is so no more: a model has moved out of the heap, into blocks."""
        trim_heap()
        self._before = self._needed = self._resident_bytes()

    def _resident_bytes(self) -> int:
        if self._statm is None or not self.close.alive:
            return 0
        try:
            fields = os.pread(self._statm, 256, 0).split()
            num_pages = int(fields[1]) - int(fields[2])
        except (OSError, ValueError, IndexError):
            return 0  # another thread closes the store now
        return num_pages * mmap.PAGESIZE - self._pool.mapped_bytes


def _open_statm() -> int | None:
    try:
        return os.open(_STATM, os.O_RDONLY)
    except OSError:
        return None


def _close(statm: int | None) -> None:
    if statm is not None:
        os.close(statm)
