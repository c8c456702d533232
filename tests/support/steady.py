"""A training whose process is counted: threads, descriptors, mappings, resident pages and living objects."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import torch

import zero_infinity as zi
from support.compare import HALF, Run, adamw, budget_bytes, training
from support.models import mean_square, mlp, vectors
from support.rank_scripts import small_blocks
from support.resources import resources

MIB = 1 << 20
NUM_ROUNDS = 4
STEPS_A_ROUND = 50


def train_and_count(accelerated: bool, directory: Path) -> None:
    """Train 50 steps to warm up, then four times 50: after that nothing grows any more.

    What is kept for good grows in every round, so the least growth of a round is what counts: malloc may take a few
    pages more in one of them.
    """
    small_blocks()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp(width=64, depth=4)
    accelerator = zi.EmulatedAccelerator(64 << 10, bytes_per_second=1e12) if accelerated else None
    memory = budget_bytes(lambda: mlp(width=64, depth=4), adamw, HALF)
    config = zi.Config(memory=memory, nvme=directory)
    model, optimizer = zi.prepare(model, adamw(model), config, device=accelerator)
    script = training(vectors(64), mean_square, num_steps=1)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            script(Run(model, optimizer, prepared=True))

    def fewest_regions() -> int:
        # How many there are at one moment depends on what the pool has in flight just then.
        counts = []
        for _ in range(10):
            train(1)
            counts.append(resources().num_regions)
        return min(counts)

    def num_living() -> int:
        # Without what the collector has not come to yet: that is up to some hundred at any moment.
        zi.synchronize(model)
        gc.collect()
        return len(gc.get_objects())

    train(50)
    regions = fewest_regions()
    first = resources()
    objects = [num_living()]
    resident = [resources().resident_bytes]
    for _ in range(NUM_ROUNDS):
        train(STEPS_A_ROUND)
        objects.append(num_living())
        resident.append(resources().resident_bytes)
    last = resources()
    assert last.threads <= first.threads
    assert last.descriptors <= first.descriptors
    assert fewest_regions() <= regions + 2
    assert min(b - a for a, b in pairwise(resident)) <= 64 << 10, f"it grows in every round: {resident}"
    assert resident[-1] - resident[0] <= MIB, resident
    assert min(b - a for a, b in pairwise(objects)) <= 0, f"objects pile up: {objects}"
    assert objects[-1] - objects[0] < 40, objects
    assert zi.stats(model).memory_peak <= memory
