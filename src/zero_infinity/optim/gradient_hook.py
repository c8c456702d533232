"""The autograd hook that reports a parameter's accumulated gradient to the gradient flow."""

from __future__ import annotations

import weakref

import torch

from zero_infinity.errors import UsageError
from zero_infinity.interrupts import held
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.user_gradients import gradient_of, set_gradient
from zero_infinity.params.uncopied_hook import Hook
from zero_infinity.params.unit import ManagedParameter


class GradientHook(Hook):
    """Called by autograd once a parameter's gradient is accumulated.

    Autograd holds it from C++, which the garbage collector cannot see: strong references would keep the model alive
    forever.
    """

    def __init__(self, gradients: GradientFlow, managed: ManagedParameter) -> None:
        self._gradients = weakref.ref(gradients)
        self._managed = weakref.ref(managed)

    def __call__(self, _: torch.Tensor) -> None:
        gradients, managed = self._gradients(), self._managed()
        if gradients is not None and managed is not None:
            with held():
                gradients.on_gradient(managed)

    @property
    def loss_scale(self) -> LossScale | None:
        """What its gradients are multiplied by, if the model computes in float16."""
        gradients = self._gradients()
        return gradients.loss_scale if gradients is not None else None

    def gradient(self) -> torch.Tensor | None:
        gradients, managed = self._gradients(), self._managed()
        return gradient_of(gradients, managed) if gradients is not None and managed is not None else None

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        gradients, managed = self._gradients(), self._managed()
        if gradients is not None and managed is not None:
            set_gradient(gradients, managed, gradient)


class NoGradientHook(Hook):
    """Refuses gradients of a parameter of a model that was prepared for inference."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise UsageError(
            f"parameter {self._name!r} got a gradient, but the model was prepared without an optimizer\n"
            "  fix:   zi.prepare(model, optimizer, config) to train it; or leave requires_grad off"
        )

    def gradient(self) -> torch.Tensor | None:
        return None

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise UsageError(
                f"parameter {self._name!r} was given a gradient, but the model was prepared without an optimizer\n"
                "  fix:   zi.prepare(model, optimizer, config) to train it"
            )
