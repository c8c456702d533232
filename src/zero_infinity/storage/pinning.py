"""Pinned host memory: registers mapped memory with an accelerator, for asynchronous copies.

Owns the calls to the accelerator's runtime that register mapped memory. `Arena` decides what to register and when; a
`BufferPool` that is given no `Pinning`, as those of the engine, uses pageable memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_infinity.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Pinning:
    """The calls that pin and unpin host memory."""

    register: Callable[[int, int], None]  # (address, num_bytes)
    unregister: Callable[[int], None]  # (address) of a whole registration
    synchronize: Callable[[], None]  # returns when no copy is in flight


def accelerator_pinning() -> Pinning | None:
    """Pinning for the current accelerator; None without one, or if it has no call to register memory."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return None
    runtime = torch.cuda.cudart()

    def register(address: int, num_bytes: int) -> None:
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error != 0:
            raise CapacityError(
                f"the accelerator refused to pin {num_bytes:,} bytes of host memory (error {error})\n"
                "  fix:   a smaller memory=..., or a higher limit on locked memory: `ulimit -l`"
            )

    def unregister(address: int) -> None:
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

    return Pinning(register, unregister, torch.accelerator.synchronize)
