from __future__ import annotations

from collections import Counter

import pytest

from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.step_program import StepPhase, step

MODEL = transformer(4, 16, 2, 8, vocabulary=32)


@pytest.mark.parametrize("interval", [0, 1, 2, 3])
def test_every_unit_gets_its_gradient_once_after_its_last_use(interval: int) -> None:
    uses = step(MODEL, interval)
    completed = [use.completes for use in uses if use.completes is not None]
    assert sorted(completed) == sorted(MODEL.units)
    for unit in MODEL.units:
        last = max(i for i, use in enumerate(uses) if use.operator.unit == unit)
        assert uses[last].completes == unit


@pytest.mark.parametrize(("interval", "num_checkpoints"), [(0, 0), (1, 4), (2, 2), (3, 2)])
def test_a_checkpoint_is_stored_once_and_loaded_once(interval: int, num_checkpoints: int) -> None:
    uses = step(MODEL, interval)
    stored = [use.stores for use in uses if use.stores is not None]
    loaded = [use.loads for use in uses if use.loads is not None]
    assert stored == loaded[::-1] == list(range(num_checkpoints))


def test_blocks_are_computed_again_and_the_rest_is_not() -> None:
    phases = Counter((use.operator.block >= 0, use.phase) for use in step(MODEL, 1))
    assert (
        phases[True, StepPhase.RECOMPUTE]
        == phases[True, StepPhase.FORWARD]
        == phases[True, StepPhase.BACKWARD]
        == 4 * 5
    )
    assert phases[False, StepPhase.RECOMPUTE] == 0
    assert not any(use.phase is StepPhase.RECOMPUTE for use in step(MODEL, 0))


def test_an_embedding_s_backward_needs_no_weight() -> None:
    last = step(MODEL, 1)[-1]
    assert (last.operator.name, last.needs_weight, last.completes) == ("embedding", False, "embedding")
