"""Parameters trained in place, in memory, without a unit: complex ones, and those without elements.

As in plain PyTorch, their gradients stay on them until `zero_grad()`, and their states are in the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity._torch import copy_without_step_hooks
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import RESIDENT
from zero_infinity.optim.update_rule import hyperparameters_of
from zero_infinity.policy.partition import Span


class ResidentParameters:
    """The parameters of `optimizer` that belong to no unit."""

    def __init__(self, optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def has(self, parameter: torch.Tensor) -> bool:
        return parameter in self._parameters

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the norm of each existing gradient."""
        return {p: torch.linalg.vector_norm(p.grad) for p in self._parameters if p.grad is not None}

    def average(self, channel: Channel) -> None:
        """Replace each gradient by its average over ranks; a missing gradient counts as zeros."""
        said = channel.agree(RESIDENT, [parameter.grad is not None for parameter in self._parameters])
        for number, parameter in enumerate(self._parameters):
            if not any(has[number] for has in said) or not parameter.numel():
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat = torch.view_as_real(mine) if mine.is_complex() else mine
            rows = torch.empty(channel.num_ranks, flat.numel(), dtype=flat.dtype)
            rows[channel.rank] = flat.reshape(-1)
            spans = [Span(rank * flat.numel(), (rank + 1) * flat.numel()) for rank in range(channel.num_ranks)]
            channel.gather(RESIDENT, [(rows.view(-1), spans)])
            average = rows[0]
            for row in rows[1:]:
                average = average + row
            average = (average / channel.num_ranks).view(flat.shape).to(parameter.device)
            parameter.grad = torch.view_as_complex(average) if mine.is_complex() else average

    def step(self, factors: Iterable[torch.Tensor]) -> None:
        """Update with the gradients, multiplied by `factors` first."""
        with torch.no_grad():
            for gradient in [p.grad for p in self._parameters if p.grad is not None]:
                for factor in factors:
                    gradient.mul_(factor)
        self.call("step")

    def call(self, method: str) -> None:
        """Call a method of the optimizer for them alone."""
        if not self._parameters:
            return
        # A shallow copy shares the states but has none of the user's hooks, which are called for the whole step.
        stepper: Any = copy_without_step_hooks(self._optimizer)
        stepper.param_groups = [
            {**hyperparameters_of(group), "params": [p for p in group["params"] if p in self._parameters]}
            for group in self._optimizer.param_groups
        ]
        with torch.no_grad():
            getattr(type(self._optimizer), method)(stepper)

    def zero_grad(self, *, set_to_none: bool) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def state(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return the optimizer state of one of them; None if there is none."""
        return self._optimizer.state.get(parameter) if parameter in self._parameters else None
