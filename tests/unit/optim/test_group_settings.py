"""What an optimizer writes into its groups is written once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_infinity.optim.group_settings import GroupSettings, same


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, as a number and as a tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("tensor", torch.tensor(0)).add_(1)
        super().step()


def test_groups_are_advanced_by_one_step() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = Counts([{"params": [p]} for p in parameters], lr=0.1)
    settings = GroupSettings(optimizer)
    assert "step" not in optimizer.param_groups[0]
    for number in (1, 2, 3):
        settings.advance()
        for group, parameter in zip(optimizer.param_groups, parameters, strict=True):
            assert (group["step"], group["tensor"].item(), group["params"]) == (number, number, [parameter])
    assert all(torch.equal(p, torch.ones(3)) for p in parameters)
    assert not optimizer.state


def test_most_optimizers_write_nothing() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=torch.tensor(0.1))
    before = dict(optimizer.param_groups[0])
    GroupSettings(optimizer).advance()
    assert dict(optimizer.param_groups[0]) == before


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        ((0.9, 0.99), (0.9, 0.99), True),
        (torch.tensor(1), torch.tensor(1), True),
        (torch.tensor(1), torch.tensor(1.0), False),
        (torch.tensor(1), 1, False),
        (None, None, True),
    ],
)
def test_same(one: Any, other: Any, are_same: bool) -> None:
    assert same(one, other) is are_same
