"""Sets of parameters that ranks tell each other."""

from __future__ import annotations

import torch
from torch import nn

from zero_infinity.optim.parameter_bits import ParameterBits
from zero_infinity.params.unit import make_unit


def test_the_union_of_what_ranks_have_comes_back_in_order() -> None:
    named = [(f"p{number}", nn.Parameter(torch.zeros(1))) for number in range(130)]  # three words
    cpu = torch.device("cpu")
    every = make_unit("unit", named, dtype=torch.float32, compute_dtype=torch.float32, device=cpu).parameters
    bits = ParameterBits(every)
    ranks = [({every[0], every[129]}, {every[61]}), ({every[62], every[0]}, set())]
    said = [[*bits.pack(first), *bits.pack(second)] for first, second in ranks]
    assert all(0 <= word < 2**63 for words in said for word in words)
    assert list(bits.unpack(said, 0)) == [every[0], every[62], every[129]]
    assert list(bits.unpack(said, 1)) == [every[61]]
