"""One parameter's gradient, flat, in host memory or on its way there from the compute device."""

from __future__ import annotations

import time

import torch

from zero_infinity.tiers.compute_device import FINISHED, ComputeDevice, DeviceTransfer
from zero_infinity.trace import DEVICE, HOST, Category, Trace


class FlatGradient:
    """A gradient in the dtype of its optimizer record, to be waited for where it is used."""

    __slots__ = ("_divisor", "_dtype", "_tensor", "_transfer", "nbytes")

    def __init__(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        transfer: DeviceTransfer = FINISHED,
        *,
        divisor: float = 1.0,
    ) -> None:
        self._tensor = tensor
        self._dtype = dtype
        self._transfer = transfer
        self._divisor = divisor
        self.nbytes = tensor.numel() * dtype.itemsize

    @property
    def is_here(self) -> bool:
        return self._transfer.is_done

    def wait(self) -> torch.Tensor:
        """Return the gradient, which may be changed."""
        self._transfer.wait()
        self._transfer = FINISHED
        if self._tensor.dtype != self._dtype:
            self._tensor = self._tensor.to(self._dtype)
        if self._divisor != 1:
            self._tensor.div_(self._divisor)
            self._divisor = 1.0
        return self._tensor


def download(
    flat: torch.Tensor,
    dtype: torch.dtype,
    accelerator: ComputeDevice,
    unit_name: str,
    trace: Trace | None,
    *,
    divisor: float,
) -> FlatGradient:
    """Start to copy a flat gradient into host memory, in its own dtype: it is converted to `dtype` there."""
    start = time.perf_counter()
    here, transfer = accelerator.download(flat)
    if trace is not None:
        seconds = time.perf_counter() - start
        trace.span(unit_name, Category.GRADIENT, f"{DEVICE} to {HOST}", start, seconds, here.nbytes)
    return FlatGradient(here, dtype, transfer, divisor=divisor)
