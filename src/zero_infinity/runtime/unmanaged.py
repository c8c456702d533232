"""Parameters that are trained where they are, in memory: complex ones, and those without elements.

They are no part of any unit: their gradients stay on them until `zero_grad()`, and their states are where the user's
optimizer keeps them, all as in plain PyTorch.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class UnmanagedParameters:
    """The parameters of `optimizer` that no unit has."""

    def __init__(self, optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """The norm of each gradient that there is."""
        return {p: torch.linalg.vector_norm(p.grad) for p in self._parameters if p.grad is not None}

    def step(self, factors: Iterable[torch.Tensor]) -> None:
        """Update with the gradients, which are multiplied by `factors` first."""
        if not self._parameters:
            return
        # A shallow copy shares the states, and has none of the user's hooks, which are called for the whole step.
        stepper: Any = copy.copy(self._optimizer)
        stepper._optimizer_step_pre_hooks = OrderedDict()
        stepper._optimizer_step_post_hooks = OrderedDict()
        stepper.param_groups = [
            {**group, "params": [p for p in group["params"] if p in self._parameters]}
            for group in self._optimizer.param_groups
        ]
        with torch.no_grad():
            for gradient in [p.grad for p in self._parameters if p.grad is not None]:
                for factor in factors:
                    gradient.mul_(factor)
            type(self._optimizer).step(stepper)

    def zero_grad(self, *, set_to_none: bool) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def state(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The optimizer's state of one of them; None if there is none."""
        return self._optimizer.state.get(parameter) if parameter in self._parameters else None
