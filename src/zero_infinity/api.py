"""What a training script calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.config import Config
from zero_infinity.runtime.engine import TrainingEngine
from zero_infinity.runtime.optimizer import StreamedOptimizer


def prepare(
    model: nn.Module, optimizer: Optimizer, config: Config | None = None
) -> tuple[nn.Module, StreamedOptimizer]:
    """Move the model's states to where `config` says and return the model with the optimizer to train it with."""
    engine = TrainingEngine(model, optimizer, config or Config())
    model.__dict__["_zero_infinity_engine"] = engine
    return model, StreamedOptimizer(engine, optimizer)
