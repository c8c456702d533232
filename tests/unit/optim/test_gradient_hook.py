"""The hook that autograd calls: it keeps nothing alive, and tells of gradients that were taken."""

from __future__ import annotations

import weakref
from typing import cast

import pytest
import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.gradient_hook import GradientHook, NoGradientHook
from zero_infinity.params.unit import ManagedParameter, make_unit


class Taken:
    """Writes down whose gradients there are."""

    def __init__(self) -> None:
        self.parameters: list[ManagedParameter] = []

    def on_gradient(self, parameter: ManagedParameter) -> None:
        self.parameters.append(parameter)


def managed_parameter() -> ManagedParameter:
    named = [("weight", nn.Parameter(torch.ones(3)))]
    unit = make_unit("layer", named, dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu"))
    return unit.parameters[0]


def test_autograd_calls_it_when_the_gradient_is_there() -> None:
    taken, managed = Taken(), managed_parameter()
    hook = GradientHook(cast(GradientFlow, taken), managed)
    managed.hook_gradient(hook)
    managed.parameter.sum().backward()
    assert taken.parameters == [managed]


def test_hooking_again_puts_it_behind_the_users_hooks_once() -> None:
    taken, managed, order = Taken(), managed_parameter(), []
    managed.hook_gradient(GradientHook(cast(GradientFlow, taken), managed))
    managed.parameter.register_post_accumulate_grad_hook(lambda _: order.append(len(taken.parameters)))
    managed.hook_gradient_last()
    managed.parameter.sum().backward()
    assert order == [0]
    assert len(taken.parameters) == 1


def test_it_keeps_neither_the_model_nor_the_gradients_alive() -> None:
    taken, managed = Taken(), managed_parameter()
    hook = GradientHook(cast(GradientFlow, taken), managed)
    reference = weakref.ref(taken)
    del taken
    assert reference() is None
    hook(torch.zeros(3))
    assert hook.gradient() is None


def test_inference_refuses_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3))
    hook = NoGradientHook("layer.weight")
    parameter.register_post_accumulate_grad_hook(hook)
    with pytest.raises(UsageError, match=r"'layer.weight' got a gradient.*without an optimizer"):
        parameter.sum().backward()
    assert parameter.grad is None
    assert hook.gradient() is None
    hook.set_gradient(None)
    with pytest.raises(UsageError, match="without an optimizer"):
        hook.set_gradient(torch.ones(3))
