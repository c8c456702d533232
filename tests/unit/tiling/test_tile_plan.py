"""Which weights are cut, and how."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import zero_infinity as zi
from zero_infinity.params.precision import Precision
from zero_infinity.policy.partition import ONE_RANK
from zero_infinity.tiling.tile_plan import Tiling, cut, find_tileable

PLAIN = Precision(torch.float32, torch.float32, torch.float32, torch.float32, has_master=False)
SMALL = Precision(torch.bfloat16, torch.float32, torch.float32, torch.float32, has_master=True)


@given(
    num_rows=st.integers(1, 5000),
    width=st.integers(1, 300),
    above=st.integers(1, 1 << 20),
    precision=st.sampled_from([PLAIN, SMALL]),
    default=st.booleans(),
)
def test_tiles_with_their_gradients_are_within_bounds(
    num_rows: int, width: int, above: int, precision: Precision, default: bool
) -> None:
    row = width * (precision.stored.itemsize + 4)
    tiling = Tiling(above, is_default=default)
    if num_rows * row > above and row > above and not default:
        with pytest.raises(zi.ConfigError, match=r"(?s)tile_above is .* one row of 'w' .*fix:   tile_above="):
            tiling.rows("w", torch.Size((num_rows, width)), precision)
        return
    rows = tiling.rows("w", torch.Size((num_rows, width)), precision)
    if rows is None:
        assert num_rows * row <= above or num_rows == 1
    else:
        assert rows * row <= max(above, row)
        assert 1 <= rows < num_rows
        # And not one tile more than it takes.
        assert -(-num_rows // rows) <= -(-num_rows // max(1, above // row))


@given(num_rows=st.integers(2, 60), width=st.integers(1, 9), rows=st.integers(1, 59))
def test_tiles_are_all_rows_in_their_order(num_rows: int, width: int, rows: int) -> None:
    weight = nn.Parameter(torch.randn(num_rows, width))
    whole = cut(
        "layer",
        "layer.weight",
        weight,
        rows,
        precision=PLAIN,
        device=torch.device("cpu"),
        numbers=itertools.count(7),
        sharding=ONE_RANK,
    )
    assert torch.equal(torch.cat([tile.value() for tile in whole.tiles]), weight)
    assert [tile.unit.number for tile in whole.tiles] == list(range(7, 7 + len(whole.tiles)))
    assert all(tile.whole is whole and tile.parameter is weight for tile in whole.tiles)
    assert whole.parts == whole.tiles
    assert whole.tiles[0].name == f"layer.weight[0:{min(rows, num_rows)}]"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.positions = nn.Embedding(16, 8)
        self.clipped = nn.Embedding(50, 8, max_norm=1.0)
        self.layer = nn.Linear(8, 16)
        self.old = Conv1D(8, 16)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 50)
        self.norm = nn.LayerNorm(8)
        self.turned = nn.Linear(8, 16)
        self.turned.weight = nn.Parameter(torch.randn(8, 16).t())
        self.patched = nn.Linear(8, 16)
        self.patched.forward = lambda x: x  # type: ignore[method-assign]


def test_what_can_be_cut() -> None:
    model = Model()
    found = find_tileable(model)
    names = {name: found[p] for name, p in model.named_parameters() if p in found}
    assert names == {
        "words.weight": False,
        "positions.weight": False,
        "layer.weight": False,
        "old.weight": False,
        "head.weight": True,
    }
    model.head.weight = model.words.weight
    assert find_tileable(model)[model.words.weight]
