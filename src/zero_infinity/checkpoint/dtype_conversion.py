"""Tensors that are in memory as they are (buffers, complex parameters), as bytes of a file."""

from __future__ import annotations

from typing import Any

import torch

from zero_infinity.checkpoint.safetensors_header import NAMES
from zero_infinity.errors import UsageError


def as_real(value: torch.Tensor) -> torch.Tensor:
    """What a tensor in memory is in a file: complex numbers are pairs."""
    value = value.detach()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def bytes_of(value: torch.Tensor) -> Any:
    """The bytes of a tensor in memory, row by row, as an array."""
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def dtype_name(value: torch.Tensor, name: str) -> str:
    """What a tensor is saved in; an error when it cannot be."""
    if value.layout is not torch.strided or value.dtype not in NAMES:
        raise UsageError(f"{name!r} is a {value.dtype} tensor ({value.layout}), which cannot be saved")
    return NAMES[value.dtype]
