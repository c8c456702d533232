"""Times each module of a real model, forward and backward, for a plan with measured times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Times each module of a real model, from its begin to that of the next: what lies between is the first one's."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: defaultdict[str, float] = defaultdict(float)
        self.backward: defaultdict[str, float] = defaultdict(float)
        self._current: tuple[dict[str, float], str, float] | None = None
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._starter(self.forward, name))
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(self._follower(name))

    def _starter(self, phase: dict[str, float], name: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            self.stop()
            self._current = (phase, name, time.perf_counter())

        return start

    def _follower(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """A module's backward begins when the gradient of its output is there."""

        def follow(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._starter(self.backward, name))

        return follow

    def stop(self) -> None:
        """Nothing runs now that counts."""
        if self._current is not None:
            phase, name, since = self._current
            phase[name] += time.perf_counter() - since
            self._current = None

    def take(self) -> dict[str, tuple[float, float]]:
        """Forward and backward seconds of each module since the last time."""
        self.stop()
        names = {*self.forward, *self.backward}
        seconds = {name: (self.forward[name], self.backward[name]) for name in names}
        self.forward.clear()
        self.backward.clear()
        return seconds
