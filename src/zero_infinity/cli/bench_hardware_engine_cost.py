"""Measures the engine's own CPU time per block that it uses, moves or updates.

A model that takes almost no time to compute is trained from a drive and in plain PyTorch, on one thread. The
difference, minus the CPU time of the drive's transfers, is Python: hooks, decisions, requests, the wrapped optimizer.
It does not depend on the model, so it is measured once and used for others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

_NUM_LAYERS = 24
_WIDTH = 256
_MEMORY = 6 << 20  # a third of the states
_WARM_UP_STEPS = 6
_NUM_STEPS = 12
_CHUNKS_A_LAYER = 2  # of 256 KiB, the engine's minimum, for a record of 512 KiB
_BLOCKS_A_STEP = _NUM_LAYERS * (2 + _CHUNKS_A_LAYER)  # used forward and backward, and updated


def block_cpu_seconds(directory: str, drive_cpu_seconds_per_byte: float) -> float:
    """The engine's CPU seconds per block."""
    import torch

    from zero_infinity import api
    from zero_infinity.config import Config

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)))

    def cpu_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, settle: Callable[[], object]) -> float:
        times = []
        for _ in range(_WARM_UP_STEPS + _NUM_STEPS):
            start = time.process_time()
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            settle()
            times.append(time.process_time() - start)
        return statistics.median(times[_WARM_UP_STEPS:])

    inputs = torch.ones(1, _WIDTH)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # idle threads spin, which counts as CPU time
    try:
        plain = build()
        plain_seconds = cpu_seconds(plain, torch.optim.AdamW(plain.parameters(), fused=True), lambda: None)
        with tempfile.TemporaryDirectory(dir=directory) as swap:
            model = build()
            model, optimizer = api.prepare(
                model, torch.optim.AdamW(model.parameters(), fused=True), Config(memory=_MEMORY, nvme=swap)
            )
            seconds = cpu_seconds(model, optimizer, lambda: api.synchronize(model))
            stats = api.stats(model)
    finally:
        torch.set_num_threads(num_threads)
    moved = (stats.bytes_read + stats.bytes_written) / (_WARM_UP_STEPS + _NUM_STEPS)
    return max(1e-6, (seconds - plain_seconds - moved * drive_cpu_seconds_per_byte) / _BLOCKS_A_STEP)
