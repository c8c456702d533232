"""Optimizers whose states are quantised (bitsandbytes on the CPU): the bits of plain PyTorch, few bytes on the drive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from support.compare import (
    FITS_RAM,
    MINIMAL,
    Run,
    Setting,
    assert_same,
    compare,
    copied,
    run_plain,
    run_prepared,
    training,
)
from support.device import cpu_only
from support.drive_bytes import drive_bytes
from support.least import least_accepted
from support.models import mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.api import engine_of

pytestmark = cpu_only("bitsandbytes' kernels for other devices are another library's")
WIDTH = 80  # a matrix has 6400 elements, and is quantised in 25 blocks; a vector is below 4096, and is not
make = functools.partial(mlp, width=WIDTH, depth=2)
five_steps = training(vectors(WIDTH), mean_square)


def of(name: str, **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, **options)


OPTIMIZERS = {
    "AdamW8bit": of("AdamW8bit", weight_decay=0.1),
    "Lion8bit": of("Lion8bit"),
    "SGD8bit": of("SGD8bit", momentum=0.9),
    "RMSprop8bit": of("RMSprop8bit"),
    "AdEMAMix8bit": of("AdEMAMix8bit"),
    "AdamW32bit": of("AdamW32bit"),
}


@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_bit_identical(name: str, setting: Setting, tmp_path: Path) -> None:
    """And the state dict has the form that the optimizer gives it."""
    compare(make, five_steps, OPTIMIZERS[name], setting, tmp_path)


def test_states_are_bytes_and_scales_in_records() -> None:
    model = make()
    model, optimizer = zi.prepare(model, OPTIMIZERS["AdamW8bit"](model), zi.Config(memory="8MiB"))
    mean_square(model, vectors(WIDTH)(0)).backward()
    optimizer.step()
    zi.synchronize(model)
    state = optimizer.state[model[0].weight]
    assert state["state1"].dtype is torch.uint8
    assert state["absmax1"].shape == (WIDTH * WIDTH // 256,)
    record = next(r for u, r in engine_of(model).records.items() if u.parameters[0].parameter is model[0].weight)
    stored = sum(chunk.record.num_bytes for chunk in record.chunks if chunk.record is not None)
    matrix, vector, tables = 2 * WIDTH * WIDTH * (1 + 4 / 256), 2 * WIDTH * 4, 2 * 256 * 4
    assert stored <= matrix + vector + tables + 8 * 64


def test_bytes_on_the_drive(tmp_path: Path) -> None:
    """Of the optimizer's states, each step: at most 45% of those in float32."""
    moved = {}
    for name in ("AdamW8bit", "AdamW32bit"):
        torch.manual_seed(0)
        model = mlp(width=256, depth=3)
        model, optimizer = zi.prepare(model, OPTIMIZERS[name](model), zi.Config(memory="1792KiB", nvme=tmp_path))
        with drive_bytes() as counted:
            for number in range(4):
                mean_square(model, vectors(256)(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            zi.synchronize(model)
        moved[name] = dict(counted)
    print(moved)
    assert 0 < moved["AdamW8bit"]["record"] <= 0.45 * moved["AdamW32bit"]["record"]


def test_a_state_dict_of_either_loads_in_the_other(tmp_path: Path) -> None:
    adamw = OPTIMIZERS["AdamW8bit"]
    plain = run_plain(make, five_steps, adamw)
    prepared = run_prepared(make, five_steps, adamw, zi.Config(memory="1MiB", nvme=tmp_path))

    def go_on(run: Run) -> None:
        outcome = plain if run.prepared else prepared
        run.optimizer.load_state_dict(copied(outcome.optimizer))
        for key, parameter in run.model.named_parameters():
            with torch.no_grad(), zi.gathered(parameter):
                parameter.copy_(outcome.weights[key])
        five_steps(run)

    compare(make, go_on, adamw, MINIMAL, tmp_path)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    other = run_plain(make, five_steps, OPTIMIZERS["AdEMAMix8bit"]).optimizer

    def script(run: Run) -> None:
        five_steps(run)
        if run.prepared:
            with pytest.raises(zi.UsageError, match=r"state 'absmax1' of .* is \[2, 25\]"):
                run.optimizer.load_state_dict(copied(other))
        five_steps(run)

    compare(make, script, OPTIMIZERS["AdamW8bit"], FITS_RAM, tmp_path)


def test_a_checkpoint_goes_on_exactly(tmp_path: Path) -> None:
    adamw = OPTIMIZERS["AdamW8bit"]

    def script(run: Run) -> None:
        five_steps(run)
        if run.prepared:
            zi.save(tmp_path / "saved", run.model, run.optimizer)  # type: ignore[arg-type]
            model = make()
            run.model, run.optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"))  # in RAM now
            zi.load(tmp_path / "saved", run.model, run.optimizer)
        five_steps(run)

    compare(make, script, adamw, MINIMAL, tmp_path)


@pytest.mark.parametrize("master", ["auto", "none"])
def test_16_bit_parameters(master: str, tmp_path: Path) -> None:
    """Its 8-bit states with a float32 master, and without one: the same in RAM and on NVMe."""
    adamw = OPTIMIZERS["AdamW8bit"]
    stored = {"param_dtype": "bfloat16", "compute_dtype": "float32", "master": master}
    model = make()
    least = least_accepted(lambda b: zi.prepare(model, adamw(model), zi.Config(memory=b, nvme=tmp_path, **stored)))
    outcomes = [
        run_prepared(make, five_steps, adamw, zi.Config(memory=memory, nvme=nvme, **stored))
        for memory, nvme in (("8MiB", None), (least, tmp_path))
    ]
    assert_same("weights", outcomes[0].weights, outcomes[1].weights)
    assert_same("states", outcomes[0].optimizer, outcomes[1].optimizer)
    assert outcomes[1].stats is not None
    assert outcomes[1].stats.bytes_read > 0
