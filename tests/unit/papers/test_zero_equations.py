from __future__ import annotations

import pytest

from zero_infinity.papers.zero_equations import (
    communication_elements,
    largest_model,
    state_bytes,
    state_bytes_per_parameter,
)
from zero_infinity.policy.zero_stage import ZeroStage


def test_stages_split_one_more_kind_each() -> None:
    assert [state_bytes_per_parameter(stage, 64) for stage in ZeroStage] == [16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64]


def test_one_rank_has_nothing_to_split() -> None:
    assert all(state_bytes_per_parameter(stage, 1) == 16 for stage in ZeroStage)


def test_gpt2_takes_24_gigabytes() -> None:
    assert state_bytes(1.5e9, ZeroStage.NONE, 1) == 24e9


@pytest.mark.parametrize("stage", list(ZeroStage))
def test_the_largest_model_fills_the_device(stage: ZeroStage) -> None:
    size = largest_model(32e9, stage, 64)
    assert state_bytes(size, stage, 64) == pytest.approx(32e9)
    assert largest_model(32e9, stage, 64, model_parallel=4) == pytest.approx(4 * size)


def test_communication() -> None:
    assert [communication_elements(1, stage) for stage in ZeroStage] == [2, 2, 2, 3]
    assert communication_elements(8, ZeroStage.PARAMETERS, num_ranks=4) == 3 * 8 * 3 / 4
