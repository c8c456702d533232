"""The autograd hook that reports a parameter's accumulated gradient to the gradient flow."""

from __future__ import annotations

import weakref

import torch

from zero_infinity.interrupts import held
from zero_infinity.optim.gradient_flow import GradientFlow
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

    def has_gradient(self) -> bool:
        gradients, managed = self._gradients(), self._managed()
        return gradients is not None and managed is not None and any(map(gradients.has, managed.parts))
