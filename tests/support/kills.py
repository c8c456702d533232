"""Trains in a child process that kills itself at a chosen moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from support.rank_scripts import small_blocks
from zero_infinity.checkpoint import file_io
from zero_infinity.checkpoint.checkpoint_directory import has_checkpoint

STEPS = 8
# What saving asks of the file system: a run can be killed before any such call.
_CALLS = ("open", "mkdir", "pwrite", "fsync", "symlink", "rename", "unlink", "rmdir")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before_call(number: int) -> None:
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                _die()
            return real(*args, **kwargs)

        return call

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    file_io.fallocate = counted(file_io.fallocate)


def train(directory: Path, call: int | None, seconds: float | None, background: bool) -> None:
    """Resume from the latest checkpoint and save every step; die in the second step if `call` or `seconds` is given."""
    small_blocks()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (directory / "swap").mkdir(exist_ok=True)
    model, optimizer = zi.prepare(model, optimizer, zi.Config(memory="256KiB", nvme=directory / "swap"))  # type: ignore[assignment]
    torch.manual_seed(1)
    saved = directory / "saved"
    if has_checkpoint(saved):
        zi.load(saved, model, optimizer)  # type: ignore[arg-type]
    first = zi.stats(model).num_steps
    for number in range(first, STEPS):
        if number == first + 1 and call is not None:
            _die_before_call(call)
        if number == first + 1 and seconds is not None:
            threading.Timer(seconds, _die).start()
        model(torch.randn(4, 48, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        zi.save(saved, model, optimizer, keep=2, background=background)  # type: ignore[arg-type]
    zi.synchronize(model)
    os._exit(0)
