"""Where a model's states are."""

from __future__ import annotations

from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import MemoryDivision
from zero_infinity.policy.state_shares import StateShares, state_shares
from zero_infinity.policy.unit_sizes import UnitSize


def test_what_the_cache_holds_is_in_ram() -> None:
    sizes = [UnitSize(str(number), parameters=10, record=20, gradients=10, arriving=10) for number in range(4)]
    homes = [Home.DEVICE, Home.RAM, Home.NVME, Home.NVME]
    division = MemoryDivision((), resident=40, set_aside=0, cache=25, lookahead=0, chunk_bytes=1, swap=0)
    assert state_shares(sizes, homes, division) == StateShares(device=30, ram=55, nvme=35)
