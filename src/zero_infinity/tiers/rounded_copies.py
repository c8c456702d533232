"""Copies of values that may have fewer bits: which edits of a copy change the value, and how much of them is kept."""

from __future__ import annotations

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def take_edits(value: torch.Tensor, copy: torch.Tensor) -> None:
    """Change the elements of `value` that differ from its copy: those that the user has edited there."""
    if value.dtype == copy.dtype:
        value.copy_(copy)
        return
    # The others stay: they may have more bits than the copy. Bits are compared, so that -0 can become 0.
    bits = _BITS[copy.dtype.itemsize]
    is_same = value.to(copy.dtype).view(bits) == copy.view(bits)
    torch.where(is_same, value, copy.to(value.dtype), out=value)


def round_to(dtype: torch.dtype, copy: torch.Tensor) -> None:
    """Round an edited copy to the precision of the stored value: extra bits would be missing from the next copy."""
    if copy.dtype != dtype:
        copy.copy_(copy.to(dtype))
