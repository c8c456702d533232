"""What users of data-parallel training rely on, at every world size, stage and home."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.behaviours import BEHAVIOURS
from support.scenarios import CELLS, check_table

# In every run a behaviour has one cell: a step of 3 through stages and homes, and world sizes by turns, meet all pairs.
WORLD_SIZES = (2, 1, 2, 3)
NUM_PARTS = 2


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_behaviour_once(num_ranks: int, part: int, tmp_path: Path) -> None:
    here = [
        (scenario, *CELLS[(3 * number + number // len(CELLS)) % len(CELLS)])
        for number, scenario in enumerate(BEHAVIOURS)
        if WORLD_SIZES[number % len(WORLD_SIZES)] == num_ranks
    ]
    check_table(here[part::NUM_PARTS], num_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "home"), CELLS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_stage_and_home(num_ranks: int, stage: int, home: str, tmp_path: Path) -> None:
    check_table([(scenario, stage, home) for scenario in BEHAVIOURS], num_ranks, tmp_path)


def test_there_are_many() -> None:
    assert len({str(scenario) for scenario in BEHAVIOURS}) == len(BEHAVIOURS) >= 120
