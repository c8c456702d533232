"""Optimizers inside of others, and settings that are known by a parameter's identity."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.optim.own_steps import check_single_settings, check_wrapped


def adamw(*parameters: nn.Parameter) -> Optimizer:
    return torch.optim.AdamW(parameters or [nn.Parameter(torch.ones(2))])


class Wrapper(torch.optim.SGD):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__([nn.Parameter(torch.ones(2))], lr=0.1)
        self.inner = inner


class TwoSteps(Wrapper):
    def first_step(self) -> None: ...


def test_wrappers_are_refused_with_what_works() -> None:
    with pytest.raises(zi.UsageError, match=r"Wrapper cannot be streamed: it wraps AdamW(.|\n)*prepare with AdamW"):
        check_wrapped(Wrapper(adamw()))
    with pytest.raises(zi.UsageError, match=r"between two backward passes of AdamW(.|\n)*optimizers.md"):
        check_wrapped(TwoSteps(adamw()))


def test_plain_and_combined_ones_are_not() -> None:
    check_wrapped(adamw())
    check_wrapped(zi.combine_optimizers(adamw(), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)))


def test_settings_of_single_parameters_are_refused_if_they_are_of_this_optimizer() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer: Any = adamw(*module.parameters())
    optimizer.mng = SimpleNamespace(module_weight_config_triple=[(other, "weight", {})], pid2config={})
    check_single_settings(optimizer)
    for known in (
        {"module_weight_config_triple": [(module, "weight", {})], "pid2config": {}},
        {"module_weight_config_triple": [], "pid2config": {id(module.bias): {}}},
    ):
        optimizer.mng = SimpleNamespace(**known)
        with pytest.raises(zi.UsageError, match="GlobalOptimManager"):
            check_single_settings(optimizer)
