"""The engine's own tensors are ordinary ones, wherever in the user's code it has been called from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """In here the user's inference_mode, torch.func transform, FakeTensorMode or default device does not count."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not transformed and not modes and not torch.is_inference_mode_enabled():
        yield
        return
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False), _disable_current_modes():
        yield
