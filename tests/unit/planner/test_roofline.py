from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.planner import hardware
from zero_infinity.planner.model_shapes import OperatorShape, transformer
from zero_infinity.planner.roofline import compute_seconds
from zero_infinity.planner.step_program import OperatorRun, StepPhase
from zero_infinity.planner.training_job import SINGLE, TrainingJob, Workload

LAPTOP = hardware.load("laptop")
MEASURED = replace(LAPTOP, matmul_flops=((100.0, 1e9), (1000.0, 3e9)), attention_flops=5e8, saved_rate=1e6)
JOB = TrainingJob(batch=1, states=SINGLE)
LINEAR = OperatorShape("linear", 100 * 100, 2.0 * 100 * 100, 100.0)


def seconds(operator: OperatorShape, phase: StepPhase, machine: hardware.Hardware, seq: int = 100) -> float:
    workload = Workload(replace(transformer(1, 64, 4, seq), operators=(operator,)), machine, JOB)
    return compute_seconds(OperatorRun(operator, phase, needs_weight=True), workload)


def test_one_rate_is_all_there_is() -> None:
    assert seconds(LINEAR, StepPhase.FORWARD, LAPTOP) == pytest.approx(2e6 / LAPTOP.flops)
    assert seconds(LINEAR, StepPhase.BACKWARD, LAPTOP) == pytest.approx(4e6 / LAPTOP.flops)
    assert seconds(LINEAR, StepPhase.REACH, LAPTOP) == 0


def test_small_products_are_slow_and_what_is_saved_takes_time() -> None:
    memory_bound = 4 * 100 * 100 / 1e6
    assert seconds(LINEAR, StepPhase.FORWARD, MEASURED) == pytest.approx(2e6 / 1e9 + memory_bound)
    assert seconds(LINEAR, StepPhase.BACKWARD, MEASURED) == pytest.approx(2 * (2e6 / 1e9 + memory_bound))
    large = replace(LINEAR, saved_elements_per_token=0.0)
    assert seconds(large, StepPhase.FORWARD, MEASURED, seq=10**6) == pytest.approx(2e10 / 3e9)
    between = seconds(large, StepPhase.FORWARD, MEASURED, seq=3163)  # the side of its cube is 316: half way
    assert between == pytest.approx(2e4 * 3163 / 2e9, rel=0.01)


def test_attention_has_its_own_rate() -> None:
    attention = OperatorShape("attention", 0, 1000.0, 0.0)
    assert seconds(attention, StepPhase.FORWARD, MEASURED) == pytest.approx(1e5 / 5e8)


def test_a_measured_time_is_taken() -> None:
    timed = replace(LINEAR, seconds=(3.0, 4.0))
    assert seconds(timed, StepPhase.RECOMPUTE, MEASURED) == 3
    assert seconds(timed, StepPhase.BACKWARD, MEASURED) == 4
