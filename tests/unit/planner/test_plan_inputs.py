from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner import plan_inputs
from zero_infinity.planner.hardware import load
from zero_infinity.planner.model_shapes import known, transformer
from zero_infinity.planner.plan_inputs import prepare
from zero_infinity.planner.training_job import SINGLE, HomeRule, TrainingJob
from zero_infinity.policy.lookahead import copy_lookahead

MIB = 2**20
MODEL = transformer(12, 512, 8, 128, vocabulary=1000)


def test_states_stream_if_they_do_not_fit_on_the_host() -> None:
    fits = prepare(MODEL, load("laptop"), TrainingJob(batch=1, states=SINGLE))
    assert not fits.streams
    assert fits.resident_units == frozenset(fits.units)
    small = prepare(MODEL, load("laptop"), TrainingJob(batch=1, states=SINGLE, memory=200 * MIB))
    assert small.parameters_stream
    assert small.optimizer_streams
    assert small.resident_units == frozenset()
    # By their bytes alone they fit, but not with what the engine needs besides.
    tight = prepare(MODEL, load("laptop"), TrainingJob(batch=1, states=SINGLE, memory=12 * MODEL.num_parameters))
    assert tight.streams


def test_layers_are_tiled_only_if_they_do_not_fit() -> None:
    job = TrainingJob(batch=1, states=SINGLE, memory=64 * MIB)
    assert prepare(MODEL, load("laptop"), job).model is MODEL
    tiled = prepare(MODEL, load("laptop"), replace(job, memory=8 * MIB))
    assert "0.up[0]" in tiled.units
    assert tiled.model.num_parameters == MODEL.num_parameters
    assert all(size.parameters + size.arriving <= MIB for size in tiled.units.values())


def test_the_paper_tiles_what_is_larger_than_its_look_ahead() -> None:
    job = TrainingJob(
        batch=1, placement=HomeRule.PAPER, device_memory=48 * MIB, parameters_on="CPU", optimizer_on="CPU"
    )
    inputs = prepare(known("zi-10b"), load("dgx2"), job)
    assert inputs.device_cache == 48 * MIB
    assert (
        max(inputs.whole_bytes(name) for name in inputs.units)
        <= copy_lookahead(48 * MIB, on_device=False) + 16 * 64 * 2
    )


def test_a_large_model_is_planned_by_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_inputs, "MAX_UNITS", 25)
    inputs = prepare(MODEL, load("laptop"), TrainingJob(batch=1, states=SINGLE, memory=200 * MIB))
    assert inputs.scale == 2.0
    assert inputs.model.num_blocks == 6
    assert inputs.workload.model.num_blocks == 12


def test_checkpoints_go_where_they_are_sent() -> None:
    laptop = load("laptop")
    job = TrainingJob(batch=1, states=SINGLE, memory=200 * MIB)
    assert prepare(MODEL, laptop, job).homes.checkpoints is laptop.host
    offloaded = prepare(MODEL, laptop, replace(job, offload_checkpoints=True))
    assert offloaded.homes.checkpoints is laptop.storage[0]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (TrainingJob(batch=1, memory=1 << 50), "memory is 1.0 PiB, but RAM of RTX 4090"),
        (TrainingJob(batch=1, device_memory=1 << 50), "device_memory is 1.0 PiB, but GPU of RTX 4090"),
        (TrainingJob(batch=1, parameters_on="tape"), "has no tier 'tape'; there are: GPU, RAM, NVMe"),
    ],
)
def test_what_the_machine_does_not_have(job: TrainingJob, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(MODEL, load("rtx4090"), job)


def test_activations_that_leave_no_room() -> None:
    with pytest.raises(CapacityError, match=r"one device needs .* for activations and its share of the states"):
        prepare(known("gpt3-13b"), load("rtx4090"), TrainingJob(batch=256))
