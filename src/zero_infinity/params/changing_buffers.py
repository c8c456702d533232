"""Buffers that a module's forward changes (the statistics of a batch norm), to run that forward again as it was.

Which ones change is seen in the first forward, by value: batch norm kernels do not bump version counters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from zero_infinity._torch import own_buffers


class BufferBefore(NamedTuple):
    """A buffer and its value before a forward."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    before: torch.Tensor

    def put_back(self) -> None:
        """The buffer has its earlier value again."""
        with torch.no_grad():
            self.buffer.copy_(self.before)
        own_buffers(self.owner)[self.name] = self.buffer

    @property
    def has_changed(self) -> bool:
        now = own_buffers(self.owner).get(self.name)
        return now is not self.buffer or not torch.equal(self.before, self.buffer)


class ChangingBuffers:
    """The buffers in `module` that its forward may change: all of them, until one forward has shown which."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: list[tuple[nn.Module, str]] | None = None

    def before(self) -> list[BufferBefore]:
        """Return copies of their values, before a forward."""
        names = self._names
        if names is None:
            names = [(m, n) for m in self._module.modules() for n, b in own_buffers(m).items() if b is not None]
        found = ((owner, name, own_buffers(owner)[name]) for owner, name in names)
        return [BufferBefore(o, n, b, b.detach().clone()) for o, n, b in found if b is not None]

    def after(self, before: list[BufferBefore]) -> None:
        """A forward has ended. After the first one, `before` keeps only what it has changed."""
        if self._names is None:
            before[:] = [b for b in before if b.has_changed]
            self._names = [(b.owner, b.name) for b in before]
