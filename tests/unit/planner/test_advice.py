from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.planner import hardware
from zero_infinity.planner.advice import best_settings, better_machines, cost_of
from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.plan import make_plan
from zero_infinity.planner.training_job import MIXED, TrainingJob

MODEL = transformer(4, 2048, 16, 512, vocabulary=8000)
CARD = hardware.load("rtx4090")
JOB = TrainingJob(batch=1, states=MIXED, memory=1 << 30)


def test_settings_are_plans_by_their_speed() -> None:
    found = best_settings(MODEL, CARD, JOB, max_sequences=16)
    speeds = [choice.tokens_per_second for choice in found]
    assert speeds == sorted(speeds, reverse=True)
    assert len(found) == 6
    for choice in found:
        job = choice.plan.inputs.job
        assert job.batch * job.accumulation <= 16
        assert choice.tokens_per_second == make_plan(MODEL, CARD, job).outcome.tokens_per_second
    assert speeds[0] > make_plan(MODEL, CARD, JOB).outcome.tokens_per_second


def test_what_helps_most_is_what_it_waits_for() -> None:
    before = make_plan(MODEL, CARD, JOB)
    assert before.outcome.bottleneck == "NVMe"
    found = {choice.label: choice.tokens_per_second for choice in better_machines(MODEL, CARD, JOB)}
    assert set(found) == {"twice the RAM", "a second NVMe", "2 devices", "twice the memory of GPU"}
    assert found["a second NVMe"] > 1.5 * before.outcome.tokens_per_second
    assert found["twice the RAM"] > found["a second NVMe"]  # everything fits there


def test_a_run_costs_time_money_and_energy() -> None:
    plan = make_plan(MODEL, CARD, JOB)
    tokens = 3600 * plan.outcome.tokens_per_second
    assert cost_of(plan, tokens, None).money is None
    assert cost_of(plan, tokens, 2.5).money == pytest.approx(2.5)
    priced = replace(plan, inputs=make_plan(MODEL, replace(CARD, price_per_hour=4.0, watts=500.0), JOB).inputs)
    cost = cost_of(priced, tokens, None)
    assert (cost.seconds, cost.money, cost.joules) == pytest.approx((3600, 4.0, 500 * 3600))


def test_nothing_fits() -> None:
    assert not best_settings(transformer(2, 65536, 16, 8192), replace(CARD, tiers=CARD.tiers[:2]), JOB, max_sequences=1)
