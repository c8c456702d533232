from __future__ import annotations

import pytest

from zero_infinity.planner.zero_equations import (
    Stage,
    communication_elements,
    largest_model,
    state_bytes,
    state_bytes_per_parameter,
)


def test_stages_split_one_more_kind_each() -> None:
    assert [state_bytes_per_parameter(stage, 64) for stage in Stage] == [16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64]


def test_one_rank_has_nothing_to_split() -> None:
    assert all(state_bytes_per_parameter(stage, 1) == 16 for stage in Stage)


def test_gpt2_takes_24_gigabytes() -> None:
    assert state_bytes(1.5e9, Stage.NONE, 1) == 24e9


@pytest.mark.parametrize("stage", list(Stage))
def test_the_largest_model_fills_the_device(stage: Stage) -> None:
    size = largest_model(32e9, stage, 64)
    assert state_bytes(size, stage, 64) == pytest.approx(32e9)
    assert largest_model(32e9, stage, 64, model_parallel=4) == pytest.approx(4 * size)


def test_communication() -> None:
    assert [communication_elements(1, stage) for stage in Stage] == [2, 2, 2, 3]
    assert communication_elements(8, Stage.PARAMETERS, num_ranks=4) == 3 * 8 * 3 / 4
