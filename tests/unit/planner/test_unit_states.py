from __future__ import annotations

import pytest
import torch

from zero_infinity.errors import ConfigError
from zero_infinity.planner.training_job import MIXED, SINGLE
from zero_infinity.planner.unit_states import (
    StateBytes,
    UnitStates,
    WholeParameter,
    frozen,
    optimizer_named,
    optimizer_names,
)


def test_adamw_keeps_what_every_plan_has_counted() -> None:
    assert optimizer_named("AdamW").widths(4) == SINGLE
    assert optimizer_named("adamw").widths(2) == MIXED
    assert optimizer_named("sgd").widths(4) == StateBytes(4, 0, 4, 12)


def test_a_matrix_that_is_updated_whole() -> None:
    rows, columns = 96, 40
    factors = optimizer_named("adafactor").of_matrix(rows, columns, 4)
    assert factors.record_bytes == 4 * (rows + columns)
    with_master = optimizer_named("muon").of_matrix(rows, columns, 2)
    assert with_master.record_bytes == 2 * 4 * rows * columns
    assert with_master.largest_whole >= with_master.record_bytes + 4 * rows * columns
    eight_bits = optimizer_named("adamw-8bit").of_matrix(256, 256, 4)
    assert eight_bits.record_bytes == 2 * (256 * 256 + 4 * 256)


def test_muon_s_products_are_those_of_torch() -> None:
    """Counted in one update of torch's own."""
    from torch.utils.flop_counter import FlopCounterMode

    weight = torch.nn.Parameter(torch.randn(48, 96))
    optimizer = torch.optim.Muon([weight], ns_steps=5)
    weight.grad = torch.randn(48, 96)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert optimizer_named("muon").of_matrix(48, 96, 4).flops == counter.get_total_flops()


def test_frozen_units_have_nothing_but_their_values() -> None:
    states = frozen(2)
    assert states.is_frozen
    assert (states.record_bytes, states.gradient_elements, states.largest_whole) == (0, 0, 0)
    assert not UnitStates(SINGLE, 0, (WholeParameter(64, 256),)).is_frozen
    assert UnitStates(SINGLE, 1000).part(10, 100).trained == 100


def test_an_optimizer_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'adamw'\?(.|\n)*zi.plan\(model, optimizer\)"):
        optimizer_named("adamww")
    assert "lion" in optimizer_names()
