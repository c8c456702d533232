"""`zero-infinity bench train`: what offloading costs, against plain PyTorch with everything in memory.

Owns the choice of contenders and the order of their turns. Each contender is a process (`bench_contender`,
`bench_worker`) that lives for the whole run. They take one step each in turn, one at a time, and each round begins with
another one, so that whatever else the machine does falls on all alike. All train the same model on the same data from
the same seed: their losses must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from zero_infinity.cli import bench_plot, signals
from zero_infinity.cli.bench_contender import Contender, Race, Setting, machine_cpu_seconds
from zero_infinity.cli.bench_report import QUIET_CORES, Report
from zero_infinity.cli.provenance import provenance
from zero_infinity.errors import ConfigError
from zero_infinity.models.presets import Shape
from zero_infinity.units import format_seconds

STATE_BYTES = 12  # a parameter: its value and AdamW's two states, all fp32
# Enough for states, gradients (4 bytes) and the largest unit's gradients once more.
_FITS_FRACTION = 2.0
_HEAD_WIDTH = 64
SWAP_PREFIX = ".zero-infinity-swap-"
_LR = 3e-4
_QUIET_SECONDS = 0.5  # clock ticks of 10 ms have to add up

EPILOG = """\
examples:
  zero-infinity bench train --nvme /mnt/nvme
  zero-infinity bench train --budgets plain,fits,2,1/8 --steps 20 --out bench-out
  zero-infinity bench train --layers 2 --hidden 128 --steps 5 --json

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


def add_race(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """The model that all contenders train; an option whose default is None is left out."""
    for name, usual, text in (
        ("layers", 6, "blocks"),
        ("hidden", 1024, "width"),
        ("batch", 4, "sequences at once"),
        ("seq", 256, "bytes in each"),
    ):
        default = defaults.get(name, usual)
        if default is not None:
            parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{text} ({default})")


def add_turns(parser: argparse.ArgumentParser, *, steps: int = 12, warmup: int = 3) -> None:
    """The options of every command that lets contenders take steps in turn."""
    for name, default, text in (
        ("steps", steps, "measured steps"),
        ("warmup", warmup, "steps before, not measured: in the first two the order is learnt"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--nvme", metavar="DIR", help="where states go (default: a directory made here and removed)")
    parser.add_argument("--patience", type=_count, default=0, metavar="SECONDS", help="wait this long before each turn "
                        "for others on the machine to be quiet (0)")  # fmt: skip
    parser.add_argument("--timeout", type=positive, default=600, metavar="SECONDS", help="for one answer (600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write what was found there, as files")


def run(args: argparse.Namespace) -> int:
    race = race_of(args)
    with signals.watched(), swap_directory(args.nvme) as nvme:
        contenders = [
            Contender(race, setting, timeout=args.timeout) for setting in make_settings(args.budgets, race, nvme)
        ]
        origin = provenance(nvme)
        with progress() as say:
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


def compete(
    contenders: Sequence[Contender],
    num_rounds: int,
    say: Callable[[str], None],
    *,
    drain: bool = False,
    patience: float = 0.0,
) -> None:
    """Let everybody take all steps. Whatever ends this, no process is left."""
    try:
        for contender in contenders:
            say(f"starting: {contender.setting.name}")
            # One after the other, else one's start is measured while another's imports run.
            contender.launch()
            contender.greet()
            contender.start()
            if contender.error is not None:
                say(f"{contender.setting.name} failed: {contender.error}")
        for number in range(num_rounds):
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                if contender.alive:
                    _wait_for_quiet(patience)
                    contender.step(drain=drain)
                    if contender.error is not None:
                        say(f"{contender.setting.name} failed: {contender.error}")
            say(f"round {number + 1}/{num_rounds}: " + "  ".join(map(_last_step, contenders)))
        for contender in contenders:
            contender.finish()
    finally:
        for contender in contenders:
            contender.kill()


def _wait_for_quiet(patience: float) -> None:
    """Until the machine idles (contenders are stopped now, so what it does is others'), or `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = machine_cpu_seconds()
        time.sleep(_QUIET_SECONDS)
        if machine_cpu_seconds() - before <= QUIET_CORES * _QUIET_SECONDS:
            return


def make_settings(budgets: str, race: Race, nvme: str) -> list[Setting]:
    """Plain PyTorch first, then one contender for each budget of the list."""
    states = STATE_BYTES * Shape(race.layers, race.hidden, race.heads, race.seq).num_parameters
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


def race_of(args: argparse.Namespace) -> Race:
    heads = next(n for n in range(max(1, args.hidden // _HEAD_WIDTH), 0, -1) if args.hidden % n == 0)
    return Race(
        layers=args.layers,
        hidden=args.hidden,
        heads=heads,
        batch=args.batch,
        seq=args.seq,
        seed=0,
        lr=_LR,
        num_steps=args.warmup + args.steps,
    )


@contextmanager
def swap_directory(given: str | None) -> Iterator[str]:
    if given is not None:
        if not Path(given).is_dir():
            raise ConfigError(f"--nvme {given} is no directory\n  fix:   mkdir -p {given}, or mount the drive there")
        yield given
        return
    with tempfile.TemporaryDirectory(prefix=SWAP_PREFIX, dir=".") as path:
        yield path


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: one changing line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


def _last_step(contender: Contender) -> str:
    if contender.error is not None:
        return f"{contender.setting.name}: failed"
    return f"{contender.setting.name}: {format_seconds(contender.samples[-1].seconds)}"


def _write(report: Report, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / "train"
    stem.with_suffix(".json").write_text(report.to_json() + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(report.to_markdown(), encoding="utf-8")
    drawn = bench_plot.draw(report, stem)
    note = "" if drawn else "; no picture: it needs matplotlib and a budget on NVMe that finished"
    print(f"written: {stem}.json, .md{''.join(f', {file.suffix}' for file in drawn)}{note}", file=sys.stderr)


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return number
