from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_infinity as zi


def test_there_is_something_to_do() -> None:
    with pytest.raises(zi.UsageError, match="no micro-batches"):
        zi.accumulate(nn.Linear(2, 2), [], lambda model, batch: torch.zeros(()))


def test_the_model_is_prepared() -> None:
    with pytest.raises(zi.UsageError, match="not prepared"):
        zi.accumulate(nn.Linear(2, 2), iter([1]), lambda model, batch: torch.zeros(()))
