"""What forwards leave behind besides their graph: losses, random states, buffers. To compare it, and to undo it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zero_infinity._torch import own_buffers
from zero_infinity.accumulation.random_states import RandomState, random_state
from zero_infinity.params.changing_buffers import BufferBefore


class Before:
    """Random states and buffers before forwards."""

    def __init__(self, model: nn.Module, names: set[str] | None, device: torch.device) -> None:
        """`names`: of buffers; None for all."""
        self._random = random_state(device)
        self._buffers: dict[str, BufferBefore] = {}
        for prefix, owner in model.named_modules():
            for name, buffer in own_buffers(owner).items():
                full_name = f"{prefix}.{name}"
                if buffer is not None and (names is None or full_name in names):
                    self._buffers[full_name] = BufferBefore(owner, name, buffer, buffer.detach().clone())

    def put_back(self) -> None:
        self._random.put_back()
        for buffer in self._buffers.values():
            buffer.put_back()

    def changed_names(self) -> set[str]:
        return {name for name, buffer in self._buffers.items() if buffer.has_changed}

    def buffers(self) -> dict[str, torch.Tensor | None]:
        """Return copies of what they are now."""
        now = {name: own_buffers(b.owner).get(b.name) for name, b in self._buffers.items()}
        return {name: buffer.detach().clone() if buffer is not None else None for name, buffer in now.items()}


@dataclass(frozen=True, slots=True)
class After:
    """What forwards have left behind."""

    losses: list[torch.Tensor]
    random: RandomState
    buffers: dict[str, torch.Tensor | None]

    def difference(self, loop: After) -> str:
        """Return how this differs from what the loop has left; empty if it does not."""
        for number, (mine, its) in enumerate(zip(self.losses, loop.losses, strict=True)):
            if not same_bits(mine, its):
                return f"layer by layer, the loss of micro-batch {number} is {mine.item()}, not {its.item()}"
        if not self.random.equals(loop.random):
            return "layer by layer, it draws other random numbers"
        for name, buffer in loop.buffers.items():
            if not same_bits(self.buffers[name], buffer):
                return f"layer by layer, the buffer {name.lstrip('.')!r} gets another value"
        return ""


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)
