"""A plan and a run take the same decisions: the bytes that the simulator predicts are the bytes that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.prompt import let_nothing_lag

import zero_infinity as zi
from zero_infinity.activations.block_finder import repeated_blocks
from zero_infinity.api import engine_of
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.planner import hardware, module_shapes
from zero_infinity.planner.outcome import SimulatedStep
from zero_infinity.planner.plan_inputs import prepare
from zero_infinity.planner.simulator import WARM_UP_STEPS, simulate
from zero_infinity.planner.training_job import SINGLE, TrainingJob

SHAPE = Shape(layers=6, hidden=256, heads=4, seq=64)  # 55 MiB of states
MIB = 2**20


def planned(memory: int, *, early: bool, batch: int = 1, **settings: Any) -> SimulatedStep:
    with torch.device("meta"):
        tokens = torch.zeros(batch, SHAPE.seq, dtype=torch.long)
        inputs = {"tokens": tokens, "targets": tokens}
        network = ByteGPT(SHAPE)
        model = module_shapes.describe(
            network, inputs, batch=batch, seq=SHAPE.seq, name="gpt", dtype_bytes=4, blocks=repeated_blocks(network)
        )
    interval = int(settings.get("checkpoint_activations", False))
    offload = settings.get("offload_activations")
    job = TrainingJob(
        batch=batch, states=SINGLE, memory=memory, interval=interval, early_update=early, offload_checkpoints=offload
    )
    return simulate(prepare(model, hardware.load("laptop"), job))


def measured(memory: int, directory: Path, *, early: bool, batch: int = 1, **settings: Any) -> tuple[int, int, int]:
    """Bytes read and written in the step that the simulator reports, and the most that was held."""
    torch.manual_seed(0)
    model = ByteGPT(SHAPE)
    config = zi.Config(memory=memory, nvme=directory, update="auto" if early else "after_backward", **settings)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config)
    let_nothing_lag(model)
    engine = engine_of(model)
    tokens = torch.randint(0, 256, (batch, SHAPE.seq))
    before = after = zi.stats(model)
    for _ in range(WARM_UP_STEPS + 1):
        before = after
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.parameter_store.update_worker.drain()  # not `settle`, which runs the updates of the next forward now
        engine.store.settle()
        after = zi.stats(model)
    return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written, after.memory_peak


@pytest.mark.half
@pytest.mark.parametrize("early", [True, False], ids=["update in backward", "after backward"])
@pytest.mark.parametrize("memory", [9 * MIB, 16 * MIB])
def test_the_bytes_that_move_are_the_bytes_that_were_planned(memory: int, early: bool, tmp_path: Path) -> None:
    plan = planned(memory, early=early)
    read, written, peak = measured(memory, tmp_path, early=early)
    assert (plan.read_bytes, plan.written_bytes) == (read, written)
    assert plan.peak_bytes["RAM"] == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("offload", [False, True])
def test_blocks_that_are_computed_again_and_inputs_kept_elsewhere(offload: bool, tmp_path: Path) -> None:
    settings = {"checkpoint_activations": True, "offload_activations": offload}
    plan = planned(12 * MIB, early=True, batch=8, **settings)
    read, written, peak = measured(12 * MIB, tmp_path, early=True, batch=8, **settings)
    assert (plan.read_bytes, plan.written_bytes) == (read, written)
    assert plan.peak_bytes["RAM"] == pytest.approx(peak, rel=0.03)


def test_what_fits_only_in_tiles_is_planned_in_tiles(tmp_path: Path) -> None:
    memory = 2 * MIB  # the largest layer takes 2 MiB with its gradient
    plan = planned(memory, early=True)
    read, written, peak = measured(memory, tmp_path, early=True)
    assert plan.read_bytes == pytest.approx(read, rel=0.15)
    assert plan.written_bytes == pytest.approx(written, rel=0.15)
    assert plan.peak_bytes["RAM"] == pytest.approx(peak, rel=0.03)


def test_a_plan_says_when_nothing_will_move(tmp_path: Path) -> None:
    plan = planned(128 * MIB, early=True)
    read, written, _ = measured(128 * MIB, tmp_path, early=True)
    assert (plan.read_bytes, plan.written_bytes) == (read, written) == (0, 0)
