"""Which optimizers are streamed, and what they keep per element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.optim.elementwise_probe import probe_state_names


def of(kind: type[Optimizer], **options: Any) -> Optimizer:
    return kind([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (of(torch.optim.AdamW), ("exp_avg", "exp_avg_sq")),
        (of(torch.optim.Adam, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (of(torch.optim.SGD), ()),
        (of(torch.optim.SGD, momentum=0.9), ("momentum_buffer",)),
        (of(torch.optim.Adagrad), ("sum",)),
        (of(torch.optim.RMSprop, centered=True, momentum=0.1), ("square_avg", "momentum_buffer", "grad_avg")),
        (of(torch.optim.Adamax), ("exp_avg", "exp_inf")),
        (of(torch.optim.Rprop), ("prev", "step_size")),
        (of(torch.optim.ASGD), ("ax",)),
        (of(torch.optim.Adadelta), ("square_avg", "acc_delta")),
    ],
)
def test_the_probe_finds_the_state_per_element(optimizer: Optimizer, names: tuple[str, ...]) -> None:
    assert set(probe_state_names(optimizer, optimizer.param_groups[0], torch.float32)) == set(names)


def test_the_probe_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    probe_state_names(optimizer, optimizer.param_groups[0], torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert not calls
    assert torch.equal(parameter, torch.ones(3))


class CountsItself(torch.optim.SGD):
    """Keeps a count on the optimizer, which a step in slices would advance too often."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] / self.count)


def test_an_optimizer_that_counts_its_steps_itself_is_refused() -> None:
    optimizer = of(CountsItself, lr=0.1)
    with pytest.raises(zi.UsageError, match="CountsItself"):
        probe_state_names(optimizer, optimizer.param_groups[0], torch.float32)
