"""What prefetching is worth on several ranks: stage 3 with it, and without.

One hop is slowed down by sleeping, which takes no core from the model. `--slow link`: from host memory to an emulated
accelerator, before each gather (parameters live in RAM). `--slow drive`: the swap space of each rank. Every rank has
both models and interleaves their steps. A step ends when its updates are done on all ranks, so nothing of one model
runs while the other is measured. Losses must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import zero_infinity as zi
from benchmarks.engine_variants import PolicyWithoutPrefetch, slow_drive
from zero_infinity import api
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape

_EPILOG = """\
examples:
  torchrun --standalone --nproc-per-node 2 -m benchmarks prefetch --slow link
  torchrun --standalone --nproc-per-node 2 -m benchmarks prefetch --slow drive
"""
WARM_UP = 3  # the first steps record the order


def build(
    args: argparse.Namespace, config: zi.Config, parts: EngineParts, lookahead: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    if not lookahead:
        parts = replace(parts, make_policy=PolicyWithoutPrefetch)
    torch.manual_seed(0)
    model = ByteGPT(Shape(layers=args.layers, hidden=args.hidden, heads=4, seq=args.seq))
    num_bytes = sum(p.nbytes for p in model.parameters())
    place = None
    if args.slow == "link":
        place = zi.EmulatedAccelerator(num_bytes // 2, bytes_per_second=args.bandwidth * 1e6)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return api.prepare_with(parts, model, optimizer, config, device=place)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, args: argparse.Namespace
) -> tuple[float, float]:
    """Seconds, and the loss."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(0, 256, (args.batch, args.seq + 1), generator=generator)
    dist.barrier()
    start = time.perf_counter()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    zi.synchronize(model)
    dist.barrier()
    return time.perf_counter() - start, loss.item()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "prefetch",
        help="what prefetching is worth on several ranks (under torchrun)",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--slow", choices=("link", "drive"), default="link", help="what is slowed down (link)")
    parser.add_argument("--bandwidth", type=float, default=25, metavar="MB/S", help="of the slow link or drive of each "
                        "rank (25)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (8)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="blocks (6)")
    parser.add_argument("--hidden", type=int, default=256, metavar="N", help="width (256)")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="bytes of a sequence (128)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences of a rank (4)")
    parser.add_argument("--memory", default="16MiB", metavar="SIZE", help="of a rank, with --slow drive (16MiB)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    parts = DEFAULT_PARTS
    with tempfile.TemporaryDirectory(dir=".") as directory:
        if args.slow == "drive":
            parts = EngineParts(slow_drive(args.bandwidth * 1e6))
            config = zi.Config(memory=args.memory, nvme=directory, stage=3)
        else:
            config = zi.Config(memory="256MiB", stage=3)
        models = {"prefetch": build(args, config, parts, True), "no lookahead": build(args, config, parts, False)}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        waited: dict[str, list[float]] = {name: [] for name in models}
        for number in range(WARM_UP + args.steps):
            losses = set()
            order = list(models) if number % 2 else list(reversed(models))
            for name in order:
                before = zi.stats(models[name][0]).waited_seconds
                taken, loss = step(*models[name], number, args)
                losses.add(loss)
                if number >= WARM_UP:
                    seconds[name].append(taken)
                    waited[name].append(zi.stats(models[name][0]).waited_seconds - before)
            if len(losses) != 1:
                sys.exit(f"step {number}: the losses differ: {losses}")
        if dist.get_rank() == 0:
            stats = zi.stats(models["prefetch"][0])
            print(
                f"{stats.num_parameters:,} parameters, {dist.get_world_size()} ranks, stage 3, "
                f"{args.slow} at {args.bandwidth:g} MB/s; {args.steps} interleaved steps each; losses equal"
            )
            for name, times in seconds.items():
                spread = f"{min(times):.3f} to {max(times):.3f}"
                print(f"{name:<13} median {statistics.median(times):.3f} s a step ({spread}), "
                      f"waited {statistics.median(waited[name]):.3f} s")  # fmt: skip
            ratios = [a / b for a, b in zip(seconds["no lookahead"], seconds["prefetch"], strict=True)]
            print(f"ratio         median {statistics.median(ratios):.2f} of the steps' pairs, least {min(ratios):.2f}")
        models.clear()
    dist.barrier()
    dist.destroy_process_group()
    return 0
