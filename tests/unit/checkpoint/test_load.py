from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.prepared import Prepared

import zero_infinity as zi
from zero_infinity.checkpoint.load import CheckpointLoad
from zero_infinity.checkpoint.save import CheckpointSave


def test_values_states_settings_and_steps_come_back(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer, view = prepared
    CheckpointSave(model, view, with_optimizer=True).write(tmp_path, {"a": 1}, None)
    with zi.gathered(model):
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    optimizer.param_groups[0]["lr"] = 5.0
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    assert CheckpointLoad(model, view, with_optimizer=True, strict=True).read(tmp_path, {}) == {"a": 1}
    assert view.num_steps == 1
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_values_alone_leave_the_optimizer(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer, view = prepared
    CheckpointSave(model, view, with_optimizer=False).write(tmp_path, {}, None)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(zi.CheckpointError, match="the optimizer .1.: was not saved"):
        CheckpointLoad(model, view, with_optimizer=True, strict=True).read(tmp_path, {})
    CheckpointLoad(model, view, with_optimizer=False, strict=True).read(tmp_path, {})
    assert view.num_steps == 2
