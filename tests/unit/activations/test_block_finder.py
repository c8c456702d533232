"""Which modules of a model are its repeated blocks. (`tests/equivalence/test_activation_checkpointing.py` trains with them.)"""

from __future__ import annotations

import pytest
from torch import nn

from zero_infinity.activations.block_finder import find_stacks, repeated_blocks
from zero_infinity.errors import UsageError


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def test_all_stacks_in_their_order() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(block() for _ in range(2))
    model.decoder = nn.ModuleList(block() for _ in range(3))
    assert repeated_blocks(model) == [*model.encoder, *model.decoder]


def test_a_model_without_blocks_has_none() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert repeated_blocks(model) == []
    with pytest.raises(UsageError, match="no repeated blocks"):
        find_stacks(model)
