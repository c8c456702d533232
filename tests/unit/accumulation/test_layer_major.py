"""`LayerMajorStep` of a real engine; what it computes is compared in `equivalence/test_layer_major_accumulation.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import encoder, mean_square, sequences
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of

batch = sequences()


class Late(nn.Module):
    """Draws random numbers for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()
        self.inner.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y + torch.rand([], device=x.device) if x.mean() > 5 else y


def test_random_numbers_that_were_not_drawn_before_are_an_error(tmp_path: Path) -> None:
    model = Late()
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zi.Config(nvme=tmp_path))
    for _ in range(2):
        zi.accumulate(model, [batch(0), batch(1)], mean_square)
        optimizer.step()
        optimizer.zero_grad()
    assert engine_of(model).accumulation.is_layer_major
    with pytest.raises(zi.UsageError, match="micro-batch 1 is not as those before it: it draws random numbers"):
        zi.accumulate(model, [batch(0), batch(1) + 10], mean_square)


def test_a_first_micro_batch_that_does_is_only_slower(tmp_path: Path) -> None:
    model = Late()
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zi.Config(nvme=tmp_path))
    for _ in range(2):
        zi.accumulate(model, [batch(0), batch(1)], mean_square)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(zi.ConfigWarning, match="draws random numbers, which it did not before"):
        losses = zi.accumulate(model, [batch(0) + 10, batch(1)], mean_square)
    assert len(losses) == 2
