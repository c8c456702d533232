from __future__ import annotations

import pytest

from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import load
from zero_infinity.planner.state_tiers import HomeTiers, StateNeed, choose_homes, slowest_homes

GB = 10**9
TB = 10**12


def names(homes: HomeTiers) -> tuple[str, str, str]:
    return homes.parameters.name, homes.optimizer.name, homes.checkpoints.name


def choose(parameters: int, optimizer: int, checkpoints: int, working: int = GB) -> tuple[str, str, str]:
    return names(choose_homes(StateNeed(parameters, optimizer, checkpoints, working), load("dgx2"), 1, TB))


def test_nothing_is_offloaded_when_all_fits() -> None:
    assert choose(20 * GB, 180 * GB, 50 * GB) == ("GPU", "GPU", "GPU")


def test_the_optimizer_leaves_first() -> None:
    assert choose(100 * GB, 900 * GB, 50 * GB) == ("GPU", "CPU", "GPU")


def test_then_checkpoints_while_parameters_can_stay() -> None:
    assert choose(300 * GB, 900 * GB, 400 * GB) == ("GPU", "CPU", "CPU")


def test_both_leave_when_they_must() -> None:
    assert choose(2 * TB, 18 * TB, 400 * GB) == ("NVMe", "NVMe", "CPU")


def test_what_fits_nowhere_is_an_error_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"optimizer states take 81\.9 TiB, but NVMe has only 25\.5 TiB left"):
        choose(10 * TB, 90 * TB, GB)


def test_the_engine_keeps_all_states_together_on_the_slowest_tier_in_use() -> None:
    def slowest(parameters: int, optimizer: int, checkpoints: int) -> tuple[str, str, str]:
        return names(slowest_homes(StateNeed(parameters, optimizer, checkpoints, GB), load("dgx2"), 1, TB))

    assert slowest(20 * GB, 180 * GB, 50 * GB) == ("CPU", "CPU", "GPU")
    assert slowest(200 * GB, 900 * GB, 400 * GB) == ("NVMe", "NVMe", "CPU")
