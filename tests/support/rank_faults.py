"""Functions that ranks run in tests where one rank fails."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from support.rank_scripts import adamw, small_blocks
from zero_infinity.api import engine_of
from zero_infinity.comm import channel

WIDTH = 48
CULPRIT = 1  # the rank that does it
FATAL_STEP = 3


class Tower(nn.Module):
    """Layers with names."""

    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train(rank: int, fault: str, settings: dict[str, Any]) -> str:
    """Train; rank CULPRIT fails in step FATAL_STEP, in the way that `fault` names."""
    small_blocks()
    torch.manual_seed(0)
    mine = dict(settings)
    if "nvme" in mine:
        mine["nvme"] = Path(mine["nvme"]) / str(rank)
    model = Tower(depth=5 if fault == "depth" and rank == CULPRIT else 4)
    if fault == "width" and rank == CULPRIT:
        model.layers[2] = nn.Linear(WIDTH, WIDTH, bias=False)
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(**mine))
    for step in range(6):
        fatal = rank == CULPRIT and step == FATAL_STEP
        if fatal and fault == "ends":
            return "ended"
        loss = model(torch.randn(4, WIDTH)).square().mean()
        if fatal and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fatal and fault == "raises":
            raise ValueError("a sample is broken")
        if not (fatal and fault == "one backward less"):
            loss.backward()
        if fatal and fault == "one step less":
            zi.save(Path(mine["nvme"]).parent / "checkpoints", model, optimizer)
        if fatal and fault == "killed in step":
            optimizer.step()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    zi.synchronize(model)
    return "trained"


def close(rank: int, num_seconds: float) -> str:
    """User code on rank CULPRIT fails while its next layer is being gathered from a late rank. It closes its engine and lives on."""
    small_blocks()
    channel._GRACE_SECONDS = 0.3
    torch.manual_seed(0)
    model = Tower(depth=8)
    # Room for three layers.
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(stage=3, memory="1MiB"))
    for step in range(6):
        if step == FATAL_STEP and rank == 0:
            model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(1.5))
        if step == FATAL_STEP and rank == CULPRIT:
            model.layers[2].register_forward_hook(_fail)
        loss = None
        with suppress(ValueError):
            loss = model(torch.randn(4, WIDTH)).square().mean()
        if loss is None:
            engine_of(model).parameter_store.close()
            time.sleep(num_seconds)
            return "lived on"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return "trained"


def _fail(*_: Any) -> None:
    raise ValueError("a sample is broken")


def build(rank: int, settings: dict[str, Any], other_seed: bool) -> str:
    torch.manual_seed(rank if other_seed else 0)
    with zi.init(zi.Config(**settings)):
        Tower()
        if not other_seed and rank == CULPRIT:
            nn.Linear(3, 3)
    return "built"


def build_and_look_again(rank: int, settings: dict[str, Any]) -> str:
    """Change a layer that is sharded already, since two others were built after it."""
    torch.manual_seed(0)
    with zi.init(zi.Config(**settings)), torch.no_grad():
        first, _, _ = nn.Linear(256, 512), nn.Linear(4, 4), nn.Linear(4, 4)
        first.weight.mul_(2)
    return "built"
