"""The benchmark `overlap`: how much of the transfers over a slow link computation hides, on the test device.

The device of tests/device is host memory that torch treats as an accelerator. Its kernels and copies take a given time
on a clock of its own: real time, in which they need no core, so that other load on the machine hardly matters. A stack
of layers trains on it, with links on which the busier direction takes a given share of the kernels of a plain step.
Ablations: without fetching ahead, at several durations of a kernel (figure 6d of the ZeRO-Infinity paper varies the
batch instead), and with whole layers on one rank each instead of a part on every rank (figure 6c).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.free_port import free_port
from benchmarks.overlap.run import Run
from benchmarks.provenance import keep, provenance
from benchmarks.tables import aligned
from zero_infinity.byte_sizes import format_bytes, format_rate, format_seconds
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import UsageError

_EPILOG = "example: python -m benchmarks overlap --ranks 2 --out bench-out"
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `seconds` is the median of a step, `compute_seconds` what the kernels of a plain step take."""

    name: str
    run: Run
    num_ranks: int
    seconds: float
    compute_seconds: float
    bytes_per_second: float
    uploaded: int
    downloaded: int
    same_losses: bool | None  # as plain PyTorch's; None on several ranks

    @property
    def ratio(self) -> float:
        return self.seconds / self.compute_seconds


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "overlap",
        help="how much of the transfers over a slow link computation hides",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=24, metavar="N", help="layers (24)")
    parser.add_argument("--width", type=int, default=384, metavar="N", help="width of a layer (384)")
    parser.add_argument("--kernel", type=float, default=20, metavar="MS", help="duration of a kernel (20)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (8)")
    parser.add_argument("--transfer", type=float, default=0.8, metavar="SHARE", help="of the kernels of a plain step "
                        "that the busier direction takes (0.8)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of the ablation of the partition (2)")
    parser.add_argument("--only", metavar="TEXT", help="only runs with this text in their name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write overlap.json there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    where = provenance(".")
    results: list[Result] = []
    with status_lines() as say:
        for name, chosen, num_ranks in runs(args):
            if args.only is None or args.only in name:
                say(name)
                results.append(measure(name, chosen, num_ranks))
    print(table(results))
    found = {"provenance": asdict(where), "results": [{**asdict(r), "ratio": r.ratio} for r in results]}
    keep(json.dumps(found, indent=2), "overlap", args.out)
    return 0


def runs(args: argparse.Namespace) -> Iterator[tuple[str, Run, int]]:
    """Name, settings and number of ranks of each run."""
    half = Run(args.layers, args.width, args.kernel / 1e3, 0.5, args.steps, args.transfer)
    yield "half of the parameters on the device", half, 1
    yield "half, without fetching ahead", replace(half, prefetch=False), 1
    all_there = replace(half, device_share=1.1)
    yield "all parameters on the device", all_there, 1
    yield "all, both directions together", replace(all_there, transfer_share=args.transfer / 2), 1
    for factor in (2, 4):
        slow = replace(half, kernel_seconds=factor * half.kernel_seconds, transfer_share=args.transfer / factor)
        yield f"half, kernels x{factor}", slow, 1
        yield f"half, kernels x{factor}, without fetching ahead", replace(slow, prefetch=False), 1
    for partition in ("spread", "owner"):
        yield f"half, {args.ranks} ranks, {partition}", replace(half, partition=partition), args.ranks


def measure(name: str, chosen: Run, num_ranks: int) -> Result:
    """Run it in processes of its own."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.overlap.rank_run", json.dumps(asdict(chosen))]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "WORLD_SIZE": str(num_ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, error) in zip(ranks, outputs, strict=True):
        if rank.returncode != 0:
            raise UsageError(f"{name}: a rank failed\n{error.decode()}")
    found: dict[str, Any] = json.loads(outputs[0][0])
    return Result(name, chosen, num_ranks, **found)


def table(results: list[Result]) -> str:
    rows = [["", "step", "kernels", "ratio", "link", "up", "down", "losses"]]
    for result in results:
        losses = {True: "plain PyTorch's", False: "DIFFERENT", None: ""}[result.same_losses]
        rows.append([
            result.name,
            format_seconds(result.seconds),
            format_seconds(result.compute_seconds),
            f"{result.ratio:.3f}",
            format_rate(result.bytes_per_second),
            format_bytes(result.uploaded),
            format_bytes(result.downloaded),
            losses,
        ])  # fmt: skip
    return aligned(rows)
