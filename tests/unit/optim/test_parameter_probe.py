"""Which optimizers update each parameter on its own, and what their states look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.optim.parameter_probe import measure_state, probe_parameters


class Written(Optimizer):
    """An optimizer made of one function of a parameter, its state and its group."""

    def __init__(self, update: Callable[..., None], shape: tuple[int, ...] = (2, 2)) -> None:
        super().__init__([nn.Parameter(torch.zeros(shape))], {"lr": 0.1})
        self.update = update
        self.shared: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(self, parameter, self.state[parameter], group)


def rows(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    state.setdefault("rows", torch.zeros(len(p))).add_(p.grad.square().mean(1))  # type: ignore[union-attr]
    p.sub_(p.grad / state["rows"].sum().sqrt(), alpha=group["lr"])  # type: ignore[operator]


def starts_late(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    if state["count"] == 3:
        state["norms"] = [p.grad.norm(), torch.zeros(2, 3, dtype=torch.uint8)]  # type: ignore[union-attr]


def mixes(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    norms = [q.grad.norm() for q in group["params"]]
    p.sub_(p.grad / sum(norms), alpha=group["lr"])


def shares(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    self.state["all"]["count"] = 1
    p.sub_(p.grad.sign())  # type: ignore[union-attr]


def leaks(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Its states depend on what came before, its values do not."""
    state["last"] = sum(float(q.grad.sum()) for q in group["params"])


def keeps_the_gradient(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["last"] = p.grad


def keeps_the_parameter(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["same"] = p.view(-1)


def keeps_a_set(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["seen"] = {1}


def keeps_the_gradient_beside(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    self.shared.append(p.grad)  # type: ignore[arg-type]
    p.sub_(p.grad, alpha=group["lr"])  # type: ignore[arg-type]


def flattens(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    p.data = p.data.flatten()
    p.sub_(p.grad.flatten(), alpha=group["lr"])  # type: ignore[union-attr]


def sums(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    group["sum"] = group.get("sum", 0.0) + p.grad.sum().item()  # type: ignore[union-attr]


def probe(optimizer: Optimizer) -> int:
    return probe_parameters(optimizer, optimizer.param_groups[0], torch.float32)


def test_states_are_known_after_the_step_that_makes_the_last_of_them() -> None:
    assert probe(Written(rows)) == 1
    assert probe(Written(starts_late)) == 3
    assert probe(torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))])) == 1


def test_states_are_measured_on_the_true_shape() -> None:
    optimizer, like = Written(rows), torch.empty(7, 5, device="meta")
    state = measure_state(optimizer, optimizer.param_groups[0], like, torch.float32, 1)
    assert state.names == ("count", "rows")
    assert {name: (form.shape, form.dtype) for name, form in state.forms.items()} == {"rows": ((7,), torch.float32)}
    late = Written(starts_late)
    state = measure_state(late, late.param_groups[0], like, torch.float32, 3)
    assert state.names == ("count", "norms[0]", "norms[1]")
    assert state.forms["norms[1]"].dtype is torch.uint8


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (mixes, "a step on one parameter alone differs from a step on all of them"),
        (shares, "keeps a state that belongs to no parameter"),
        (leaks, "state 'last' depends on other parameters"),
        (keeps_the_gradient, "state 'last' is the gradient itself"),
        (keeps_the_parameter, "state 'same' is the parameter itself"),
        (keeps_the_gradient_beside, "keeps a gradient in its attribute 'shared'"),
        (flattens, r"changes the shape of a parameter from \[13, 37\] to \[481\]"),
        (keeps_a_set, "state 'seen' is a set"),
        (sums, "computes 'sum' in its parameter group from all gradients together"),
    ],
)
def test_the_reason_of_a_refusal(update: Callable[..., None], reason: str) -> None:
    with pytest.raises(zi.UsageError, match=reason) as refusal:
        probe(Written(update))
    assert "Written" in str(refusal.value)
    assert "fix:" in str(refusal.value)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 2), (2, 1, 3, 3), (1, 1, 1, 2, 2)])
def test_it_is_probed_with_as_many_dimensions_as_the_group_has(shape: tuple[int, ...]) -> None:
    seen = set()

    def look(self: Written, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        seen.add(p.dim())

    probe(Written(look, shape))
    assert seen - {1} == {len(shape)} - {1}


def test_the_optimizer_and_the_random_numbers_are_left_alone() -> None:
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    probe(optimizer)
    measure_state(optimizer, optimizer.param_groups[0], torch.empty(3, 4), torch.float32, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
