from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from zero_infinity.block_timing import find_call, time_block
from zero_infinity.errors import UsageError
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape


def test_one_block_runs_with_real_values() -> None:
    with FakeTensorMode():
        model = ByteGPT(Shape(layers=2, hidden=64, heads=4, seq=16))
        tokens = torch.zeros(1, 16, dtype=torch.long)
        call = find_call(model, model.blocks[1], {"tokens": tokens})
    ran = []
    call.block.register_forward_hook(lambda module, args, output: ran.append(args[0]))
    before = torch.get_rng_state()
    times = time_block(call, num_copies=3)
    assert times.forward > 0
    assert times.backward > 0
    assert {type(value) for value in ran} == {torch.Tensor}
    assert {tuple(value.shape) for value in ran} == {(3, 16, 64)}
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.blocks[1]._forward_pre_hooks


def test_a_block_that_is_never_called() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Idle()
    with pytest.raises(UsageError, match="does not call its Linear"):
        find_call(model, model.idle, {"x": torch.zeros(1, 4)})
