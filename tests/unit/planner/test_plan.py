from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import load
from zero_infinity.planner.model_shapes import known, transformer
from zero_infinity.planner.plan import alternatives, largest_model, make_plan, works
from zero_infinity.planner.training_job import MIXED, SINGLE, TrainingJob

MIB = 2**20
MODEL = transformer(6, 256, 4, 64, vocabulary=1000)
JOB = TrainingJob(batch=1, states=SINGLE, memory=20 * MIB)


def test_a_plan_says_what_lies_where_and_what_to_configure() -> None:
    plan = make_plan(MODEL, load("laptop"), JOB)
    uses = {use.tier.name: use.uses for use in plan.tiers}
    assert uses["NVMe"] == {"parameters": 4 * MODEL.num_parameters, "optimizer states": 8 * MODEL.num_parameters}
    assert uses["RAM"]["cache of the slower tier, gradients"] <= 20 * MIB
    assert plan.settings == {"memory": "20MiB", "nvme": "/path/on/a/drive", "checkpoint_activations": True}
    assert plan.written_per_node == plan.outcome.written_bytes
    assert plan.drive_life_seconds == pytest.approx(300e12 / plan.written_per_node * plan.outcome.seconds)


def test_needs_are_met_or_not() -> None:
    needs = {need.data.name: need for need in make_plan(MODEL, load("laptop"), JOB).needs}
    assert set(needs) == {"PARAMETERS", "OPTIMIZER", "ACTIVATIONS"}
    assert all(need.is_enough == (need.has >= need.needed) for need in needs.values())


def test_the_largest_model_fills_every_tier() -> None:
    laptop = load("laptop")
    in_memory = replace(JOB, memory=None, early_update=False)
    assert largest_model(laptop, in_memory) == (laptop.host.capacity + laptop.storage[0].capacity) // 16
    assert largest_model(laptop, replace(JOB, num_nodes=2)) == 2 * (20 * MIB + laptop.storage[0].capacity) // 12


def test_changes_that_are_suggested_work() -> None:
    hardware, model = load("rtx4090"), known("gpt3-13b")
    job = TrainingJob(batch=128, states=MIXED)
    assert not works(model, hardware, job)
    with pytest.raises(CapacityError):
        make_plan(model, hardware, job)
    found = alternatives(model, hardware, job, with_seq=lambda seq: known("gpt3-13b", seq))
    batch = next(change for change in found if change.startswith("--batch")).split()[1]
    assert works(model, hardware, replace(job, batch=int(batch)))
    assert not works(model, hardware, replace(job, batch=2 * int(batch)))
    seq = next(change for change in found if change.startswith("--seq")).split()[1]
    assert works(known("gpt3-13b", int(seq)), hardware, job)
    assert not works(known("gpt3-13b", 2 * int(seq)), hardware, job)


def test_a_setting_that_is_too_small_may_be_left_out() -> None:
    tiny = replace(JOB, memory=100_000)
    assert "no --memory: all that the machine has" in alternatives(MODEL, load("laptop"), tiny)
