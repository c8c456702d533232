"""Dynamic loss scaling for models that compute in float16, without changes to the training loop.

Gradients of float16 activations underflow, so they are scaled up where they enter the model and scaled down before the
update. They enter through the model's outputs: each output passes through an identity whose backward multiplies by the
scale. (A hook on the output would scale twice if the model computes its loss from its own output.)

The scale halves when a gradient overflows (that step is skipped) and doubles after a long run without overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zero_infinity.params.uncopied_hook import Hook

_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


class LossScale:
    """The current scale and its history."""

    def __init__(self) -> None:
        self.scale = _FIRST_SCALE
        self.num_skipped = 0
        self._num_good = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        return {"scale": self.scale, "num_skipped": self.num_skipped, "num_good": self._num_good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale = float(state["scale"])
        self.num_skipped, self._num_good = int(state["num_skipped"]), int(state["num_good"])

    def unscale_factor(self, norms: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the factor that undoes the scale, and adjust the scale for the next step.

        `norms`: of all gradients. None if one of them overflowed: the step must be skipped.
        """
        overflowed = not all(torch.isfinite(norm).item() for norm in norms)
        unscale = torch.tensor(1.0 / self.scale)
        self.judge(overflowed=overflowed)
        return None if overflowed else unscale

    def judge(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step whose gradients overflowed or not."""
        if overflowed:
            self.scale /= 2
            self.num_skipped += 1
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == _GROW_AFTER:
            self.scale *= 2
            self._num_good = 0


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss_scale: LossScale) -> torch.Tensor:
        ctx.loss_scale = loss_scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.loss_scale.scale, None


class ScaleOutputs(Hook):
    """After the model's forward: scales the gradient of every output that has one."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        return _map_tensors(output, self._scaled)

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        scaled: torch.Tensor = _ScaleGradient.apply(tensor, self._loss_scale)  # type: ignore[no-untyped-call]
        return scaled


class CastInputs(Hook):
    """Before the model's forward: casts floating-point inputs to the compute dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _map_tensors(args, self._cast), _map_tensors(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _map_tensors(value: Any, change: Any) -> Any:
    """Apply `change` to each tensor in nested tuples, lists and dicts (and their subclasses, such as model outputs)."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        for key in list(value):
            changed = _map_tensors(value[key], change)
            if changed is not value[key]:
                value[key] = changed
    return value
