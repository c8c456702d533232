"""Options that the benchmarks with contenders share, and what is made of them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.turns.messages import Race
from zero_infinity.errors import ConfigError

SWAP_PREFIX = ".zero-infinity-swap-"
_HEAD_WIDTH = 64
_LR = 3e-4


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
