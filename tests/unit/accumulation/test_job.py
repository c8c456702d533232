from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_infinity.accumulation.job import AccumulationJob
from zero_infinity.errors import UsageError

model = nn.Identity()


def test_a_loss_is_divided() -> None:
    assert AccumulationJob(model, [4.0], lambda _, batch: torch.tensor(batch), 2.0).loss(4.0).item() == 2
    assert AccumulationJob(model, [4.0], lambda _, batch: torch.tensor(batch), 1.0).loss(4.0).item() == 4


@pytest.mark.parametrize(("value", "name"), [(3.0, "a float"), (torch.ones(2, 3), r"shape \(2, 3\)")])
def test_a_loss_has_one_element(value: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        AccumulationJob(model, [0], lambda _, __: value, 1.0).loss(0)
