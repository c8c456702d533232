"""Runs a model's forward again after the device has run out of memory in it, with a smaller cache of parameters.

The second run is as the first one would have been: random states and buffers that forward changes are put back. It is
not tried if that may not be enough: an argument is an object with a state of its own (a key-value cache), or a tensor
that the forward has changed in place. What the model's own code has noted elsewhere (a counter in Python) is noted
twice, as under `torch.utils.checkpoint`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from zero_infinity._torch import call_of, tree_leaves, version_of
from zero_infinity.params.changing_buffers import BufferBefore, ChangingBuffers
from zero_infinity.params.dynamo import not_compiled, not_traced
from zero_infinity.params.uncopied_hook import Hook

# Arguments without a state that a forward could change.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Room(Protocol):
    """The device memory of the model's cache."""

    def begin_forward(self) -> None: ...

    def end_forward(self) -> None: ...

    def shrink(self, when: str) -> bool:
        """The device ran out of memory; False if the cache cannot be smaller."""


class ForwardAgain(Hook):
    """Calls a model, and calls it again where the device ran out of memory. A copy of the model is a plain one."""

    def __init__(self, model: nn.Module, device: torch.device, room: Room) -> None:
        self._call = call_of(model)
        self._buffers = ChangingBuffers(model)
        self._device = device
        self._room = room

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self._begin(args, kwargs)
        while True:
            try:
                result = self._call(*args, **kwargs)
            except torch.OutOfMemoryError:
                if not self._makes_room(before):
                    raise
            else:
                self._end(before)
                return result
            # Only here are the frames of the failed forward gone, and with them its activations.
            before.put_back()

    @not_compiled
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Before:
        self._room.begin_forward()
        return _Before(self._device, self._buffers.before(), tree_leaves((args, kwargs)))

    @not_compiled
    def _makes_room(self, before: _Before) -> bool:
        return before.can_return and self._room.shrink("in the model's forward")

    @not_compiled
    def _end(self, before: _Before) -> None:
        self._buffers.after(before.buffers)
        self._room.end_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._call,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied: Callable[..., Any] = copy.deepcopy(self._call, memo)
        return copied


class _Before:
    """What a forward may change, as it was before."""

    def __init__(self, device: torch.device, buffers: list[BufferBefore], arguments: list[Any]) -> None:
        self.buffers = buffers
        self._device_module = torch.get_device_module(device)
        self._device = device
        self._random = torch.get_rng_state(), self._device_module.get_rng_state(device)
        self._versions = [(leaf, _version(leaf)) for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self._has_objects = not all(isinstance(leaf, (torch.Tensor, *_CONSTANTS)) for leaf in arguments)

    @property
    def can_return(self) -> bool:
        """True if `put_back` leaves no trace of a forward."""
        return not self._has_objects and all(_version(tensor) == version for tensor, version in self._versions)

    @not_compiled
    def put_back(self) -> None:
        torch.set_rng_state(self._random[0])
        self._device_module.set_rng_state(self._random[1], self._device)
        for buffer in self.buffers:
            buffer.put_back()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _itself(value: Any) -> Any:
    return value
