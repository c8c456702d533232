"""Trains on the test device with random delays, one setting drawn from each seed, and compares every bit.

    TEST_DEVICE=lag python -m device.seeds --first 0 --count 200        (from the folder tests)

A seed decides the model, the memory budgets, when updates run, and the delays of the device. Every `--ranks-every`th
one trains on two ranks with a device each, at a stage that the seed draws. A seed that fails is printed with its setting and its
error, and can be repeated alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from support.compare import FITS_RAM, HALF, MINIMAL, adamw, compare, least_device_memory, training
from support.device import DEVICE, EXTENSION
from support.models import CASES


def one_rank(draw: random.Random, folder: Path) -> str:
    """Train one drawn setting; returns it."""
    name = draw.choice(["mlp", "gpt2", "llama", "tied"])
    case = CASES[name]
    setting = draw.choice([FITS_RAM, HALF, MINIMAL])
    config: dict[str, Any] = {}
    if draw.random() < 0.3:
        config["update"] = "after_backward"
    if draw.random() < 0.2:
        config["verify"] = True  # reads go through the host
    least = least_device_memory(case.make)
    config["device_memory"] = draw.choice([least, least + least // 2, 3 * least, 64 << 20])
    every = draw.choice([0, 1, 2, 3])  # 0: as it is chosen without tests
    described = f"{name}, {setting}, {config}, every {every}th unit on the device"
    at_home = (lambda number: number % every == 0) if every else None
    compare(case.make, training(case.batch, case.loss), adamw, setting, folder, at_home=at_home, **config)
    return described


def two_ranks(draw: random.Random, folder: Path) -> str:
    from device import test_ranks

    stage = draw.choice([0, 1, 2, 3])
    weights, _ = test_ranks.expected(2)
    config: dict[str, Any] = {"memory": "4MiB"}
    if draw.random() < 0.5:
        config = {"memory": "400KiB", "device_memory": "200KiB", "nvme": str(folder)}
    at_home = draw.choice(["none", "some", "all"])
    for result in test_ranks.train(2, stage=stage, seed=draw.randrange(1 << 16), at_home=at_home, **config):
        for name, value in weights.items():
            if not torch.equal(result["weights"][name], value):
                raise AssertionError(f"{name} differs at stage {stage}, {config}")
    return f"2 ranks, stage {stage}, {config}, {at_home} of the units on the devices"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks-every", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed after this")
    args = parser.parse_args()
    if EXTENSION is None:
        parser.error("set TEST_DEVICE=lag")
    torch.set_num_threads(1)
    start, passed, failed = time.monotonic(), 0, []
    for seed in range(args.first, args.first + args.count):
        if time.monotonic() - start > 60 * args.minutes:
            break
        draw = random.Random(seed)
        kind = two_ranks if args.ranks_every and seed % args.ranks_every == args.ranks_every - 1 else one_rank
        torch.accelerator.synchronize(DEVICE)
        EXTENSION.set_delays(
            seed=seed, probability=draw.choice([0.1, 0.3]), max_seconds=draw.choice([1e-4, 3e-4, 1e-3])
        )
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"seed {seed}: {kind(draw, Path(folder))}", flush=True)
                passed += 1
            except Exception:  # noqa: BLE001 - reported; the next seeds run
                failed.append(seed)
                print(f"seed {seed}: FAILED\n{traceback.format_exc()}", flush=True)
    print(f"{passed} seeds passed, {len(failed)} failed: {failed}, in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
