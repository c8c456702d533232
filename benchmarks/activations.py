"""What offloading activations costs, by hidden size and by where they are kept.

All models recompute their blocks in backward; they differ in where the inputs of blocks are kept: in torch's memory
(the baseline), in an arena, in the engine's RAM, or on NVMe. They run in one process with their steps interleaved, and
their losses must be equal, bit for bit. The time of a step includes its updates. The memory of "NVMe" is about what the
states take, so that activations push something out to the drive, which has to come back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape

_EPILOG = "example: python -m benchmarks activations --hidden 256 512 1024 --nvme /mnt/nvme"
WARM_UP = 3  # the first steps record the order


def contenders(num_states: int, nvme: str) -> dict[str, dict[str, Any]]:
    room: dict[str, Any] = {"memory": 2 * num_states + (256 << 20)}
    return {
        "in torch's memory": room,
        "arena": {**room, "offload_activations": "arena"},
        "RAM": {**room, "offload_activations": True},
        "NVMe": {"memory": num_states, "nvme": nvme, "offload_activations": True},
        "NVMe, not offloaded": {"memory": num_states, "nvme": nvme},
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, args: argparse.Namespace) -> Any:
    """Seconds, and the loss."""
    tokens = torch.randint(0, 256, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(number))
    start = time.perf_counter()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    zi.synchronize(model)
    return time.perf_counter() - start, loss.item()


def measure(hidden: int, args: argparse.Namespace, nvme: str) -> None:
    shape = Shape(layers=args.layers, hidden=hidden, heads=4, seq=args.seq)
    num_states = 16 * sum(p.numel() for p in ByteGPT(shape).parameters())
    models = {}
    for name, settings in contenders(num_states, nvme).items():
        torch.manual_seed(0)
        model = ByteGPT(shape)
        config = zi.Config(checkpoint_activations=True, **settings)
        models[name] = zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(WARM_UP + args.steps):
        losses = set()
        names = list(models)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken, loss = step(*models[name], number, args)
            losses.add(loss)
            if number >= WARM_UP:
                seconds[name].append(taken)
        if len(losses) != 1:
            sys.exit(f"step {number}: the losses differ: {losses}")
    ideal = seconds["in torch's memory"]
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, ideal, strict=True)]
        stats = zi.stats(models[name][0])
        print(
            f"{hidden:>6}  {name:<20} {statistics.median(times):.3f} s ({min(times):.3f})   "
            f"ratio {statistics.median(ratios):.3f}, best/best {min(times) / min(ideal):.3f}   "
            f"{stats.activation_bytes / 2**20:.1f} MiB of activations, "
            f"{stats.bytes_written / stats.num_steps / 2**20:.1f} MiB written a step",
            flush=True,
        )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "activations", help="what offloading activations costs, by hidden size", epilog=_EPILOG
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024], metavar="N", help="(256 512 1024)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (8)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks (4)")
    parser.add_argument("--seq", type=int, default=256, metavar="N", help="bytes of a sequence (256)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences (8)")
    parser.add_argument("--nvme", default=".", metavar="DIR", help="directory on the drive to use (.)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(f"{args.layers} layers, batch {args.batch} x {args.seq}, {args.steps} interleaved steps each; losses equal")
    with tempfile.TemporaryDirectory(dir=args.nvme) as nvme:
        for hidden in args.hidden:
            measure(hidden, args, nvme)
    return 0
