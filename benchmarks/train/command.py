"""The benchmark `train`: what offloading costs, relative to plain PyTorch with everything in memory.

Each contender is a process that lives for the whole run. Steps are interleaved and each round begins with another
contender, so that other load on the machine affects all of them alike. All train the same model on the same data from
the same seed: their losses must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from benchmarks.provenance import provenance
from benchmarks.train import plot
from benchmarks.train.report import Report
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Race, Setting
from benchmarks.turns.options import add_race, add_turns, race_of, swap_directory
from benchmarks.turns.rounds import compete
from zero_infinity.cli import signals
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import ConfigError

# Enough for states, gradients (4 bytes) and the largest unit's gradients once more.
_FITS_FRACTION = 2.0

EPILOG = """\
examples:
  python -m benchmarks train --nvme /mnt/nvme
  python -m benchmarks train --budgets plain,fits,2,1/8 --steps 20 --out bench-out
  python -m benchmarks train --layers 2 --hidden 128 --steps 5 --json

A budget is "fits" (no NVMe, everything stays in RAM), a part of the states such as 1/8 (they live on NVMe, and this
much of them in RAM), or "plain" (PyTorch once more: its ratio shows what is noise).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="time of a step against plain PyTorch, at several memory budgets",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_race(parser)
    add_turns(parser)
    parser.add_argument(
        "--budgets", default="plain,fits,1/2,1/8", metavar="LIST", help="see below (plain,fits,1/2,1/8)"
    )
    parser.add_argument("--drain", action="store_true", help="a step's time includes all of its updates, so none of "
                        "them overlaps the next forward: an upper bound")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    race = race_of(args)
    with signals.watched(), swap_directory(args.nvme) as nvme:
        contenders = [
            Contender(race, setting, timeout=args.timeout) for setting in make_settings(args.budgets, race, nvme)
        ]
        origin = provenance(nvme)
        with status_lines() as say:
            compete(contenders, race.num_steps, say, drain=args.drain, patience=args.patience)
    started = next((c.start_info for c in contenders if c.start_info), None)
    if started is not None:
        origin.machine["torch"] = f"torch {started.torch}, {started.num_threads} threads"
    report = Report(
        origin=origin,
        race=asdict(race),
        warmup=args.warmup,
        drain=args.drain,
        contenders=contenders,
    )
    if args.json:
        print(report.to_json())
    else:
        report.print(Console())
    if args.out is not None:
        _write(report, args.out)
    return 1 if report.errors() or report.differences() else 0


def make_settings(budgets: str, race: Race, nvme: str) -> list[Setting]:
    """Plain PyTorch first, then one contender for each budget of the list."""
    states = race.state_bytes
    settings = [Setting("plain")]
    for budget in filter(None, (part.strip() for part in budgets.split(","))):
        if budget == "plain":
            setting = Setting("plain again")
        elif budget == "fits":
            setting = Setting("RAM, fits", int(states * _FITS_FRACTION), None, _FITS_FRACTION)
        else:
            fraction = _fraction(budget)
            setting = Setting(f"NVMe, {budget}", int(states * fraction), nvme, float(fraction))
        if any(other.name == setting.name for other in settings):
            raise ConfigError(f"--budgets {budgets}: {budget!r} is there twice")
        settings.append(setting)
    return settings


def _fraction(text: str) -> Fraction:
    try:
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if fraction <= 0:
        raise ConfigError(f'--budgets: {text!r} is not a budget; accepted: "fits", "plain", or a part such as 1/8 or 2')
    return fraction


def _write(report: Report, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / "train"
    stem.with_suffix(".json").write_text(report.to_json() + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(report.to_markdown(), encoding="utf-8")
    drawn = plot.draw(report, stem)
    note = "" if drawn else "; no picture: it needs matplotlib and a budget on NVMe that finished"
    print(f"written: {stem}.json, .md{''.join(f', {file.suffix}' for file in drawn)}{note}", file=sys.stderr)
