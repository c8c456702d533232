"""Kills `zero-infinity train` with SIGKILL at random moments, and checks that no checkpoint is lost.

The first run is not disturbed. The disturbed run saves every step, is resumed after each kill, and starts over when it
reaches its end. Its final weights must equal the undisturbed run's, byte for byte. After each kill the latest
checkpoint must be complete, and not older than before.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from zero_infinity.checkpoint.checkpoint_directory import find, has_checkpoint
from zero_infinity.checkpoint.manifest import read

_EPILOG = """\
examples:
  python -m benchmarks kills /mnt/nvme/kills --kills 200
  python -m benchmarks kills /mnt/nvme/kills --kills 50 --ranks 2 --background
"""
SHAPE = ["--layers", "4", "--hidden", "128", "--heads", "4", "--seq", "64", "--memory", "3MiB"]


def command(directory: Path, steps: int, ranks: int, *, background: bool) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    # A directory of its own that the command makes for swap space would be left, empty, by each kill.
    swap = ["--nvme", str(directory.parent)]
    saving = ["--save", str(directory), "--save-every", "1", "--keep", "2", "--resume"]
    saving += ["--save-in-background"] if background else []
    return [sys.executable, *launcher, "-m", "zero_infinity", "train", *SHAPE, *swap, "--steps", str(steps), *saving]


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in find(folder).iterdir() if path.suffix == ".safetensors"}


def run_until(seconds: float | None, argv: list[str], log: Path) -> int:
    """The exit code of a run that was killed, with all its processes, after `seconds`."""
    with log.open("ab") as output, subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True) as run:
        try:
            return run.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return run.wait()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "kills",
        help="SIGKILL at random moments: no checkpoint is lost",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new folder for checkpoints and a log")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="(100)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of a whole run (200)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="(1)")
    parser.add_argument("--background", action="store_true", help="save while training goes on")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    args.directory.mkdir(parents=True)
    log = args.directory / "log"
    start = time.monotonic()
    if run_until(
        None, command(args.directory / "undisturbed", args.steps, args.ranks, background=args.background), log
    ):
        sys.exit(f"the undisturbed run has failed: see {log}")
    seconds = time.monotonic() - start
    expected = tensor_files(args.directory / "undisturbed")
    choice = random.Random(args.seed)
    num_kills = num_ends = last = 0
    while num_kills < args.kills:
        disturbed = args.directory / f"disturbed{num_ends}"
        # Anywhere between the imports and the end.
        code = run_until(
            choice.uniform(0, seconds), command(disturbed, args.steps, args.ranks, background=args.background), log
        )
        step = read(find(disturbed)).step if has_checkpoint(disturbed) else 0
        if step < last:
            sys.exit(f"after kill {num_kills} the latest checkpoint is of step {step}, and was of {last}")
        last = step
        if code == 0:
            if tensor_files(disturbed) != expected:
                sys.exit(f"{disturbed} differs from the undisturbed run")
            num_ends, last = num_ends + 1, 0
            continue
        if code != -signal.SIGKILL:
            sys.exit(f"a run has ended with code {code}: see {log}")
        num_kills += 1
        print(f"kill {num_kills}: the latest checkpoint is of step {step}", flush=True)
    disturbed = args.directory / f"disturbed{num_ends}"
    if (
        run_until(None, command(disturbed, args.steps, args.ranks, background=args.background), log)
        or tensor_files(disturbed) != expected
    ):
        sys.exit(f"{disturbed} differs from the undisturbed run, or has failed: see {log}")
    print(f"{num_kills} kills, {num_ends + 1} runs to the end, each the same bits as the undisturbed one")
    return 0
