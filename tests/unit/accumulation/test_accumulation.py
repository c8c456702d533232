"""When micro-batches run one after another, and what is said about it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import encoder, mean_square, sequences, vectors
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of


class Remembers(nn.Module):
    """Keeps something of one micro-batch on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()
        self.before = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before = x.mean()
        y: torch.Tensor = self.inner(x)
        return y + self.before


class Python(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * random.random()


class Unused(Remembers):
    """Its blocks are not called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner.layers[0].linear1(x)
        return y


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no blocks": (lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "no repeated blocks"),
    "remembers": (Remembers, "the loss of micro-batch 0 is"),
    "python": (Python, "random numbers from Python"),
    "unused": (Unused, "calls none of its repeated blocks"),
}


@pytest.mark.parametrize("case", REASONS)
def test_it_runs_the_loop_and_says_why_once(case: str, tmp_path: Path) -> None:
    make, reason = REASONS[case]
    batch = vectors() if case == "no blocks" else sequences()
    model = make()
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zi.Config(nvme=tmp_path))

    def accumulate() -> None:
        assert len(zi.accumulate(model, [batch(0), batch(1), batch(2)], mean_square)) == 3
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(zi.ConfigWarning, match=reason):
        accumulate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate()
    assert not engine_of(model).accumulation.is_layer_major
