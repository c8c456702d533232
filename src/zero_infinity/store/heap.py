"""The C library's heap, which holds what the engine does not: activations, and gradients on their way.

glibc's threshold for mapping an allocation of its own rises with the first one that is freed, so that later tensors
come from the heap; small allocations then nibble at the holes that they leave, the next tensor does not fit into them,
and the heap grows although no more is in use. 120 MiB of layers that are built and freed one by one leave 130 MiB
resident; training layers of 1 MiB adds some MiB a step. A fixed threshold would avoid it at the price of a page fault
for every page of every activation; `malloc_trim` gives the holes back when there is something to gain.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from zero_infinity.store.buffers import BufferPool

_STATM = "/proc/self/statm"
# Growth of less than this is not worth a system call for every hole.
_LEAST_GROWTH = 4 << 20


def trim_heap() -> None:
    """Give free memory of the heap back to the kernel, where the library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
        self._before = self._needed = self._resident_bytes()

    def look(self) -> None:
        """Blocks are moving: a good moment to see whether the heap has grown."""
        growth = max(_LEAST_GROWTH, self._pool.budget // 8, (self._needed - self._before) // 2)
        if self._resident_bytes() > self._needed + growth:
            trim_heap()
            # What is still there is in use: the model needs more than it did.
            self._needed = max(self._needed, self._resident_bytes())

    def _resident_bytes(self) -> int:
        # Some hundred times a step: a third of what a file object costs.
        try:
            statm = os.open(_STATM, os.O_RDONLY)
        except OSError:
            return 0
        try:
            fields = os.read(statm, 256).split()
        finally:
            os.close(statm)
        return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE - self._pool.mapped_bytes
