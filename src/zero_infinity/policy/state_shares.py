"""Which share of a model's states is in device memory, in RAM and on NVMe. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import MemoryDivision
from zero_infinity.policy.unit_sizes import UnitSize


@dataclass(frozen=True, slots=True)
class StateShares:
    """Bytes of parameters, optimizer states and master weights."""

    device: int
    ram: int
    nvme: int


def state_shares(sizes: Sequence[UnitSize], homes: Sequence[Home], division: MemoryDivision) -> StateShares:
    """The shares of units with these sizes and homes, with a cache of blocks of `division`.

    As much as fits in the cache stays in RAM from one step to the next, and counts as there.
    """
    by_home = dict.fromkeys(Home, 0)
    for size, home in zip(sizes, homes, strict=True):
        by_home[home] += size.parameters + size.record
    cached = min(by_home[Home.NVME], division.cache)
    return StateShares(by_home[Home.DEVICE], by_home[Home.RAM] + cached, by_home[Home.NVME] - cached)
