"""Several optimizers as one, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zero_infinity as zi
from zero_infinity.optim.combined_optimizer import CombinedOptimizer, single_optimizers


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def both(of: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices, others = ([p for p in of.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)


def train(of: nn.Module, step: Any, zero_grad: Any) -> None:
    for number in range(3):
        of(torch.ones(2, 4) * number).square().mean().backward()
        step()
        zero_grad()


def test_the_steps_of_both() -> None:
    one, other = model(), model()
    combined = zi.combine_optimizers(*both(one))
    muon, adamw = both(other)

    def step_both() -> None:
        muon.step()
        adamw.step()

    train(one, combined.step, combined.zero_grad)
    train(other, step_both, other.zero_grad)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert single_optimizers(combined)[0] is combined
    assert [type(o).__name__ for o in single_optimizers(combined)[1:]] == ["Muon", "AdamW"]
    assert single_optimizers(muon) == [muon]


def test_a_scheduler_of_one_of_them_before_and_after_loading() -> None:
    trained = model()
    muon, adamw = both(trained)
    combined = zi.combine_optimizers(muon, adamw)
    combined.step()
    schedule = lr_scheduler.ExponentialLR(combined.members["AdamW"], 0.5)
    muon.step(), adamw.step()
    schedule.step()
    assert [group["lr"] for group in combined.param_groups] == [0.1, 0.05]
    combined.load_state_dict(combined.state_dict())
    schedule.step()
    assert [group["lr"] for group in combined.param_groups] == [0.1, 0.025]


def test_two_of_a_kind_have_names_of_their_own() -> None:
    parameters = list(model().parameters())
    combined = CombinedOptimizer(torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1))
    assert list(combined.members) == ["SGD", "SGD 2"]


def test_a_closure_is_evaluated_once() -> None:
    trained = model()
    combined = zi.combine_optimizers(*both(trained))
    with torch.no_grad():
        assert combined.step(lambda: trained(torch.ones(1, 4)).sum().backward() or 3) == 3


def test_what_cannot_be_combined() -> None:
    muon, adamw = both(model())
    with pytest.raises(zi.UsageError, match="two or more"):
        zi.combine_optimizers(muon)
    with pytest.raises(zi.UsageError, match="more than one"):
        zi.combine_optimizers(adamw, torch.optim.SGD(adamw.param_groups[0]["params"]))
    other = zi.combine_optimizers(adamw, muon)
    with pytest.raises(zi.UsageError, match="groups of"):
        other.load_state_dict(zi.combine_optimizers(*both(model())).state_dict())


def test_prepare_takes_one() -> None:
    trained = model()
    with pytest.raises(zi.UsageError, match="zi.combine_optimizers"):
        zi.prepare(trained, both(trained), zi.Config(memory="1MiB"))  # type: ignore[call-overload]
