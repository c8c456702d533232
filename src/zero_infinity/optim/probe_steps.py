"""What probes compare updates with: steps of the optimizer itself, with parameters of its own in one of its groups."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity._torch import copy_without_step_hooks, plain_step
from zero_infinity.optim.update_rule import exchanges_weights, hyperparameters_of

# Some optimizers change after the first steps: a bias is rectified, a basis is chosen.
PROBE_STEPS = 8


class PlainSteps:
    """The optimizer itself. The user's own is not changed."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], starts: list[torch.Tensor]) -> None:
        self.values = [start.clone() for start in starts]
        self._optimizer = copy_without_step_hooks(optimizer)
        self._optimizer.state = defaultdict(dict)
        self._optimizer.param_groups = [{**copy.deepcopy(hyperparameters_of(group)), "params": self.values}]
        self._step = plain_step(type(optimizer))

    @property
    def group(self) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.param_groups[0]
        return found

    @property
    def states(self) -> dict[Any, dict[str, Any]]:
        """By parameter, or by whatever else the optimizer uses as a key."""
        return self._optimizer.state

    def step(self, gradients: list[torch.Tensor], method: str = "step") -> None:
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient.clone()
        (self._step if method == "step" else getattr(type(self._optimizer), method))(self._optimizer)

    def keeps_a_gradient(self) -> str | None:
        """Return an attribute of the optimizer that holds memory of a gradient; None if there is none."""
        gradients = {v.grad.untyped_storage().data_ptr() for v in self.values if v.grad is not None and v.numel()}
        for name, value in vars(self._optimizer).items():
            if name not in ("state", "param_groups") and any(
                tensor.numel() and tensor.untyped_storage().data_ptr() in gradients for tensor in _tensors_in(value)
            ):
                return name
        return None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


def probed_calls(optimizer: Optimizer, gradients: list[list[torch.Tensor]]) -> list[tuple[list[torch.Tensor], str]]:
    """What is called, one after the other, and the gradients that are there then."""
    swaps = ("eval", "train") if exchanges_weights(optimizer) else ()
    return [*((now, "step") for now in gradients), *((gradients[-1], method) for method in swaps)]


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return first values, and gradients for each step, always the same."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradients = [[torch.randn(t.shape, generator=generator).to(dtype) for t in starts] for _ in range(PROBE_STEPS)]
    return starts, gradients


def first_line(error: Exception) -> str:
    """What happened, briefly."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
