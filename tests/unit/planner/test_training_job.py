from __future__ import annotations

from typing import Any

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.planner.training_job import MIXED, PAPER, SINGLE, TrainingJob


def test_bytes_of_a_parameter() -> None:
    assert [states.parameter + states.record for states in (SINGLE, MIXED)] == [12, 14]
    # ZeRO-Infinity counts the gradient as well.
    assert PAPER.parameter + PAPER.gradient + PAPER.record == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch is 0; accepted: a number above zero"),
        ({"num_nodes": 0}, "nodes is 0; accepted: an integer of at least 1"),
        ({"devices_per_node": 0}, "gpus is 0; accepted: an integer of at least 1"),
        ({"interval": -1}, "interval is -1; accepted: 0"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingJob(**{"batch": 1, **change})
