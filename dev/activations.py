"""What it costs to keep activations elsewhere, against hidden size: checkpoints alone against each home of theirs.

    python dev/activations.py --hidden 256 512 1024 --nvme /mnt/nvme

All contenders compute blocks again in backward: what differs is where the inputs of blocks are kept. In torch's memory
(the ideal), in an arena, in the engine's RAM, on NVMe. They are models in one process that take steps in turn, each
round beginning with another one; losses must be equal, bit for bit. A step's time ends when its updates are done. The
memory of "NVMe" is about what the states take: activations push something out to the drive, and it has to come back.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--nvme", default=".", help="directory on the drive to use")
    args = parser.parse_args()
    print(f"{args.layers} layers, batch {args.batch} x {args.seq}, {args.steps} steps each, in turn; losses equal")
    with tempfile.TemporaryDirectory(dir=args.nvme) as nvme:
        for hidden in args.hidden:
            measure(hidden, args, nvme)


if __name__ == "__main__":
    main()
