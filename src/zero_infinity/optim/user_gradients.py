"""Gradients as the user sees them: `p.grad` of a managed parameter, read, changed, set or dropped.

Autograd's own `.grad` has a gradient only from the moment it is accumulated until the hook takes it, and when the user
has set one. Otherwise what stands for the gradient is made when it is asked for (`retained_gradient.py`).
"""

from __future__ import annotations

import weakref

import torch

from zero_infinity._torch import no_torch_function
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.retained_gradient import RetainedGradient, retained_gradient
from zero_infinity.params.dtensor import like
from zero_infinity.params.unit import ManagedParameter


class ParameterGradient:
    """The gradient of one parameter, whole over ranks and tiles. Reading and writing it is collective."""

    def __init__(self, flow: GradientFlow, parameter: ManagedParameter) -> None:
        self._flow = weakref.ref(flow)
        self._parameter = parameter

    def read(self) -> torch.Tensor:
        parts = [self._the_flow().gather(part) for part in self._parameter.parts]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.to(self._parameter.cell.device)

    def write(self, values: torch.Tensor) -> None:
        for part in self._parameter.parts:
            self._the_flow().replace(part, part.rows_of(values))

    def zero(self) -> None:
        for part in self._parameter.parts:
            self._the_flow().drop(part, to_none=False)

    def _the_flow(self) -> GradientFlow:
        flow = self._flow()
        if flow is None:
            raise RuntimeError(f"the model of {self._parameter.name!r} is gone")
        return flow


def gradient_of(flow: GradientFlow, parameter: ManagedParameter) -> torch.Tensor | None:
    """Return what `.grad` of the parameter is, if autograd's is None."""
    if not any(map(flow.exists, parameter.parts)):
        return None
    source = ParameterGradient(flow, parameter)
    if parameter.is_distributed:
        # Torch knows a DTensor by its class: it gets a real one, which step() takes as one that was set by hand.
        whole = like(parameter.parameter, source.read())
        for part in parameter.parts:
            flow.drop(part, to_none=True)
        with no_torch_function():
            parameter.parameter.grad = whole
        return whole
    meta = torch.empty((), dtype=flow.gradient_dtype(parameter), device=parameter.cell.device).expand(parameter.shape)
    return retained_gradient(source, meta, parameter.stride)


def set_gradient(flow: GradientFlow, parameter: ManagedParameter, gradient: torch.Tensor | None) -> None:
    """Do what `p.grad = gradient` does."""
    if isinstance(gradient, RetainedGradient):
        source = gradient.source
        if isinstance(source, ParameterGradient) and source._parameter is parameter and not gradient.views:
            return  # p.grad *= 2 ends so
        gradient = gradient.to(parameter.cell.dtype, copy=True)
    with no_torch_function():
        if parameter.parameter.grad is None:
            for part in parameter.parts:
                flow.drop(part, to_none=True)
        if gradient is not None:
            flow.cycle.gradients_are_used()
        parameter.parameter.grad = gradient
