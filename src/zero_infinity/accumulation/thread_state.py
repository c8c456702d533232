"""What torch keeps for each thread, to go on with it in another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zero_infinity._torch import change_function_modes, top_saved_tensor_hooks


class ThreadState:
    """The state of the thread that makes this."""

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._device = _accelerator()
        kinds = ["cpu"] if self._device is None else ["cpu", self._device.type]
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._stream = torch.accelerator.current_stream() if self._device is not None else None
        self._hooks = top_saved_tensor_hooks()
        self._modes: list[Any] = []
        change_function_modes(self._note)

    def _note(self, modes: list[Any]) -> list[Any]:
        self._modes = modes
        return modes

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, this thread has that state."""
        with ExitStack() as stack:
            if self._device is not None and self._stream is not None:
                torch.accelerator.set_device_index(self._device.index)
                torch.accelerator.set_stream(self._stream)
            change_function_modes(lambda _: list(self._modes))
            stack.callback(change_function_modes, lambda _: [])
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            for kind, dtype, is_enabled in self._autocast:
                if is_enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, is_enabled, self._caches_casts))
            if self._hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            yield


def _accelerator() -> torch.device | None:
    """The accelerator that is current in this thread, if there is one and it was used."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(device.type, torch.accelerator.current_device_index()) if device is not None else None
