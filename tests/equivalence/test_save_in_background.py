"""A checkpoint that is written while training goes on has the bytes of one that training waited for."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same, copied
from support.device import on_device
from support.patience import SECONDS, wait_until
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.checkpoint.file_io import OpenFile

STEPS = 2


class Model(nn.Module):
    """Layers of some size, a tied one, a frozen one, a buffer that changes, a parameter in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.frozen = nn.Linear(256, 256).requires_grad_(False)
        self.norm = nn.BatchNorm1d(256)
        self.last = nn.Linear(256, 256, bias=False)
        self.last.weight = self.blocks[0].weight
        self.spectrum = nn.Parameter(torch.randn(129, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        x = self.norm(self.frozen(x))
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum))


SETTINGS: dict[str, dict[str, Any]] = {
    "RAM": {"memory": "16MiB"},
    "NVMe": {"memory": "2MiB", "nvme": True},
    "tight NVMe": {"memory": "1500KiB", "nvme": True},
    "16 bits": {"memory": "4MiB", "nvme": True, "param_dtype": "bfloat16", "compute_dtype": "float32"},
    "tiles": {"memory": "4MiB", "nvme": True, "tile_above": "100KiB"},
    "after backward": {"memory": "4MiB", "nvme": True, "update": "after_backward"},
}


class Trained:
    def __init__(self, settings: dict[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        model = Model()
        chosen = {**settings, **({"nvme": directory} if "nvme" in settings else {})}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = zi.prepare(model, optimizer, zi.Config(**chosen))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.num = 0
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.num += 1
            x = on_device(torch.randn(8, 64, generator=torch.Generator().manual_seed(self.num)))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, path: Path, **options: Any) -> Path:
        extra = {"schedule": self.schedule, "num": self.num}
        return zi.save(path, self.model, self.optimizer, extra=extra, **options)

    def states(self) -> tuple[Any, Any]:
        return copied(self.model.state_dict()), copied(self.optimizer.state_dict())

    @property
    def is_pending(self) -> bool:
        return engine_of(self.model).background_save.is_running


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def slow_drive(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """So slow that training comes to blocks before they are written. No file is done while the event is cleared."""
    write, sync, may_end = OpenFile.write, OpenFile.sync, threading.Event()
    may_end.set()

    def slow(self: OpenFile, start: int, memory: memoryview) -> None:
        time.sleep(0.005)
        write(self, start, memory)

    def gated(self: OpenFile) -> None:
        assert may_end.wait(SECONDS)
        sync(self)

    monkeypatch.setattr(OpenFile, "write", slow)
    monkeypatch.setattr(OpenFile, "sync", gated)
    return may_end


@pytest.mark.parametrize("name", SETTINGS)
def test_the_files_are_those_of_a_save_in_the_foreground(
    name: str, tmp_path: Path, slow_drive: threading.Event
) -> None:
    expected = Trained(SETTINGS[name], tmp_path)
    expected.steps()
    before = files(expected.save(tmp_path / "foreground"))
    expected.steps()

    run = Trained(SETTINGS[name], tmp_path)
    run.steps()
    slow_drive.clear()
    folder = run.save(tmp_path / "background", background=True)
    assert run.is_pending
    assert not folder.exists()
    slow_drive.set()
    run.steps()  # while it is written
    torch.rand(3)
    zi.synchronize(run.model)
    assert files(folder) == before
    assert (tmp_path / "background" / "latest").resolve() == folder
    assert_same("training on", expected.states(), run.states())
    stats = zi.stats(run.model)
    assert stats.memory_peak <= stats.memory_budget

    again = Trained(SETTINGS[name], tmp_path)
    zi.load(folder, again.model, again.optimizer, extra={"schedule": again.schedule})
    again.num = STEPS
    again.steps()
    assert_same("training on from it", expected.states()[1]["state"], again.states()[1]["state"])


@pytest.mark.parametrize("name", ["RAM", "NVMe", "16 bits"])
def test_whatever_is_changed_meanwhile(name: str, tmp_path: Path, slow_drive: threading.Event) -> None:
    expected = Trained(SETTINGS[name], tmp_path)
    expected.steps()
    before = files(expected.save(tmp_path / "foreground"))

    run = Trained(SETTINGS[name], tmp_path)
    run.steps()
    model = run.model
    held = model.blocks[1].bias.data  # through which it can be changed without anybody noticing
    slow_drive.clear()
    folder = run.save(tmp_path / "background", background=True)
    assert run.is_pending
    slow_drive.set()
    with torch.no_grad():
        held.fill_(7)
        with zi.gathered(model.blocks[3].weight):
            model.blocks[3].weight.zero_()
        model.blocks[2].weight.mul_(3)
        model.frozen.bias.data.add_(1)
        model.spectrum.zero_()
        model.norm.running_mean.fill_(5)
    for group in run.optimizer.param_groups:
        group["lr"] = 3.0
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    torch.rand(3), random.random(), np.random.rand()
    run.schedule.step()
    zi.synchronize(model)
    assert files(folder) == before
    assert (model.blocks[1].bias == 7).all()


@pytest.mark.usefixtures("slow_drive")
def test_a_tensor_that_is_let_go_while_the_save_begins(tmp_path: Path) -> None:
    """Its block is written once, whoever has it by then."""
    run = Trained(SETTINGS["NVMe"], tmp_path)
    held = [run.model.blocks[1].weight.data]
    folder = run.save(tmp_path / "saved", background=True, progress=lambda *_: held.clear())
    zi.synchronize(run.model)
    assert not held
    assert folder.exists()


def test_a_full_drive_is_told_at_the_next_synchronize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run = (Trained(SETTINGS["NVMe"], tmp_path) for _ in range(2))
    expected.steps(2 * STEPS)
    run.steps(1)
    whole = run.save(tmp_path / "saved")
    write, count = OpenFile.write, iter(range(100_000))

    def full(self: OpenFile, start: int, memory: memoryview) -> None:
        time.sleep(0.002)
        if next(count) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, start, memory)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "write", full)
        run.save(tmp_path / "saved", background=True)
        run.steps(1)
        with pytest.raises(OSError, match="No space left"):
            zi.synchronize(run.model)
    zi.synchronize(run.model)  # told once
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {whole.name, "latest"}
    run.steps(2 * STEPS - 2)
    assert_same("training on", expected.states(), run.states())
    run.save(tmp_path / "saved", background=True)
    zi.synchronize(run.model)
    assert (tmp_path / "saved" / "latest").resolve().name == f"step-{2 * STEPS:08}"


