from __future__ import annotations

import torch
from torch import nn

from zero_infinity.accumulation.forward_effects import After, Before, same_bits
from zero_infinity.accumulation.random_states import random_state

CPU = torch.device("cpu")


def test_buffers_and_random_states_are_put_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    before = Before(model, None, CPU)
    first = model(torch.ones(3, 2))
    assert before.changed_names() == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    before.put_back()
    assert before.changed_names() == set()
    assert torch.equal(model(torch.ones(3, 2)), first)
    some = Before(model, {"0.running_mean"}, CPU)
    assert list(some.buffers()) == ["0.running_mean"]


def test_differences_are_named() -> None:
    state = random_state(CPU)
    one, other = torch.ones(()), torch.zeros(())
    plain = After([one], state, {".mean": one})
    assert plain.difference(After([one], state, {".mean": one})) == ""
    assert "the loss of micro-batch 0 is 1.0, not 0.0" in plain.difference(After([other], state, {".mean": one}))
    assert "the buffer 'mean'" in plain.difference(After([one], state, {".mean": other}))
    torch.rand(1)
    assert "random numbers" in plain.difference(After([one], random_state(CPU), {".mean": one}))


def test_bits() -> None:
    nan = torch.tensor(float("nan"))
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(None, nan)
    assert not same_bits(torch.ones(2), torch.ones(2, 1))
