"""The command `python -m benchmarks finetune DIR`: a Llama of 1.1B parameters within a real limit of memory.

LoRA, QLoRA (4 bits) and full fine-tuning go through transformers' Trainer: a process trains and saves on the way, a
second one resumes from that checkpoint and must log the same losses, to the last digit. Generating is done with half of
the model in memory. Each process is in a control group of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.control_group import control_group
from benchmarks.provenance import keep, provenance
from benchmarks.tables import aligned
from zero_infinity.byte_sizes import format_bytes, format_count, parse_bytes
from zero_infinity.errors import ConfigError

METHODS = ("lora", "qlora", "full", "generate")
SHAPES = ("1.1b", "tiny")
# The engine's part of the limit: the rest is for torch and transformers (0.6 GiB) and activations.
_ENGINE_SHARE = 0.45
_EPILOG = """\
examples:
  python -m benchmarks finetune /mnt/nvme --limit 2GiB --out bench-out
  python -m benchmarks finetune /mnt/nvme --methods qlora,generate --steps 6
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One process."""

    done: dict[str, Any] | None
    group_peak: int | None  # memory of all kinds, page cache included
    error: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One way to use the model. `resumed`: training again from the checkpoint on."""

    method: str
    memory: int
    trial: Trial
    resumed: Trial | None

    @property
    def goes_on(self) -> bool:
        """True if the resumed run logged what the first one did."""
        if self.resumed is None:
            return True
        if self.trial.done is None or self.resumed.done is None:
            return False
        again = self.resumed.done["losses"]
        return bool(again) and again == self.trial.done["losses"][-len(again) :]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "finetune",
        help="a 1.1B Llama through Trainer within a real memory limit",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="for swap files, checkpoints and the model (50 GB)")
    parser.add_argument("--limit", default="2GiB", metavar="SIZE", help="of the control group (2GiB)")
    parser.add_argument("--shape", default="1.1b", choices=SHAPES, help="of the model (1.1b)")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="LIST", help=f"of {', '.join(METHODS)} (all)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps, or tokens (5)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="words of a batch (64)")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="for one process (3600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write finetune.json there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    limit, methods = parse_bytes(args.limit), args.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        raise ConfigError(f"--methods has {', '.join(sorted(unknown))}; there are: {', '.join(METHODS)}")
    if args.steps < 5 or not args.directory.is_dir():
        raise ConfigError("--steps is at least 5, and DIR a directory")
    origin = provenance(args.directory)
    rows = []
    with tempfile.TemporaryDirectory(prefix="zero-infinity-", dir=args.directory) as path:
        shared = {"model": str(Path(path) / "model"), "shape": args.shape, "length": args.length, "steps": args.steps,
                  "save_at": args.steps - 2}  # fmt: skip
        made = _start(shared | {"method": "make", "work": path, "memory": 0}, None, args.timeout)
        if made.done is None:
            raise ConfigError(f"the model could not be made: {made.error}")
        for method in methods:
            # Half of the model in bfloat16, or what the limit leaves.
            memory = made.done["num_parameters"] if method == "generate" else int(limit * _ENGINE_SHARE)
            with tempfile.TemporaryDirectory(dir=path) as work:
                job = shared | {"method": method, "work": work, "memory": memory}
                trial = _start(job, limit, args.timeout)
                resumed = None
                if method != "generate" and trial.done is not None:
                    resumed = _start(job | {"resumes": True}, limit, args.timeout)
                rows.append(Row(method, memory, trial, resumed))
                print(f"{method}: {asdict(rows[-1])}", file=sys.stderr, flush=True)
    found = [asdict(row) | {"goes_on": row.goes_on} for row in rows]
    content = json.dumps({**asdict(origin), "limit": limit, "shape": args.shape, "rows": found}, indent=1)
    print(content if args.json else _table(rows))
    keep(content, "finetune", args.out)
    return 0 if all(row.trial.done is not None and row.goes_on for row in rows) else 1


def _start(job: dict[str, Any], limit: int | None, timeout: float) -> Trial:
    command = [sys.executable, "-m", "benchmarks.finetune.trial", json.dumps(job)]
    if limit is None:
        return _ended(command, timeout)
    with control_group(limit) as group:
        trial = _ended(group.inside(command), timeout)
        error = f"killed by the kernel: more than {format_bytes(limit)}" if group.num_kills else trial.error
        return Trial(trial.done, group.peak_bytes, error)


def _ended(command: Sequence[str], timeout: float) -> Trial:
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Trial(None, None, f"not done after {timeout:.0f} s")
    if ended.returncode:
        return Trial(None, None, f"exit code {ended.returncode}")
    return Trial(json.loads(ended.stdout.splitlines()[-1]), None, None)


def _table(rows: list[Row]) -> str:
    lines = [["", "parameters", "engine", "resident peak", "read", "written", "seconds", "resumes"]]
    for row in rows:
        done = row.trial.done
        if done is None:
            lines.append([row.method, row.trial.error or "", *[""] * 6])
            continue
        what = "a token" if row.method == "generate" else "a step"
        told = "" if row.resumed is None else "the same losses" if row.goes_on else f"NO: {row.resumed.error}"
        lines.append(
            [
                row.method,
                format_count(done["num_parameters"]),
                f"{format_bytes(done['engine_peak'])} of {format_bytes(row.memory)}",
                format_bytes(done["resident_peak"]),
                f"{format_bytes(done['bytes_read'])} {what}",
                format_bytes(done["bytes_written"]),
                f"{min(done['seconds']):.1f}",
                told,
            ]
        )
    return aligned(lines)
