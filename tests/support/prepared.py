"""A small prepared model for tests of the checkpoint package."""

from __future__ import annotations

import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.checkpoint.training_view import TrainingView

Prepared = tuple[nn.Module, torch.optim.Optimizer, TrainingView]


def prepare_small() -> Prepared:
    """A small model after one step, with a tied weight and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(memory="8MiB"))
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, engine_of(model)
