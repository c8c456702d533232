from __future__ import annotations

from dataclasses import replace

from zero_infinity.planner.hardware import load
from zero_infinity.planner.methods import updated_by
from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.plan import make_plan
from zero_infinity.planner.training_job import SINGLE, TrainingJob
from zero_infinity.planner.unit_states import optimizer_named
from zero_infinity.planner.warnings import bandwidth_note, warnings_of

MIB = 2**20
MODEL = transformer(6, 256, 4, 64, vocabulary=1000)
JOB = TrainingJob(batch=1, states=SINGLE, memory=20 * MIB)


def test_what_fits_with_ease_needs_no_warning() -> None:
    plan = make_plan(MODEL, load("laptop"), replace(JOB, memory=None))
    assert warnings_of(plan) == []


def test_a_drive_that_wears_out_and_a_step_that_waits() -> None:
    plan = make_plan(MODEL, load("laptop"), JOB)
    life, waiting = warnings_of(plan)
    assert life.startswith("the drives wear out after")
    assert "rated for 272.8 TiB" in life
    assert "of a step is waiting for NVMe, which is busy for" in waiting
    assert "each step moves" not in waiting


def test_a_tier_that_is_nearly_full() -> None:
    laptop = load("laptop")
    least = make_plan(MODEL, laptop, JOB).least_bytes(laptop.host)
    host = replace(laptop.host, capacity=int(least / 0.96))
    full = replace(laptop, tiers=(host, *laptop.storage))
    (warning,) = [text for text in warnings_of(make_plan(MODEL, full, JOB)) if "is full" in text]
    assert warning.startswith("RAM is full to 96.0%")
    roomy = replace(laptop, tiers=(replace(host, capacity=int(least / 0.94)), *laptop.storage))
    assert not [text for text in warnings_of(make_plan(MODEL, roomy, JOB)) if "is full" in text]


def test_a_long_step() -> None:
    slow = replace(load("laptop"), flops=1e6)
    assert any("a thousand of them" in text for text in warnings_of(make_plan(MODEL, slow, JOB)))


def test_bandwidth_that_is_too_low_is_explained() -> None:
    laptop = load("laptop")
    note = bandwidth_note(make_plan(MODEL, laptop, JOB))
    assert note is not None
    assert "only what is left of them is waited for" in note
    fast = replace(laptop, flops=1.0)
    assert bandwidth_note(make_plan(MODEL, fast, JOB)) is None


def test_matrix_products_of_an_update_that_nobody_times() -> None:
    model = updated_by(MODEL, optimizer_named("muon"), 2)
    card = load("rtx4090")
    (warning,) = [text for text in warnings_of(make_plan(model, card, JOB)) if "multiplies matrices" in text]
    assert "host_flops" in warning
    timed = replace(card, host_flops=1e12)
    assert not [text for text in warnings_of(make_plan(model, timed, JOB)) if "multiplies matrices" in text]
    slower, faster = (make_plan(model, machine, JOB).outcome.seconds for machine in (timed, card))
    assert slower > faster
