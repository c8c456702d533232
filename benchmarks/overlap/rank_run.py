"""One rank of the command `overlap`: trains on the test device and prints what a step takes, as JSON.

A step takes what is between the ends of two forward passes, on the clock of the device.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_infinity as zi
from benchmarks.engine_variants import engine_parts
from benchmarks.overlap.run import Run
from zero_infinity import api

_WARM_UP = 5  # the engine learns the order of accesses in the first steps
_COUNTED = 3


class Training:
    """A stack of layers in training: plain, or prepared with a config."""

    def __init__(self, run: Run, device: torch.device, config: zi.Config | None = None) -> None:
        torch.manual_seed(0)
        self._device = device
        # Without a bias, backward has two kernels for each of forward, as a matrix product has twice the operations.
        model = nn.Sequential(*(nn.Linear(run.width, run.width, bias=False) for _ in range(run.layers))).to(device)
        # Fused, so that the update of a plain step is one kernel.
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        if config is not None:
            parts = engine_parts([] if run.prefetch else ["prefetch"])
            model, optimizer = api.prepare_with(parts, model, optimizer, config, device=device)
        self.model, self._optimizer = model, optimizer
        self._batch = torch.randn(4, run.width, generator=torch.Generator().manual_seed(1)).to(device)

    def take_steps(self, number: int) -> tuple[list[float], list[float]]:
        """The seconds between the ends of forward passes, and the losses."""
        losses, events = [], []
        stream = torch.accelerator.current_stream(self._device)
        for _ in range(number):
            loss = self.model(self._batch).square().mean()
            events.append(stream.record_event(torch.Event(self._device, enable_timing=True)))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(loss.detach())
        torch.accelerator.synchronize(self._device)
        seconds = [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(events)]
        return seconds, [loss.item() for loss in losses]


def main() -> None:
    run = Run(**json.loads(sys.argv[1]))
    extension = _load_device()
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks > 1:
        dist.init_process_group("cpu:gloo,lag:lag")
    device = torch.device("lag", rank)
    torch.accelerator.set_device_index(rank)
    found = _measure(run, extension, device, num_ranks)
    if rank == 0:
        print(json.dumps(found))
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _load_device() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    device: ModuleType = import_module("device.lag").load()
    return device


def _measure(run: Run, extension: ModuleType, device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Take plain steps, then prepared ones: to learn the order, to count what moves, and on slow links."""
    plain = Training(run, device)
    losses = plain.take_steps(_WARM_UP)[1]
    extension.reset_counts(device.index)
    plain.take_steps(1)
    compute_seconds = extension.counts(device.index)["kernels"] * run.kernel_seconds
    config = zi.Config(
        memory="1GiB",
        device_memory=int(run.device_share * run.layers * run.width**2 * 4),
        stage=3,
        partition=run.partition,
    )
    training = Training(run, device, config)
    same_losses = training.take_steps(_WARM_UP)[1] == losses
    zi.synchronize(training.model)
    torch.accelerator.synchronize(device)
    extension.reset_counts(device.index)
    training.take_steps(_COUNTED)
    zi.synchronize(training.model)
    torch.accelerator.synchronize(device)
    counts = extension.counts(device.index)
    uploaded, downloaded = counts["uploaded"] // _COUNTED, counts["downloaded"] // _COUNTED
    rate = max(uploaded, downloaded) / (run.transfer_share * compute_seconds)
    extension.set_delays(kernel_seconds=run.kernel_seconds, bytes_per_second=rate)
    seconds, _ = training.take_steps(run.steps + 2)
    api.close(training.model)
    return {
        "seconds": statistics.median(seconds[1:]),
        "compute_seconds": compute_seconds,
        "bytes_per_second": rate,
        "uploaded": uploaded,
        "downloaded": downloaded,
        "same_losses": same_losses if num_ranks == 1 else None,
    }


if __name__ == "__main__":
    main()
