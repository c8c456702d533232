"""What moving the bytes costs by itself: plain PyTorch while another process does the I/O of a step.

Steps with and without that I/O are interleaved. The process moves so many GB a step by direct I/O in requests of 4 MiB
and does nothing else. The ratio is a lower bound for every system that moves these bytes during a step on this machine,
because kernel and hypervisor take their time from the cores that compute.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event

import torch

from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape

_EPILOG = "example: python -m benchmarks drive-load /mnt/nvme --read 1.12 --written 0.91"
REQUEST = 4 << 20
FILE = 1 << 30


def move(directory: str, bytes_per_second: float, write: bool, go: Event) -> None:
    """Transfer at a steady rate while `go` is set."""
    memory = mmap.mmap(-1, REQUEST)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(os.urandom(REQUEST))
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)  # outlives the name, which must not be left behind
    for offset in range(0, FILE, REQUEST):
        os.pwritev(descriptor, [memory], offset)
    offset, due = 0, time.perf_counter()
    while True:
        if not go.is_set():
            go.wait()
            due = time.perf_counter()
        (os.pwritev if write else os.preadv)(descriptor, [memory], offset % FILE)
        offset += 17 * REQUEST
        due += REQUEST / bytes_per_second
        time.sleep(max(0.0, due - time.perf_counter()))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "drive-load", help="plain PyTorch while another process moves a step's bytes", epilog=_EPILOG
    )
    parser.add_argument("directory", metavar="DIR", help="on the drive")
    parser.add_argument("--read", type=float, default=1.12, metavar="GB", help="read in each step (1.12)")
    parser.add_argument("--written", type=float, default=0.91, metavar="GB", help="written in each step (0.91)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="of each (12)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences (4)")
    parser.add_argument("--seq", type=int, default=256, metavar="N", help="bytes of a sequence (256)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    torch.manual_seed(0)
    model = ByteGPT(Shape(layers=6, hidden=1024, heads=16, seq=args.seq))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 256, (args.batch, args.seq + 1))

    def step() -> float:
        start = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    seconds = min(step() for _ in range(3))
    go = multiprocessing.Event()
    for num_bytes, write in ((args.read * 1e9, False), (args.written * 1e9, True)):
        for _ in range(2):
            multiprocessing.Process(
                target=move, args=(args.directory, num_bytes / seconds / 2, write, go), daemon=True
            ).start()
    time.sleep(5)
    alone: list[float] = []
    beside: list[float] = []
    for number in range(args.steps):
        for with_io in (number % 2 == 0, number % 2 == 1):
            (go.set if with_io else go.clear)()
            (beside if with_io else alone).append(step())
    ratios = sorted(b / a for a, b in zip(alone, beside, strict=True))
    print(
        f"alone {statistics.median(alone):.2f} s, beside {args.read} GB read and {args.written} GB written "
        f"{statistics.median(beside):.2f} s; ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}), "
        f"best/best {min(beside) / min(alone):.3f}"
    )
    return 0
