"""Which parameters of a model are managed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.params.find_parameters import find_parameters, manageable, own_parameters, refuse_shared_memory


def test_a_tied_parameter_belongs_to_its_first_owner() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert [(name, [n for n, _ in own]) for _, name, own in find_parameters(model)] == [
        ("0", ["0.weight"]),
        ("1", ["1.bias"]),
    ]
    assert list(own_parameters(model[1])) == ["weight", "bias"]


def test_what_is_not_real_and_dense_stays_where_it_is() -> None:
    assert manageable(nn.Parameter(torch.zeros(2)))
    assert not manageable(nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    assert not manageable(nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False))
    assert not manageable(nn.Parameter(torch.zeros(0)))
    with pytest.raises(UsageError, match="lazy parameter"):
        manageable(nn.UninitializedParameter())


def test_memory_in_common_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_shared_memory(model)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UsageError, match=r"'0.weight' and '1.weight' share memory"):
        refuse_shared_memory(model)
