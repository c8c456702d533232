"""A plan of several ranks and their run take the same decisions: bytes read, written, sent and held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.rank_scripts import train_gpt
from support.ranks import run_ranks

import zero_infinity as zi
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.planner import hardware, module_shapes
from zero_infinity.planner.plan_inputs import prepare
from zero_infinity.planner.simulator import WARM_UP_STEPS, simulate
from zero_infinity.planner.training_job import SINGLE, TrainingJob
from zero_infinity.trace import RANKS

SHAPE = Shape(layers=6, hidden=256, heads=4, seq=64)  # 55 MiB of states
MIB = 2**20


@pytest.mark.parametrize(
    ("num_ranks", "memory", "early"),
    [(2, 9 * MIB, True), (2, 16 * MIB, False), pytest.param(3, 9 * MIB, False, marks=pytest.mark.long)],
)
def test_the_bytes_of_a_rank_are_those_that_were_planned(
    num_ranks: int, memory: int, early: bool, tmp_path: Path
) -> None:
    with torch.device("meta"):
        tokens = torch.zeros(1, SHAPE.seq, dtype=torch.long)
        inputs = {"tokens": tokens, "targets": tokens}
        model = module_shapes.describe(ByteGPT(SHAPE), inputs, batch=1, seq=SHAPE.seq, name="gpt", dtype_bytes=4)
    machine = replace(hardware.load("laptop"), devices_per_node=num_ranks)
    job = TrainingJob(batch=1, states=SINGLE, memory=memory * num_ranks, interval=0, early_update=early)
    plan = simulate(prepare(model, machine, job))
    sent = {traffic.link: traffic.num_bytes for traffic in plan.traffic}[RANKS]

    settings = {"memory": memory, "nvme": tmp_path, "update": "auto" if early else "after_backward"}
    for read, written, really_sent, peak in run_ranks(num_ranks, train_gpt, SHAPE, settings, WARM_UP_STEPS + 1):
        assert (read, written, really_sent) == (plan.read_bytes, plan.written_bytes, sent)
        assert plan.peak_bytes["RAM"] == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [
        pytest.param(0, 1, marks=pytest.mark.long),
        pytest.param(1, 2, marks=pytest.mark.long),
        (2, 2),
        pytest.param(3, 2, marks=pytest.mark.long),
    ],
)
def test_the_bytes_of_every_stage(stage: int, accumulation: int, tmp_path: Path) -> None:
    memory = 16 * MIB
    with torch.device("meta"):
        tokens = torch.zeros(1, SHAPE.seq, dtype=torch.long)
        network = ByteGPT(SHAPE)
    settings = {"memory": memory, "nvme": tmp_path, "stage": stage, "gradient_accumulation_steps": accumulation}
    plan = zi.plan(
        network,
        torch.optim.AdamW(network.parameters()),
        zi.Config(**settings),
        hardware=replace(hardware.load("laptop"), devices_per_node=2),
        inputs={"tokens": tokens, "targets": tokens},
    ).outcome
    sent = {traffic.link: traffic.num_bytes for traffic in plan.traffic}[RANKS]
    for read, written, really_sent, peak in run_ranks(2, train_gpt, SHAPE, settings, WARM_UP_STEPS + 1):
        assert (read, written, really_sent) == (plan.read_bytes, plan.written_bytes, sent)
        assert plan.peak_bytes["RAM"] == pytest.approx(peak, rel=0.03)
