from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zero_infinity as zi
from zero_infinity.checkpoint.saved_settings import problems_of

WEIGHT = torch.zeros(2, 2, requires_grad=True)


def found(optimizer: torch.optim.Optimizer, number: int = 0, **changes: Any) -> str:
    group = optimizer.param_groups[number]
    saved = {name: value for name, value in group.items() if name != "params"}
    return "; ".join(problems_of(optimizer, group, {**saved, **changes}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lr": math.inf}, "lr='inf', in the optimizer 0.001"),
        ({"lr": math.nan}, "lr='nan'"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": None}, "lr='None'"),
        ({"lr": -5.0}, "Invalid learning rate: -5.0"),
        ({"betas": (0.9,)}, "betas='(0.9,)'"),
        ({"betas": (0.9, 2.0)}, "Invalid beta parameter at index 1: 2.0"),
        ({"betas": [0.8, 0.99]}, ""),
        ({"eps": {"a": 1}}, "eps="),
        ({"foreach": "yes"}, ""),
        ({"foreach": math.inf}, "foreach='inf'"),
        ({"initial_lr": 0.5, "lr": 2}, ""),
        ({"lr": torch.tensor(0.5)}, ""),
    ],
)
def test_settings(changes: dict[str, Any], problem: str) -> None:
    said = found(torch.optim.AdamW([WEIGHT]), **changes)
    assert problem in said if problem else not said


def test_a_combined_optimizer_asks_the_one_that_has_the_group() -> None:
    bias = torch.zeros(2, requires_grad=True)
    both = zi.combine_optimizers(torch.optim.Muon([WEIGHT]), torch.optim.AdamW([bias]))
    assert not found(both)
    assert not found(both, 1)
    assert "Learning rate should be >= 0 but is: -1" in found(both, lr=-1.0)
    assert "Invalid learning rate: -1" in found(both, 1, lr=-1.0)


def test_what_the_optimizer_has_now_is_accepted() -> None:
    odd = torch.optim.SGD([WEIGHT])
    odd.param_groups[0]["lr"] = -1.0
    odd.param_groups[0]["weight_decay"] = math.inf
    assert not found(odd)