def test_an_error_comes_out_of_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trained(SETTINGS["RAM"], tmp_path)

    def fail(self: OpenFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "sync", fail)
        run.save(tmp_path / "saved", background=True)
        wait_until(lambda: not run.is_pending)
    with pytest.raises(OSError, match="Input/output"):
        run.save(tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []
    run.save(tmp_path / "saved")


@pytest.mark.usefixtures("slow_drive")
def test_saves_and_loads_wait_for_the_one_before(tmp_path: Path) -> None:
    run = Trained(SETTINGS["NVMe"], tmp_path)
    run.steps(1)
    first = run.save(tmp_path / "saved", background=True)
    before = run.states()
    run.steps(1)
    second = run.save(tmp_path / "saved", background=True, keep=2)
    assert first.exists()
    run.steps(1)
    zi.load(tmp_path / "saved", run.model, run.optimizer)
    assert zi.stats(run.model).num_steps == 2
    assert second.exists()
    zi.load(first, run.model, run.optimizer)
    assert_same("states", before, run.states())


@pytest.mark.usefixtures("slow_drive")
def test_closing_waits_for_it(tmp_path: Path) -> None:
    run = Trained(SETTINGS["NVMe"], tmp_path)
    folder = run.save(tmp_path / "saved", background=True)
    engine_of(run.model).parameter_store.close()
    assert (folder / "manifest.json").exists()


@pytest.mark.usefixtures("slow_drive")
def test_a_model_that_is_dropped_is_written_all_the_same(tmp_path: Path) -> None:
    run = Trained(SETTINGS["RAM"], tmp_path)
    folder = run.save(tmp_path / "saved", background=True)
    del run
    gc.collect()
    wait_until((tmp_path / "saved" / "latest").exists)
    assert (folder / "manifest.json").exists()
    gc.collect()


def test_the_process_ends_after_it(tmp_path: Path) -> None:
    script = f"""
import time, torch, zero_infinity as zi
from zero_infinity.checkpoint.file_io import OpenFile
write = OpenFile.write
def slow(self, start, memory):
    time.sleep(0.01)
    write(self, start, memory)
OpenFile.write = slow
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(memory="8MiB"))
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
print(zi.save({str(tmp_path)!r}, model, optimizer, background=True))
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert (Path(done.stdout.strip()) / "manifest.json").exists(), done.stderr
    assert done.stderr == ""


def test_verified_blocks_are_saved_in_the_foreground_only(tmp_path: Path) -> None:
    run = Trained({"memory": "2MiB", "nvme": True, "verify": True}, tmp_path)
    with pytest.raises(zi.UsageError, match="verify=True"):
        run.save(tmp_path / "saved", background=True)
    run.save(tmp_path / "saved")


def test_progress_is_told(tmp_path: Path) -> None:
    run = Trained(SETTINGS["NVMe"], tmp_path)
    run.steps(1)
    for options in ({}, {"background": True}):
        told: list[tuple[int, int]] = []
        folder = run.save(tmp_path / "saved", progress=lambda *seen, told=told: told.append(seen), **options)
        zi.synchronize(run.model)
        done, total = told[-1]
        assert done == total
        assert told == sorted(told)
        headers = sum(
            8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.iterdir() if path.suffix != ".json"
        )
        assert total == sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json") - headers
