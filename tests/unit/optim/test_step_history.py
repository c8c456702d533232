"""What one step was seen to do decides what the next one may do early."""

from __future__ import annotations

import torch
from torch import nn

from zero_infinity.optim.step_history import StepHistory
from zero_infinity.params.unit import ManagedParameter, Unit, make_unit


def one_unit() -> tuple[Unit, ManagedParameter]:
    unit = make_unit(
        "unit",
        [("weight", nn.Parameter(torch.zeros(3)))],
        dtype=torch.float32,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return unit, unit.parameters[0]


def test_read_then_gradient_allows_an_early_update() -> None:
    cycle, (unit, weight) = StepHistory(), one_unit()
    cycle.read(unit)
    cycle.begin_backward()
    cycle.read(unit)
    cycle.fired(weight, counts=True)
    assert cycle.allows_early_update(unit, num_backwards=1)


def test_a_read_after_the_gradient_forbids_it() -> None:
    cycle, (unit, weight) = StepHistory(), one_unit()
    cycle.begin_backward()
    cycle.fired(weight, counts=True)
    cycle.read(unit)
    assert cycle.read_late(unit)
    assert not cycle.allows_early_update(unit, num_backwards=1)


def test_another_number_of_backwards_forbids_it() -> None:
    cycle, (unit, weight) = StepHistory(), one_unit()
    for _ in range(2):
        cycle.begin_backward()
        cycle.fired(weight, counts=True)
    assert not cycle.allows_early_update(unit, num_backwards=1)
    assert cycle.allows_early_update(unit, num_backwards=2)


def test_a_unit_without_gradient_is_not_updated_early() -> None:
    cycle, (unit, _) = StepHistory(), one_unit()
    cycle.begin_backward()
    assert not cycle.allows_early_update(unit, num_backwards=1)


def test_what_was_deferred_or_discarded_is_not_updated_early() -> None:
    for spoil in (lambda c, u: c.deferred.add(u), lambda c, _: setattr(c, "discarded", True)):
        cycle, (unit, weight) = StepHistory(), one_unit()
        cycle.begin_backward()
        cycle.fired(weight, counts=True)
        spoil(cycle, unit)
        assert not cycle.allows_early_update(unit, num_backwards=1)


def test_only_the_last_backward_is_counted() -> None:
    cycle, (_, weight) = StepHistory(), one_unit()
    for _ in range(3):
        cycle.begin_backward()
        cycle.fired(weight, counts=True)
    assert cycle.firings == {weight: 1}


def test_a_piece_of_backward_that_does_not_count() -> None:
    cycle, (unit, weight) = StepHistory(), one_unit()
    cycle.begin_backward()
    cycle.fired(weight, counts=False)
    assert not cycle.firings
    assert unit in cycle.last_firing


def test_units_are_listed_by_their_first_read() -> None:
    cycle = StepHistory()
    (first, _), (second, _) = one_unit(), one_unit()
    for unit in (second, first, second):
        cycle.read(unit)
    assert list(cycle.read_order) == [second, first]
