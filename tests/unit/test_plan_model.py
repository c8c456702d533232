"""`zi.plan`: what it accepts. That its bytes are those of a run is tested in `equivalence/test_plan_of_a_model.py`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.planner.calibration import Basis

SHAPE = Shape(layers=2, hidden=128, heads=4, seq=32)


def test_a_model_on_meta_on_a_machine_that_is_not_here() -> None:
    with torch.device("meta"):
        model = ByteGPT(SHAPE)
        tokens = torch.zeros(3, SHAPE.seq, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    config = zi.Config(memory="1GiB", param_dtype="bfloat16", gradient_accumulation_steps=4, stage=2)
    plan = zi.plan(model, optimizer, config, hardware="dgx-h100", inputs={"tokens": tokens}, devices=2)
    assert plan.outcome.num_ranks == 2
    assert plan.outcome.tokens == 2 * 4 * 3 * SHAPE.seq
    assert plan.inputs.workload.record_bytes == 12 * SHAPE.num_parameters
    assert all(not hasattr(parameter, "_zero_infinity") for parameter in model.parameters())


def test_a_model_with_values_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = zi.plan(model, optimizer, zi.Config(memory="1GiB"), hardware="laptop", inputs={"input": torch.zeros(8, 64)})
    assert plan.outcome.seconds > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_say_what_to_do() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zi.UsageError, match="inputs has no tensor"):
        zi.plan(model, optimizer, hardware="laptop", inputs={})
    with pytest.raises(zi.CapacityError):
        zi.plan(model, optimizer, zi.Config(memory=4096), hardware="laptop", inputs={"input": torch.zeros(1, 64)})
    with pytest.raises(zi.ConfigError, match="no hardware profile"):
        zi.plan(model, optimizer, hardware="laptp", inputs={"input": torch.zeros(1, 64)})


def test_times_of_one_block_that_ran_here() -> None:
    model = ByteGPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = {"tokens": torch.zeros(2, SHAPE.seq, dtype=torch.long)}
    plain, timed = (
        zi.plan(model, optimizer, zi.Config(memory="1GiB"), hardware="laptop", inputs=inputs, calibrate=calibrate)
        for calibrate in (False, True)
    )
    assert plain.time_range.basis is Basis.ESTIMATED
    assert timed.time_range.basis is Basis.TIMED
    assert timed.outcome.compute_seconds > plain.outcome.compute_seconds
    assert timed.outcome.read_bytes == plain.outcome.read_bytes
    with pytest.raises(zi.UsageError, match="no repeated blocks"):
        one = nn.Linear(8, 8)
        used = torch.optim.SGD(one.parameters(), lr=0.1)
        zi.plan(one, used, hardware="laptop", inputs={"input": torch.zeros(1, 8)}, calibrate=True)
