"""Training in child processes, which are killed, interrupted or run to their end."""

from __future__ import annotations

import subprocess
import sys

from support.patience import SECONDS

# A small model whose blocks move all the time, and a loop over it.
PROLOGUE = """
import os, signal, sys, threading, time
import torch
from torch import nn
import zero_infinity as zi
from zero_infinity.policy import chunk_size, homes
homes._SMALL_BYTES = 0
chunk_size.MIN_CHUNK_BYTES = 4096
torch.set_num_threads(1)

def make(depth=8, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

def prepare(nvme, memory="160KiB", **changes):
    model = make()
    return zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(memory=memory, nvme=nvme, **changes))

def train(model, optimizer, num_steps=1):
    for number in range(num_steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python on PROLOGUE and this script."""
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, output and errors; a child that does not end is an error."""
    try:
        output, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.communicate()
        raise AssertionError(
            f"the process did not end within {SECONDS:.0f} s: {output[-2000:]}\n{errors[-4000:]}"
        ) from None
    return child.returncode, output, errors


def run(script: str, *arguments: str) -> tuple[int, str, str]:
    return finish(start(script, *arguments))
