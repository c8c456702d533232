"""Limits a thread's torch operations to one core, for work in parallel to the compute thread.

Facts behind the code:
- libgomp counts the threads of all teams. Once there are more of them than cores, threads no longer spin while they
  wait for work: each parallel region of the model then starts by waking other cores. A worker that created one team of
  two slowed a step with 1/8 of its states in memory by 5%, for the rest of the process.
- At its first operation that needs the number of threads, a thread takes the number last set by `torch.set_num_threads`
  in any thread: what it has set for itself before is lost.
- Any call of `torch.set_num_threads`, in any thread, turns off MKL's dynamic number of threads for the process, and
  with it the kernels that make attention fast: it takes 12% longer from then on.

So the number is set where it is stored per thread: in the OpenMP library that torch is linked with. Matrix products ask
MKL, which has a separate setting if the user has set one; optimizers on slices have no matrix products.

An optimizer that sums over a whole parameter, or multiplies matrices, gives other bits with another number of threads.
`cores` gives such an update the number that plain PyTorch would have used, and every update if the model computes on an
accelerator: then the cores have nothing else to do.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_infinity._torch import libtorch_path

_one_core = threading.local()


def use_one_core() -> None:
    """Run the calling thread's operations on one core from now on; other threads are not affected."""
    torch.get_num_threads()  # initialises the setting, so that the following one is kept
    _set_num_threads(1)
    _one_core.is_set = True


@contextmanager
def cores(num_threads: int) -> Iterator[None]:
    """Inside, a thread that uses one core uses `num_threads`; other threads are not affected."""
    if num_threads == 1 or not getattr(_one_core, "is_set", False):
        yield
        return
    before = torch.get_num_threads()
    _set_num_threads(num_threads)
    try:
        yield
    finally:
        _set_num_threads(before)


def _set_num_threads(num_threads: int) -> None:
    # Symbols are also searched in a library's dependencies, so this works with any OpenMP library.
    set_num_threads = getattr(ctypes.CDLL(libtorch_path()), "omp_set_num_threads", None)
    if set_num_threads is not None:  # some builds of torch have no OpenMP
        set_num_threads(num_threads)
