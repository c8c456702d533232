"""What the benchmarks `checkpoint` and `update` share: a model with states, and the drive moving as much alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_infinity.byte_sizes import parse_bytes
from zero_infinity.errors import ConfigError
from zero_infinity.storage.io_engine import NUM_THREADS, REQUEST_BYTES, IOEngine
from zero_infinity.storage.io_speed import IOWorkload, measure, scratch_memory
from zero_infinity.storage.striped_files import FileDevice

if TYPE_CHECKING:
    from torch import nn

WIDTH = 2048  # of a layer: 16 MiB of parameters
SCRATCH_BYTES = 128 << 20
_BYTES_PER_PARAMETER = 12  # with AdamW's two states


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Where, how much, and what becomes of the result `name`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="on the drive: swap space and checkpoints go there")
    parser.add_argument("--size", default="2GiB", metavar="SIZE", help="of the states (default 2GiB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {name}.json there")


def num_layers_of(size: str) -> int:
    """How many layers have that much of states; at least one."""
    num_layers = parse_bytes(size) // bytes_of(1)
    if not num_layers:
        raise ConfigError(f"--size {size} is too small to measure; give 64MiB or more (2GiB for steady figures)")
    return num_layers


def bytes_of(num_layers: int) -> int:
    """Their parameters and states."""
    return num_layers * WIDTH * WIDTH * _BYTES_PER_PARAMETER


def trained_layers(num_layers: int, config: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer after one step: there are states."""
    import torch

    import zero_infinity as zi

    with zi.init(config):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
        model = torch.nn.Sequential(*layers)
    made = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    model, optimizer = zi.prepare(model, made, config)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    zi.synchronize(model)
    return model, optimizer


def backward(model: nn.Module) -> None:
    """Gradients for all of it, with next to no computation."""
    import torch

    model(torch.randn(1, WIDTH)).sum().backward()


def drive_alone(directory: Path, num_bytes: int, workload: IOWorkload) -> float:
    """Bytes a second of the I/O engine with nothing else to do, on new files in `directory`."""
    device = FileDevice([str(directory)])
    engine = IOEngine(device, NUM_THREADS, REQUEST_BYTES)
    try:
        num_bytes = max(2, num_bytes // REQUEST_BYTES) * REQUEST_BYTES
        device.extend(num_bytes)
        memory = memoryview(scratch_memory(SCRATCH_BYTES))
        if workload is not IOWorkload.WRITE:
            measure(engine, memory, IOWorkload.WRITE, REQUEST_BYTES, num_bytes)
        return measure(engine, memory, workload, REQUEST_BYTES, num_bytes).bytes_per_second
    finally:
        engine.close()
