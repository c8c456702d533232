"""Which units live in RAM and which on NVMe."""

from __future__ import annotations

from support.unit_sizes import adam

from zero_infinity.policy.homes import Home, home_while_building
from zero_infinity.policy.memory_budget import place
from zero_infinity.policy.unit_sizes import UnitSize

MIB = 2**20


def test_small_units_stay_while_they_are_a_sliver() -> None:
    units = [adam("norm", 4096), adam("matrix", 64 * MIB)]
    roomy = place(units, 512 * MIB, [], nvme=True)
    assert roomy.homes == (Home.RAM, Home.NVME)
    many = [adam(f"norm{number}", 200_000) for number in range(100)]
    assert set(place(many, 16 * MIB, [], nvme=True).homes) == {Home.NVME}


def test_a_home_that_was_decided_before_is_kept() -> None:
    decided = UnitSize("norm", 4096, 8192, 4096, 4096, home=Home.NVME)
    assert place([decided, adam("matrix", 64 * MIB)], 512 * MIB, [], nvme=True).homes == (Home.NVME, Home.NVME)


def test_a_model_that_is_built_keeps_small_units_while_they_are_a_sliver() -> None:
    assert home_while_building(4096, 0, 512 * MIB, nvme=True) is Home.RAM
    assert home_while_building(4096, 8 * MIB, 512 * MIB, nvme=True) is Home.NVME
    assert home_while_building(MIB, 0, 512 * MIB, nvme=True) is Home.NVME
    assert home_while_building(MIB, 0, 512 * MIB, nvme=False) is Home.RAM
