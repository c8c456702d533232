"""What tiling allows and what it costs.

`hidden`: the largest hidden size whose feed-forward layers (hidden x 4 hidden and back) train in a fixed budget, with
1, 2, 4 and 16 tiles (figure 6b of the ZeRO-Infinity paper). A tile and its gradient take 2 * 4 * hidden * 4 hidden /
tiles bytes in float32; they have to fit next to two chunks of optimizer state and the biases. Every printed size was
trained for two steps, and the next larger one was refused.

`slowdown`: the time of a step of the same layers with 1, 2, 4, 16 and 64 tiles, all in memory, steps interleaved.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time

import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.byte_sizes import format_bytes, parse_bytes

_EPILOG = """\
examples:
  python -m benchmarks tiling hidden --memory 8MiB --nvme /mnt/nvme
  python -m benchmarks tiling slowdown --hidden 1024 --steps 12
"""
FACTORS = (1, 2, 4, 16)
GRAIN = 16  # hidden sizes are multiples of this


def layers(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))


def layer_bytes(hidden: int) -> int:
    """Of the largest weight and its gradient."""
    return 2 * 4 * hidden * 4 * hidden


def trains(hidden: int, num_tiles: int, memory: int, nvme: str, *, num_steps: int) -> bool:
    """Whether the layers train in `memory`, each weight in this many tiles."""
    model = layers(hidden)
    config = zi.Config(memory=memory, nvme=nvme, tile_above=-(-layer_bytes(hidden) // num_tiles))
    try:
        model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), config)
    except zi.CapacityError:
        return False
    for _ in range(num_steps):
        model(torch.ones(2, hidden)).square().mean().backward()
        optimizer.step()
    zi.synchronize(model)
    held = zi.stats(model).memory_peak
    return held <= memory


def largest_hidden(num_tiles: int, memory: int, nvme: str) -> int:
    fits, refused = 0, 1
    while trains(refused * GRAIN, num_tiles, memory, nvme, num_steps=0):
        fits, refused = refused, 2 * refused
    while refused - fits > 1:
        middle = (fits + refused) // 2
        if trains(middle * GRAIN, num_tiles, memory, nvme, num_steps=0):
            fits = middle
        else:
            refused = middle
    if not trains(fits * GRAIN, num_tiles, memory, nvme, num_steps=2):
        raise SystemExit(f"hidden size {fits * GRAIN} with {num_tiles} tiles was accepted, but exceeded the memory")
    return fits * GRAIN


def show_hidden(memory: int, nvme: str) -> None:
    print(f"memory {format_bytes(memory)}; hidden sizes in steps of {GRAIN}; two layers, hd x 4 hd and back\n")
    print("| tiles | largest hidden | against 1 tile | formula | a weight and its gradient | of the memory |")
    print("|---:|---:|---:|---:|---:|---:|")
    first = 0
    for factor in FACTORS:
        hidden = largest_hidden(factor, memory, nvme)
        first = first or hidden
        whole = layer_bytes(hidden)
        print(
            f"| {factor} | {hidden} | {hidden / first:.2f} x | {math.sqrt(factor):.2f} x | {format_bytes(whole)} | "
            f"{whole / memory:.1f} x |",
            flush=True,
        )


def show_slowdown(hidden: int, num_steps: int) -> None:
    contenders = {}
    x = torch.randn(256, hidden)
    for factor in (1, 2, 4, 16, 64):
        model = layers(hidden)
        config = zi.Config(memory="4GiB", tile_above=-(-layer_bytes(hidden) // factor))
        contenders[factor] = zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config)
    times: dict[int, list[float]] = {factor: [] for factor in contenders}
    for number in range(num_steps + 3):
        for factor, (model, optimizer) in contenders.items():
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            zi.synchronize(model)
            if number >= 3:  # the first record and learn
                times[factor].append(time.perf_counter() - start)
    print(f"hidden {hidden}, batch 256, {torch.get_num_threads()} threads, {num_steps} interleaved steps, AdamW\n")
    print("| tiles | median | best | median / untiled | best / untiled |")
    print("|---:|---:|---:|---:|---:|")
    for factor, seconds in times.items():
        middle, best = statistics.median(seconds), min(seconds)
        print(
            f"| {factor} | {middle * 1e3:.1f} ms | {best * 1e3:.1f} ms | {middle / statistics.median(times[1]):.3f} | "
            f"{best / min(times[1]):.3f} |"
        )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tiling",
        help="the hidden size that tiling allows, and what it costs",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["hidden", "slowdown"], help="the largest hidden size, or the time of a step")
    parser.add_argument("--memory", default="8MiB", metavar="SIZE", help="of the engine, for hidden (8MiB)")
    parser.add_argument("--nvme", metavar="DIR", help="for hidden (default: a temporary directory)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="for slowdown (1024)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="for slowdown (12)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.what == "slowdown":
        show_slowdown(args.hidden, args.steps)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        show_hidden(parse_bytes(args.memory), args.nvme or directory)
    return 0
