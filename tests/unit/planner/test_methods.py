from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.planner import hardware
from zero_infinity.planner.decoders import named
from zero_infinity.planner.methods import updated_by, with_adapters
from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.plan import make_plan
from zero_infinity.planner.training_job import MIXED, TrainingJob, Workload
from zero_infinity.planner.unit_states import optimizer_named


def test_adapters_have_the_size_of_their_rank() -> None:
    base = named("llama3-8b")
    model = with_adapters(base, 16, parameter_bytes=2)
    trained = {name: size for name, size in model.units.items() if name not in model.unit_states}
    layer = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert sum(trained.values()) == 32 * layer == 41_943_040  # what PEFT prints for all linear layers
    assert model.num_weights == base.num_parameters


def test_a_quantised_base_is_read_and_never_written() -> None:
    job = TrainingJob(batch=1, memory=2 << 30, device_memory=2 << 30)
    machine = hardware.load("rtx4090")
    model = with_adapters(named("llama3-8b", 512), 16, parameter_bytes=2, quantised="nf4")
    work = Workload(model, machine, job)
    assert work.parameter_bytes == pytest.approx(0.5159 * 6.98e9 + 2 * 1.05e9 + 2 * 42e6, rel=0.01)
    plan = make_plan(model, machine, replace(job, parameters_on="NVMe", optimizer_on="NVMe"))
    assert plan.outcome.read_bytes > 4e9
    assert plan.outcome.written_bytes < 0.1 * plan.outcome.read_bytes
    assert work.record_bytes == 12 * 41_943_040


def test_backward_of_a_frozen_weight_is_half() -> None:
    base = transformer(2, 256, 4, 64)
    machine, job = hardware.load("laptop"), TrainingJob(batch=1, interval=0)
    whole = make_plan(base, machine, job).outcome.compute_seconds
    adapted = make_plan(with_adapters(base, 1, parameter_bytes=2), machine, job).outcome.compute_seconds
    assert 0.6 < adapted / whole < 0.75


def test_muon_has_the_matrices_in_blocks() -> None:
    base = transformer(2, 256, 4, 64, vocabulary=1000)
    model = updated_by(base, optimizer_named("muon"), 2)
    assert set(model.unit_states) == {name for name in base.units if name != "embedding"}
    assert updated_by(base, optimizer_named("adamw"), 2) is base
    job = TrainingJob(batch=1, states=MIXED)
    records = Workload(model, hardware.load("laptop"), job).record_bytes
    assert records == 8 * (base.num_parameters - 256_000) + 12 * 256_000


def test_nothing_to_adapt() -> None:
    with pytest.raises(ConfigError, match="no linear layers"):
        with_adapters(replace(transformer(1, 64, 4, 8), operators=()), 8, parameter_bytes=2)
