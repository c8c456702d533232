"""The benchmark `checkpoint`: how fast checkpoints are saved and loaded, relative to the drive alone.

With states in RAM, saving only writes and loading only reads; with states on the same drive, both do both. Rounds are
interleaved with the same I/O pattern of the I/O engine alone, because drives vary from second to second. The result is
the median of the rounds. Removing the previous checkpoint is not measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drive_alone import add_arguments, bytes_of, drive_alone, num_layers_of, trained_layers
from benchmarks.provenance import keep, provenance
from zero_infinity.byte_sizes import format_bytes
from zero_infinity.storage.io_speed import IOWorkload

_MEMORY_SHARE = 4  # of the states, when they are on the drive
_NUM_ROUNDS = 5
_EXAMPLE = "example: python -m benchmarks checkpoint /mnt/nvme --size 4GiB"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians, in bytes of the checkpoint a second. `drive`: the I/O engine alone, moving as much."""

    home: str
    act: str
    checkpoint: float
    drive: float

    @property
    def ratio(self) -> float:
        return self.checkpoint / self.drive


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("checkpoint", help="saving and loading against the drive alone", epilog=_EXAMPLE)
    add_arguments(parser, "checkpoint")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    num_layers = num_layers_of(args.size)
    origin = provenance(args.directory)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix=".zero-infinity-bench-", dir=args.directory) as directory:
        for home in ("RAM", "NVMe"):
            print(f"states in {home}: {_NUM_ROUNDS} rounds", file=sys.stderr, flush=True)
            rows += _measure(Path(directory), num_layers, home)
    num_bytes = bytes_of(num_layers)
    measured = [{**asdict(row), "ratio": row.ratio} for row in rows]
    content = json.dumps({**asdict(origin), "num_bytes": num_bytes, "rounds": _NUM_ROUNDS, "rows": measured}, indent=1)
    keep(content, "checkpoint", args.out)
    if args.json:
        print(content)
        return 0
    table = Table("states", "", "GB/s", "drive alone, GB/s", "ratio", title=f"{format_bytes(num_bytes)} of states")
    for row in rows:
        table.add_row(row.home, row.act, f"{row.checkpoint / 1e9:.2f}", f"{row.drive / 1e9:.2f}", f"{row.ratio:.2f}")
    Console().print(table)
    return 0


def _measure(directory: Path, num_layers: int, home: str) -> list[Row]:
    import zero_infinity as zi

    num_bytes = bytes_of(num_layers)
    on_drive = home == "NVMe"
    memory = max(num_bytes // _MEMORY_SHARE, 256 << 20) if on_drive else 2 * num_bytes + (256 << 20)
    config = zi.Config(memory=memory, nvme=directory if on_drive else None)
    model, optimizer = trained_layers(num_layers, config)
    found: dict[str, list[float]] = {"save": [], "load": []}
    drive: dict[str, list[float]] = {"save": [], "load": []}
    for _ in range(_NUM_ROUNDS):
        for act in ("save", "load"):
            found[act].append(num_bytes / _seconds(zi, act, directory / home, model, optimizer))
            alone = IOWorkload.MIXED if on_drive else IOWorkload.WRITE if act == "save" else IOWorkload.READ
            # Of a mixed pattern half is read and half written: a checkpoint moves each of its bytes both ways.
            drive[act].append(drive_alone(directory, num_bytes, alone) / (2 if on_drive else 1))
    return [Row(home, act, statistics.median(found[act]), statistics.median(drive[act])) for act in found]


def _seconds(zi: Any, act: str, path: Path, model: Any, optimizer: Any) -> float:
    if act == "save":
        shutil.rmtree(path, ignore_errors=True)
    start = time.perf_counter()
    if act == "save":
        zi.save(path, model, optimizer)
    else:
        zi.load(path, model, optimizer)
        zi.synchronize(model)
    return time.perf_counter() - start
