"""One parameter's gradient, flat, in host memory or on its way there from the compute device."""

from __future__ import annotations

import torch

from zero_infinity.tiers.compute_device import FINISHED, Transfer


class FlatGradient:
    """A gradient in the dtype of its optimizer record, to be waited for where it is used."""

    __slots__ = ("_dtype", "_tensor", "_transfer", "nbytes")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, transfer: Transfer = FINISHED) -> None:
        self._tensor = tensor
        self._dtype = dtype
        self._transfer = transfer
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
        return self._tensor
