"""Whose weights are exchanged: tested with whole engines in `tests/equivalence/test_schedule_free.py`."""

from __future__ import annotations

import pytest
import schedulefree
import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.optim.group_settings import GroupSettings, in_training
from zero_infinity.optim.update_kind import UpdateKinds
from zero_infinity.optim.update_rule import exchanges_weights


def schedule_free() -> Optimizer:
    return schedulefree.AdamWScheduleFree([nn.Parameter(torch.ones(4, 4))], lr=0.1)


def test_which_optimizers_do() -> None:
    assert exchanges_weights(schedule_free())
    assert not exchanges_weights(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))


def test_it_is_probed_as_it_trains_and_left_as_it_was() -> None:
    optimizer = schedule_free()
    group = optimizer.param_groups[0]
    assert not group["train_mode"]
    assert in_training(optimizer, group)["train_mode"]
    assert UpdateKinds(optimizer).element_names(0, torch.float32) == ("z", "exp_avg_sq")
    assert not group["train_mode"]
    assert group["k"] == 0
    GroupSettings(optimizer)
    assert group["k"] == 0


class SwapsByNorm(schedulefree.SGDScheduleFree):  # type: ignore[misc]
    """Its `eval` depends on the whole parameter, its `step` does not."""

    def eval(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"] if group["train_mode"] else ():
                    p.div_(p.norm())
                group["train_mode"] = False


def test_an_exchange_that_is_not_element_wise_gets_whole_parameters() -> None:
    kinds = UpdateKinds(SwapsByNorm([nn.Parameter(torch.ones(4, 4))], lr=0.1))
    assert kinds.is_whole(0, torch.float32)


@pytest.mark.parametrize("kind", [schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree])
def test_a_plain_one_is_element_wise(kind: type[Optimizer]) -> None:
    kinds = UpdateKinds(kind([nn.Parameter(torch.ones(4, 4))], lr=0.1))  # type: ignore[call-arg]
    assert not kinds.is_whole(0, torch.float32)
