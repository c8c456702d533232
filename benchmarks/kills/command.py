"""`python -m benchmarks kills`: kills runs of `zero-infinity train` with SIGKILL at random moments."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.kills.campaign import Campaign, Figures, Setting
from benchmarks.kills.forked import start_server
from benchmarks.provenance import provenance
from benchmarks.tables import markdown_table

LIMIT_SECONDS = 20.0
SETTINGS = [Setting(num_ranks, background) for num_ranks in (1, 2) for background in (False, True)]
HEADINGS = [
    "killed", "kills", "runs to the end, same bits", "survivors", "lived on: median", "99%", "longest",
    "did not name it", "left behind",
]  # fmt: skip
_EPILOG = """\
example:
  python -m benchmarks kills /mnt/nvme/kills --kills 1000

One rank of one and of two, with saves in the foreground and in the background, a quarter of the kills each. With two
ranks, moments are drawn from when both have joined: before, torch's init_process_group waits for a rank that does not
come, and a launcher such as torchrun ends the others.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "kills",
        help="SIGKILL at random moments: no checkpoint is lost, survivors end",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new folder for checkpoints and output")
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="in all (1000)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of a whole run (30)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="stop after this time (never)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="settings that are killed at once (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    args.directory.mkdir(parents=True)
    directory = args.directory.resolve()
    origin = provenance(directory)
    data = directory / "text"
    data.write_text("to be or not to be, that is the question; " * 200)
    deadline = time.monotonic() + args.minutes * 60
    shares = [args.kills // len(SETTINGS) + (number < args.kills % len(SETTINGS)) for number in range(len(SETTINGS))]
    figures = []
    # A process and a server for each: multiprocessing's own threads do not share one well.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = [
            pool.submit(_kill, directory / str(number), setting, args, data, share, deadline)
            for number, (setting, share) in enumerate(zip(SETTINGS, shares, strict=True))
        ]
        for one in runs:
            found = one.result()
            figures.append(found)
            print(f"{found.setting}: {found.num_kills} kills, {found.num_ends} runs to the end", file=sys.stderr)
    print(f"`{origin.command}`, {origin.in_words()}:\n\n{table(figures)}")
    return 0 if all(map(_is_good, figures)) else 1


def _kill(
    directory: Path, setting: Setting, args: argparse.Namespace, data: Path, num_kills: int, deadline: float
) -> Figures:
    start_server()
    return Campaign(directory, setting, args.steps, args.seed, data).run(num_kills, deadline)


def table(figures: Iterable[Figures]) -> str:
    return markdown_table(HEADINGS, [_row(found) for found in figures])


def _row(found: Figures) -> list[str]:
    seconds = sorted(found.seconds)
    lived = ["", "", ""]
    if seconds:
        late = seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]
        lived = [f"{number:.1f} s" for number in (statistics.median(seconds), late, seconds[-1])]
    counts = (found.num_kills, found.num_ends + 1, len(seconds))
    return [
        str(found.setting),
        *map(str, counts),
        *lived,
        str(found.num_unnamed),
        "nothing" if not found.left else ", ".join(sorted(set(found.left))[:3]),
    ]


def _is_good(found: Figures) -> bool:
    return not found.left and not found.num_unnamed and max(found.seconds, default=0.0) < LIMIT_SECONDS
