"""Pinned host memory: registers mapped memory with an accelerator, for asynchronous copies.

Owns the calls to the accelerator's runtime. `Arena` decides what to register and when; a `BufferPool` that is given no
`Pinning` uses pageable memory, and uploads go through a ring of pinned buffers (`tiers/pinned_ring.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_infinity.errors import CapacityError
from zero_infinity.storage.numa import cores_near, running_near


@dataclass(frozen=True, slots=True)
class Pinning:
    """The calls that pin and unpin host memory."""

    register: Callable[[int, int], None]  # (address, num_bytes)
    unregister: Callable[[int], None]  # (address) of a whole registration
    synchronize: Callable[[], None]  # returns when no copy is in flight


def accelerator_pinning(device: torch.device) -> Pinning | None:
    """Pinning for copies to and from a device; None if its runtime has no call to register memory."""
    make_runtime = getattr(torch.get_device_module(device), "cudart", None)  # CUDA, and ROCm under the same name
    if make_runtime is None:
        return None
    runtime = make_runtime()
    near = cores_near(device)

    def register(address: int, num_bytes: int) -> None:
        with running_near(near):  # the pages are touched here first
            error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error != 0:
            raise CapacityError(
                f"the accelerator refused to pin {num_bytes:,} bytes of host memory (error {error})\n"
                "  fix:   a smaller memory=..., or a higher limit on locked memory: `ulimit -l`"
            )

    def unregister(address: int) -> None:
        error = int(runtime.cudaHostUnregister(address))
        if error != 0:
            raise RuntimeError(f"the accelerator did not unpin host memory (error {error})")

    return Pinning(register, unregister, lambda: torch.accelerator.synchronize(device))
