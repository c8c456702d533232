"""A thread whose torch operations use one core: for work beside the thread that computes the model.

Facts that decide the code:
- libgomp counts the threads of all teams. From the moment that there are more of them than cores, nobody waits for work
  awake any more: each parallel region of the model then begins by waking other cores up. A worker that made one team of
  two cost a step with 1/8 of its states in memory 5%, for the rest of the process.
- A thread takes the number that was last set with `torch.set_num_threads`, by any thread, at its first operation that
  asks for it: whatever it has set for itself before is lost.
- Any call of `torch.set_num_threads`, in any thread, turns off MKL's own choice of a number of threads for the process,
  and with it the kernels that attention is fast with: it takes 12% longer from then on.

So the number is set where it is kept for each thread: in the OpenMP library that torch was linked with. Products of
matrices ask MKL, which has a number of its own where the user has set one; optimizers on slices have none.
"""

from __future__ import annotations

import ctypes

import torch

from zero_infinity._torch import libtorch_path


def use_one_core() -> None:
    """The calling thread's operations run on one core from now on; nothing changes for other threads."""
    torch.get_num_threads()  # asks, so that what follows stays
    # Symbols of a library are also looked for in those that it needs, whichever OpenMP that is.
    set_num_threads = getattr(ctypes.CDLL(libtorch_path()), "omp_set_num_threads", None)
    if set_num_threads is not None:  # there are builds of torch without OpenMP
        set_num_threads(1)
