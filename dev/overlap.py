"""What fetching ahead is worth on several ranks: stage 3 with prefetch against the same run without it.

    torchrun --standalone --nproc-per-node 2 dev/overlap.py --slow link
    torchrun --standalone --nproc-per-node 2 dev/overlap.py --slow drive

One hop is slowed to a given bandwidth, by sleeping, which takes no core from the model: `link` is the way from the host
to an emulated accelerator, before each gather (parameters live in RAM); `drive` is the swap space of each rank. Every
rank has both models, alike but for the lookahead, and takes steps of them in turn. A step's time ends when its updates
are done, and all ranks have ended theirs: nothing of one model runs during the other's turn. Losses must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

import zero_infinity as zi
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.params import parameter_store
from zero_infinity.policy import memory_budget
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.throttled_device import ThrottledDevice

WARM_UP = 3  # the first steps record the order


def build(args: argparse.Namespace, config: zi.Config, lookahead: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    shares = (memory_budget._COPY_LOOKAHEAD_SHARE, memory_budget._LOOKAHEAD_SHARE)
    if not lookahead:
        memory_budget._COPY_LOOKAHEAD_SHARE = memory_budget._LOOKAHEAD_SHARE = 0
    try:
        torch.manual_seed(0)
        model = ByteGPT(Shape(layers=args.layers, hidden=args.hidden, heads=4, seq=args.seq))
        num_bytes = sum(p.nbytes for p in model.parameters())
        place = None
        if args.slow == "link":
            place = zi.EmulatedAccelerator(num_bytes // 2, bytes_per_second=args.bandwidth * 1e6)
        return zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config, accelerator=place)
    finally:
        memory_budget._COPY_LOOKAHEAD_SHARE, memory_budget._LOOKAHEAD_SHARE = shares


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", choices=("link", "drive"), default="link")
    parser.add_argument("--bandwidth", type=float, default=25, metavar="MB/S", help="of the slow hop, on each rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--memory", default="16MiB", help="of a rank, with --slow drive")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=".") as directory:
        if args.slow == "drive":
            parameter_store.FileDevice = lambda paths: ThrottledDevice(FileDevice(paths), args.bandwidth * 1e6)  # type: ignore[misc, assignment]
            config = zi.Config(memory=args.memory, nvme=directory, stage=3)
        else:
            config = zi.Config(memory="256MiB", stage=3)
        models = {"prefetch": build(args, config, True), "no lookahead": build(args, config, False)}
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
                f"{args.slow} at {args.bandwidth:g} MB/s; {args.steps} steps each, in turn; losses equal"
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


if __name__ == "__main__":
    main()
