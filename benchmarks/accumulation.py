"""What layer-major accumulation is worth: a step over several micro-batches, in a loop and by `zi.accumulate`.

Both prepared models keep the same share of their states in memory, and take their steps in turn. Their losses must be
equal, bit for bit. The bytes read are also shown for one micro-batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape

_EPILOG = "example: python -m benchmarks accumulation --hidden 768 --nvme /mnt/nvme"
WARM_UP = 5  # the first call proves, the next ones record the order
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[nn.Module, Any, list[Batch]], list[torch.Tensor]]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def in_a_loop(model: nn.Module, optimizer: Any, batches: list[Batch]) -> list[torch.Tensor]:
    """The best that a loop can do: only the last backward may update."""
    losses = []
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch) / len(batches)
        losses.append(loss.detach())
        if number < len(batches) - 1:
            with optimizer.no_sync():
                loss.backward()
        else:
            loss.backward()
    return losses


def layer_by_layer(model: nn.Module, _: Any, batches: list[Batch]) -> list[torch.Tensor]:
    return zi.accumulate(model, batches, loss_of)


def one_alone(model: nn.Module, _: Any, batches: list[Batch]) -> list[torch.Tensor]:
    loss = loss_of(model, batches[0])
    loss.backward()
    return []


CONTENDERS: dict[str, Step] = {"loop": in_a_loop, "accumulate": layer_by_layer, "one micro-batch": one_alone}


def make(args: argparse.Namespace, nvme: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = ByteGPT(Shape(layers=args.layers, hidden=args.hidden, heads=4, seq=args.seq))
    states = 12 * sum(p.numel() for p in model.parameters())
    config = zi.Config(memory=states // args.share, nvme=nvme, checkpoint_activations=True)
    return zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config)


def draw(number: int, args: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(number)
    shape = (args.accumulate, args.batch, args.seq + 1)
    return [(t[:, :-1], t[:, 1:]) for t in torch.randint(0, 256, shape, generator=generator)]


def measure(args: argparse.Namespace, nvme: str) -> None:
    models = {name: make(args, nvme) for name in CONTENDERS}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    num_bytes: dict[str, list[int]] = {name: [] for name in models}
    for number in range(WARM_UP + args.steps):
        batches = draw(number, args)
        losses = {}
        for name, (model, optimizer) in models.items():
            before = zi.stats(model).bytes_read
            start = time.perf_counter()
            losses[name] = [loss.item() for loss in CONTENDERS[name](model, optimizer, batches)]
            optimizer.step()
            optimizer.zero_grad()
            zi.synchronize(model)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
                num_bytes[name].append(zi.stats(model).bytes_read - before)
        if losses["loop"] != losses["accumulate"]:
            sys.exit(f"step {number}: the losses differ: {losses}")
    for name, times in seconds.items():
        ratios = [loop / own for loop, own in zip(seconds["loop"], times, strict=True)]
        print(
            f"{name:<16} {statistics.median(times):.3f} s ({min(times):.3f})   "
            f"{statistics.mean(num_bytes[name]) / 2**20:.1f} MiB read a step   "
            f"faster than the loop: {statistics.median(ratios):.2f}, best/best {min(seconds['loop']) / min(times):.2f}"
        )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "accumulation", help="steps over several micro-batches, in a loop and layer by layer", epilog=_EPILOG
    )
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="blocks (8)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="width (512)")
    parser.add_argument("--seq", type=int, default=64, metavar="N", help="bytes of a sequence (64)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences of a micro-batch (1)")
    parser.add_argument("--accumulate", type=int, default=8, metavar="N", help="micro-batches of a step (8)")
    parser.add_argument("--share", type=int, default=8, metavar="N", help="1/N of the states are in memory (8)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (8)")
    parser.add_argument("--nvme", default=".", metavar="DIR", help="directory on the drive to use (.)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(f"{args.layers} layers of {args.hidden}, {args.accumulate} micro-batches of {args.batch} x {args.seq}")
    with tempfile.TemporaryDirectory(dir=args.nvme) as nvme:
        measure(args, nvme)
    return 0
