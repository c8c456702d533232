"""Which optimizers are streamed, and what they keep per element."""

from __future__ import annotations

from collections.abc import Callable
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


class Written(Optimizer):
    """An optimizer made of one function of a parameter, its state and its group."""

    def __init__(self, parameters: Any, update: Callable[..., None], **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})
        self.update = update

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter.data, parameter.grad, self.state[parameter], group)


def counted(value: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    value.sub_(gradient, alpha=group["lr"] / group["step"])


def first_looks(value: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Nothing at first, as SOAP does; then a function of the whole matrix."""
    if state.setdefault("looked", 0) >= 3:
        value.sub_(gradient / gradient.norm(), alpha=group["lr"])
    state["looked"] += 1


def sums(value: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    group["sum"] = group.get("sum", 0.0) + gradient.sum().item()
    value.sub_(gradient, alpha=group["lr"])


class Packed(torch.Tensor):
    """A tensor whose shape is not that of its bytes."""


def packs(value: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if value.numel() >= 4096:
        state["average"] = torch.zeros_like(value).as_subclass(Packed)
    value.sub_(gradient, alpha=group["lr"])


def packs_large(value: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if value.numel() >= 4096:
        state["scales"] = torch.zeros(value.numel() // 256)
    value.sub_(gradient, alpha=group["lr"])


def in_bytes(value: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["signs"] = gradient.sign().to(torch.int8)
    value.sub_(gradient, alpha=group["lr"])


def probe(optimizer: Optimizer) -> tuple[str, ...]:
    return probe_state_names(optimizer, optimizer.param_groups[0], torch.float32)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (first_looks, "a slice of a parameter differs from updating the whole"),
        (sums, "computes 'sum' in its parameter group from all gradients together"),
        (packs, "state 'average' is a Packed"),
        (packs_large, "state 'scales' does not have the parameter's shape"),
        (in_bytes, "state 'signs' is torch.int8, and records are torch.float32"),
    ],
)
def test_the_reason_of_a_refusal(update: Callable[..., None], reason: str) -> None:
    with pytest.raises(zi.UsageError, match=reason):
        probe(Written([nn.Parameter(torch.zeros(2))], update))


def test_settings_that_count_steps_and_attributes_of_the_class_are_carried() -> None:
    assert probe(Written([nn.Parameter(torch.zeros(2))], counted)) == ()
