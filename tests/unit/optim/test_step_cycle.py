"""Which units a step may update during backward, and which steps are torn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.errors import TornStepError
from zero_infinity.optim.step_cycle import StepCycle
from zero_infinity.params.unit import ManagedParameter, Unit, make_unit


class Training:
    """One unit of one parameter, trained by a loop."""

    def __init__(self, *, early: bool = True) -> None:
        weight = nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([weight], lr=0.1)
        self.cycle = StepCycle(self.optimizer, 1, early=early)
        cpu = torch.device("cpu")
        self.unit: Unit = make_unit(
            "unit", [("weight", weight)], dtype=torch.float32, compute_dtype=torch.float32, device=cpu
        )
        self.weight: ManagedParameter = self.unit.parameters[0]
        self._graph_task = 0

    def backward(self, *, complete: bool = True) -> None:
        self._graph_task += 1
        self.cycle.read(self.unit)
        assert self.cycle.enter_backward(self._graph_task)
        self.cycle.fired(self.weight)
        assert not self.cycle.enter_backward(self._graph_task)
        if complete:
            self.cycle.end_backward()

    def step(self) -> None:
        self.cycle.check_may_step()
        self.cycle.end([self.unit], may_consume=True)

    def update_early(self, *, complete: bool = True) -> None:
        """Two steps that allow it, and a backward with an update."""
        for _ in range(2):
            self.backward()
            self.step()
        self.backward(complete=complete)
        assert self.cycle.may_update_early(self.unit)
        self.cycle.updated(self.unit, [self.weight])


def test_two_steps_alike_allow_an_early_update_in_the_third() -> None:
    training = Training()
    allowed = []
    for _ in range(3):
        training.backward()
        allowed.append(training.cycle.may_update_early(training.unit))
        training.step()
    assert allowed == [False, False, True]


def test_no_early_update_where_it_is_switched_off_or_inside_no_sync() -> None:
    training = Training(early=False)
    for _ in range(3):
        training.backward()
        assert not training.cycle.may_update_early(training.unit)
        training.step()
    training = Training()
    for _ in range(2):
        training.backward()
        training.step()
    with training.cycle.accumulating():
        training.backward()
        assert not training.cycle.may_update_early(training.unit)


def test_the_order_repeats_once_the_same_units_are_updated_early() -> None:
    training = Training()
    repeats = []
    for _ in range(4):
        training.backward()
        training.step()
        repeats.append(training.cycle.same_order)
    assert repeats == [True, False, True, True]


def test_a_read_after_an_early_update_is_an_error() -> None:
    training = Training()
    training.update_early()
    with pytest.raises(TornStepError, match="read after it was updated"):
        training.cycle.read(training.unit)
    training.step()
    training.cycle.read(training.unit)


def test_a_gradient_after_an_early_update_tears_the_step() -> None:
    training = Training()
    training.update_early()
    with pytest.raises(TornStepError, match="another gradient"):
        training.cycle.fired(training.weight)
    with pytest.raises(TornStepError, match="another gradient"):
        training.step()


@pytest.mark.parametrize("spoil", ["discard", "settings", "backward"])
def test_a_step_that_cannot_be_finished_alike_is_torn_until_a_restart(spoil: str) -> None:
    training = Training()
    training.update_early(complete=spoil != "backward")
    if spoil == "settings":
        training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(TornStepError, match={"discard": "zero_grad", "settings": "lr", "backward": "finish"}[spoil]):
        if spoil == "discard":
            training.cycle.discarded(any_fresh=False)
        training.step()
    with pytest.raises(TornStepError):
        training.cycle.check()
    training.cycle.restart()
    training.cycle.check()
    training.cycle.read(training.unit)


def test_a_step_that_is_interrupted_is_torn() -> None:
    training = Training()
    with pytest.raises(KeyboardInterrupt), training.cycle.torn_unless_finished("interrupted"):
        raise KeyboardInterrupt
    with pytest.raises(TornStepError, match="interrupted"):
        training.cycle.check()
    training.cycle.restart()
    with training.cycle.torn_unless_finished("interrupted"):
        pass
    training.cycle.check()


def test_a_unit_waits_for_parameters_that_the_last_backward_left_out() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    cycle = StepCycle(optimizer, 1, early=True)
    named = [(name, nn.Parameter(torch.zeros(2))) for name in ("weight", "bias")]
    cpu = torch.device("cpu")
    unit = make_unit("unit", named, dtype=torch.float32, compute_dtype=torch.float32, device=cpu)
    weight, bias = unit.parameters
    cycle.fired(bias)
    cycle.end([unit], may_consume=True)
    cycle.fired(bias)
    assert not cycle.has_fired(unit)
    cycle.fired(weight)
    assert cycle.has_fired(unit)
