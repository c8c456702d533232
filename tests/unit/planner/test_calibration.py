from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.planner import hardware
from zero_infinity.planner.calibration import Basis, calibrated, time_range
from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.plan import make_plan
from zero_infinity.planner.training_job import SINGLE, TrainingJob, Workload

MODEL = transformer(4, 256, 4, 64, vocabulary=500)
JOB = TrainingJob(batch=2, states=SINGLE, interval=0)
LAPTOP = hardware.load("laptop")


def test_a_block_takes_what_was_timed() -> None:
    timed = calibrated(Workload(MODEL, LAPTOP, JOB), 0.5, 1.5)
    for block in range(4):
        inside = [operator.seconds for operator in timed.operators if operator.block == block]
        assert sum(forward for forward, _ in inside) == pytest.approx(0.5)
        assert sum(backward for _, backward in inside) == pytest.approx(1.5)
    plain = make_plan(MODEL, LAPTOP, JOB).outcome.compute_seconds
    planned = make_plan(timed, LAPTOP, JOB).outcome.compute_seconds
    assert planned > 8 > plain


def test_what_a_time_rests_on() -> None:
    timed = calibrated(Workload(MODEL, LAPTOP, JOB), 0.5, 1.5)
    measured = replace(LAPTOP, sources={"flops": "measured 2026-01-01: matmul"})
    ranges = [
        time_range(1.0, model, machine) for model, machine in ((timed, LAPTOP), (MODEL, measured), (MODEL, LAPTOP))
    ]
    assert [found.basis for found in ranges] == [Basis.TIMED, Basis.MEASURED, Basis.ESTIMATED]
    assert [found.low for found in ranges] == sorted((found.low for found in ranges), reverse=True)
    assert [found.high for found in ranges] == sorted(found.high for found in ranges)


def test_nothing_to_time() -> None:
    outside = replace(MODEL, operators=MODEL.operators[:1])
    with pytest.raises(ConfigError, match="no repeated blocks"):
        calibrated(Workload(outside, LAPTOP, JOB), 1, 1)
