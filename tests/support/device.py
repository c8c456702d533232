"""The device that tests train on: the CPU, or with TEST_DEVICE=lag the test device of tests/device."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree


def _load() -> ModuleType | None:
    """Register the test device, if tests run on it."""
    if os.environ.get("TEST_DEVICE", "cpu") != "lag":
        return None
    from device import lag

    return lag.load()


EXTENSION = _load()
IS_CPU = EXTENSION is None
DEVICE = torch.device("cpu" if IS_CPU else "lag:1")  # not the first one: a wrong index shows


def on_device(values: Any) -> Any:
    """The same, with every tensor in it on the device."""
    if IS_CPU:
        return values
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), values)
