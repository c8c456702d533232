"""Which slots of an update are copies, and how often one was rounded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from zero_infinity.optim.rounded_slots import RoundedSlots, counted
from zero_infinity.optim.state_records import Segment, StateRecord
from zero_infinity.optim.stochastic_rounding import NUM_ROUNDINGS, round_into, rounding_key
from zero_infinity.params.unit import ManagedParameter, make_unit

F32, BF16 = torch.float32, torch.bfloat16


def record_of(**options: Any) -> tuple[StateRecord, ManagedParameter]:
    unit = make_unit(
        "layer",
        [("layer.weight", nn.Parameter(torch.zeros(4, 64)))],
        dtype=BF16,
        compute_dtype=F32,
        device=torch.device("cpu"),
    )
    parameter = unit.parameters[0]
    record = StateRecord(unit, F32, False, {parameter: ("m",)}, scalars=defaultdict(dict), rounding_seed=5, **options)
    return record, parameter


@pytest.mark.parametrize("start", [0, 128])
def test_a_segment_is_rounded_as_its_part_of_the_parameter(start: int) -> None:
    record, parameter = record_of(state_dtype=BF16)
    record.scalars[parameter] = {NUM_ROUNDINGS: 7}
    stored, state = torch.ones(128, dtype=BF16), torch.zeros(128, dtype=BF16)
    slots = RoundedSlots(record, Segment(parameter, start, start + 128, 0), stored, {"m": state})
    exact = torch.randn(128, generator=torch.Generator().manual_seed(0))
    slots.values.copy_(exact)
    slots.slots["m"].copy_(exact)
    assert slots.finish(("step", "m"), {"step": 8}) == (("step", "m", NUM_ROUNDINGS), {"step": 8, NUM_ROUNDINGS: 8})
    for found, name in ((stored, "values"), (state, "m")):
        expected = torch.empty(start + 128, dtype=BF16)
        whole = torch.cat([torch.zeros(start), exact])
        round_into(expected, whole, rounding_key(5, "layer.weight", name, 7))
        assert torch.equal(found, expected[start:])


def test_what_is_as_wide_as_the_update_is_changed_in_place() -> None:
    record, parameter = record_of()
    state = torch.zeros(256)
    slots = RoundedSlots(record, Segment(parameter, 0, 256, 0), torch.zeros(256, dtype=BF16), {"m": state})
    assert slots.slots["m"] is state
    assert slots.values.dtype is F32
    assert record.rounds
    assert counted(record, parameter, (), {}) == ((NUM_ROUNDINGS,), {NUM_ROUNDINGS: 1})
