"""How long gradients last, and when a step may consume them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.optim.gradient_lifetimes import GradientLifetimes
from zero_infinity.params.unit import ManagedParameter, make_unit


def parameter() -> ManagedParameter:
    named = [("weight", nn.Parameter(torch.ones(3)))]
    unit = make_unit("layer", named, dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu"))
    return unit.parameters[0]


def step(lives: GradientLifetimes) -> bool:
    """Return whether the step kept its gradients."""
    lives.begin_step()
    keeps = lives.keeps
    lives.end_step()
    return keeps


def test_the_first_step_keeps_and_the_next_consumes_where_gradients_are_zeroed() -> None:
    lives, weight = GradientLifetimes(), parameter()
    kept = []
    for _ in range(3):
        lives.came(weight)
        kept.append(step(lives))
        lives.all_zeroed(to_none=True)
    assert kept == [True, False, False]


def test_gradients_that_are_never_zeroed_are_always_kept() -> None:
    lives, weight = GradientLifetimes(), parameter()
    for _ in range(3):
        lives.came(weight)
        assert not lives.are_zeroed
        assert step(lives)
    assert lives.exists(weight)


def test_what_was_consumed_is_not_there_again() -> None:
    lives, weight = GradientLifetimes(), parameter()
    for number in range(2):
        lives.came(weight)
        step(lives)
        if number == 0:
            lives.zeroed(weight, to_none=True)
    assert lives.exists(weight)
    with pytest.raises(UsageError, match="zero_grad"):
        lives.came(weight)
    with pytest.raises(UsageError, match="step\\(\\) comes again"):
        lives.begin_step()
    with pytest.raises(UsageError, match="used by step"):
        lives.read(weight, is_updated=False)
    lives.zeroed(weight, to_none=False)
    assert lives.zeros == {weight}
    lives.came(weight)
    assert step(lives), "it was read after the step, so it is kept from now on"


def test_a_gradient_that_an_update_of_this_step_has_used_cannot_be_read() -> None:
    lives, weight = GradientLifetimes(), parameter()
    lives.came(weight)
    lives.read(weight, is_updated=False)
    with pytest.raises(UsageError, match='update="after_backward"'):
        lives.read(weight, is_updated=True)


def test_zeroing_to_zeros_leaves_a_gradient_only_where_one_was() -> None:
    lives, weight, other = GradientLifetimes(), parameter(), parameter()
    lives.came(weight)
    lives.all_zeroed(to_none=False)
    assert lives.exists(weight)
    assert not lives.exists(other)
    lives.zeroed(other, to_none=False)
    assert not lives.exists(other)
    lives.changed(other)
    assert lives.fresh == {other}
    lives.all_zeroed(to_none=True)
    assert not lives.exists(weight)


def test_gradients_that_come_again_and_that_nothing_has_used_are_an_error_once() -> None:
    lives, weight = GradientLifetimes(), parameter()
    for _ in range(3):
        lives.came(weight)
        lives.all_zeroed(to_none=True)
    with pytest.raises(UsageError, match=r"(?s)a gradient again.*fix:.*zi.prepare"):
        lives.came(weight)
    for _ in range(4):
        lives.came(weight)
        lives.zeroed(weight, to_none=True)


@pytest.mark.parametrize("use", ["read", "changed"])
def test_gradients_that_were_looked_at_have_been_used(use: str) -> None:
    lives, weight = GradientLifetimes(), parameter()
    lives.came(weight)
    if use == "read":
        lives.read(weight, is_updated=False)
    else:
        lives.changed(weight)
    for _ in range(4):
        lives.all_zeroed(to_none=True)
        lives.came(weight)
