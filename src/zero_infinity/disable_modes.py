"""Disables the user's torch modes inside the engine, so that its own tensors are ordinary ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_infinity._torch import inside_func_transform, inside_mode, no_func_transforms, no_modes


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Ignores the user's inference_mode, torch.func transform, FakeTensorMode and default device inside."""
    if not inside_func_transform() and not inside_mode() and not torch.is_inference_mode_enabled():
        yield
        return
    with no_func_transforms(), torch.inference_mode(False), no_modes():
        yield
