"""The device that tests train on: the CPU, or with TEST_DEVICE=lag the test device of tests/device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from zero_infinity.params.offloaded_param import managed

P = ParamSpec("P")


def _why_not() -> str | None:
    """The reason why tests do not run on the test device."""
    if os.environ.get("TEST_DEVICE") != "lag":
        return "runs with TEST_DEVICE=lag, in processes of its own: the device stays registered"
    from device import lag

    return lag.why_not()


def _load() -> ModuleType | None:
    """Register the test device, if tests run on it."""
    if WHY_NOT is not None:
        return None
    from device import lag

    extension = lag.load()
    torch.accelerator.set_device_index(1)
    extension.set_delays(seed=int(os.environ.get("TEST_DEVICE_SEED", "0")), probability=0.1, max_seconds=2e-4)
    return extension


WHY_NOT = _why_not()
EXTENSION = _load()
IS_CPU = EXTENSION is None
DEVICE = torch.device("cpu" if IS_CPU else "lag:1")  # not the first one: a wrong index shows
BACKENDS = "gloo" if IS_CPU else "cpu:gloo,lag:lag"  # of process groups


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skip on the test device, for a reason."""
    return pytest.mark.skipif(not IS_CPU, reason=reason)


def on_device(values: Any) -> Any:
    """The same, with every tensor in it on the device."""
    if IS_CPU:
        return values
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), values)


def random_states() -> list[torch.Tensor]:
    """The states of the generators of the CPU and of the device."""
    return [torch.get_rng_state(), *([] if IS_CPU else [torch.get_device_module(DEVICE).get_rng_state(DEVICE)])]


def set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(DEVICE).set_rng_state(state, DEVICE)


def moved(model: nn.Module) -> nn.Module:
    """The model on the device. What `zi.init` builds stays where it is: `zi.prepare` moves it."""
    if IS_CPU or any(managed(parameter) is not None for parameter in model.parameters()):
        return model
    # Or else tied parameters of this device come apart: torch makes new ones, one for each use.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(DEVICE)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def placed(make: Callable[P, nn.Module]) -> Callable[P, nn.Module]:
    """The function that makes the same model on the device."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> nn.Module:
        return moved(make(*args, **kwargs))

    return make if IS_CPU else made
