"""The benchmark `update`: the optimizer's step, relative to the drive alone.

Parameters, gradients and optimizer states are on the drive, and memory holds a part of them: each step reads all three
and writes parameters and states. Rounds are interleaved with the I/O engine alone, half reads and half writes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.drive_alone import (
    add_arguments,
    backward,
    bytes_of,
    drive_alone,
    num_layers_of,
    trained_layers,
)
from benchmarks.provenance import keep, provenance
from zero_infinity.byte_sizes import format_bytes
from zero_infinity.storage.io_speed import IOWorkload

_MEMORY_SHARE = 8  # of the states
_LEAST_MEMORY = 256 << 20
_NUM_ROUNDS = 5
_EXAMPLE = "example: python -m benchmarks update /mnt/nvme --size 4GiB"


@dataclass(frozen=True, slots=True)
class Round:
    """One step and the drive alone after it."""

    seconds: float
    cores: float  # CPU seconds of this process a second
    bytes_read: int
    bytes_written: int
    drive: float  # bytes a second, read and written together

    @property
    def rate(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.seconds

    @property
    def ratio(self) -> float:
        return self.rate / self.drive


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("update", help="the optimizer's step against the drive alone", epilog=_EXAMPLE)
    add_arguments(parser, "update")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    num_layers = num_layers_of(args.size)
    origin = provenance(args.directory)
    print(f"{_NUM_ROUNDS} rounds", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=".zero-infinity-bench-", dir=args.directory) as directory:
        rounds = _measure(Path(directory), num_layers)
    ratio = statistics.median(each.ratio for each in rounds)
    measured = [{**asdict(each), "rate": each.rate, "ratio": each.ratio} for each in rounds]
    num_bytes = bytes_of(num_layers)
    content = json.dumps({**asdict(origin), "num_bytes": num_bytes, "rounds": measured, "ratio": ratio}, indent=1)
    keep(content, "update", args.out)
    if args.json:
        print(content)
        return 0
    title = f"an update of {format_bytes(num_bytes)} of states: {ratio:.2f} of the drive (median)"
    table = Table("round", "seconds", "read", "written", "GB/s", "drive alone, GB/s", "ratio", "cores", title=title)
    for number, each in enumerate(rounds, 1):
        moved = (format_bytes(each.bytes_read), format_bytes(each.bytes_written))
        rates = (f"{each.rate / 1e9:.2f}", f"{each.drive / 1e9:.2f}", f"{each.ratio:.2f}")
        table.add_row(str(number), f"{each.seconds:.2f}", *moved, *rates, f"{each.cores:.2f} of {os.cpu_count()}")
    Console().print(table)
    return 0


def _measure(directory: Path, num_layers: int) -> list[Round]:
    import zero_infinity as zi

    num_bytes = bytes_of(num_layers)
    config = zi.Config(memory=max(num_bytes // _MEMORY_SHARE, _LEAST_MEMORY), nvme=directory, update="after_backward")
    model, optimizer = trained_layers(num_layers, config)
    rounds = []
    # Two steps after the one that has made the states are not counted: the order of their blocks is being learnt. (In a
    # training the update would run in the next forward; here synchronize() runs it.)
    for number in range(_NUM_ROUNDS + 2):
        backward(model)
        zi.synchronize(model)
        before, start, cpu = zi.stats(model), time.perf_counter(), time.process_time()
        optimizer.step()
        zi.synchronize(model)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        after = zi.stats(model)
        optimizer.zero_grad()
        drive = drive_alone(directory, num_bytes, IOWorkload.MIXED)
        if number > 1:
            read, written = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
            rounds.append(Round(seconds, cpu / seconds, read, written, drive))
    return rounds
