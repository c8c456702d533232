"""The benchmark `clipping`: what `max_grad_norm` costs a step, with 1/8 of the states in RAM and the rest on NVMe.

Clipping needs the norm of all gradients, so no update can run in backward. Two contenders take steps in turn, one that
clips and one that does not, for a batch that computes much and one that computes little.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from rich.console import Console

from benchmarks.provenance import keep, provenance
from benchmarks.ratios import ratios
from benchmarks.tables import aligned
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Race, Sample, Setting
from benchmarks.turns.options import add_race, add_turns, race_of, swap_directory
from benchmarks.turns.rounds import compete
from zero_infinity.cli import signals
from zero_infinity.cli.progress_display import status_lines

_NORM = 1.0
_HEADINGS = ("batch", "contender", "s/step", "ratio", "p10-p90", "best/best", "wait", "GB read", "written")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender, over the measured rounds."""

    batch: str
    name: str
    seconds: float  # median
    ratio: float  # to the contender that does not clip: median of rounds
    p10: float
    p90: float
    best: float
    wait_fraction: float
    read_bytes: float  # a step
    written_bytes: float

    def cells(self) -> list[str]:
        return [
            self.batch,
            self.name,
            f"{self.seconds:.3f}",
            f"{self.ratio:.3f}",
            f"{self.p10:.2f}-{self.p90:.2f}",
            f"{self.best:.3f}",
            f"{self.wait_fraction:.1%}",
            f"{self.read_bytes / 1e9:.2f}",
            f"{self.written_bytes / 1e9:.2f}",
        ]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "clipping",
        help="a step with max_grad_norm against one without",
        epilog="example: python -m benchmarks clipping --batches 4x256,1x64 --nvme /mnt/nvme",
    )
    add_race(parser, batch=None, seq=None)
    add_turns(parser, warmup=5)
    parser.add_argument("--batches", default="4x256,1x64", metavar="LIST", help="sequences x bytes (4x256,1x64)")
    parser.add_argument("--budget", type=Fraction, default=Fraction(1, 8), metavar="PART", help="of the states in RAM "
                        "(1/8)")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    errors: list[str] = []
    with signals.watched(), swap_directory(args.nvme) as nvme:
        origin = provenance(nvme)
        for batch in args.batches.split(","):
            args.batch, args.seq = map(int, batch.split("x"))
            race = race_of(args)
            contenders = make_contenders(race, nvme, args.budget, args.timeout)
            with status_lines() as say:
                compete(contenders, race.num_steps, say, patience=args.patience)
            errors += [f"{batch}, {c.setting.name}: {c.error}" for c in contenders if c.error is not None]
            if not errors:
                rows += make_rows(batch, contenders, args.warmup)
    results = json.dumps({**asdict(origin), "rows": [asdict(row) for row in rows]})
    if args.json:
        print(results)
    else:
        print(aligned([list(_HEADINGS), *(row.cells() for row in rows)]))
    for error in errors:
        Console(stderr=True).print(f"failed: {error}", style="yellow", markup=False, highlight=False)
    keep(results, "clipping", args.out)
    return 1 if errors else 0


def make_contenders(race: Race, nvme: str, budget: Fraction, timeout: float) -> list[Contender]:
    """The one that the others are compared with comes first."""
    memory = int(race.state_bytes * budget)
    settings = [
        Setting("not clipped", memory, nvme),
        Setting("clipped", memory, nvme, options={"max_grad_norm": _NORM}),
    ]
    return [Contender(race, setting, timeout=timeout) for setting in settings]


def make_rows(batch: str, contenders: Sequence[Contender], warmup: int) -> list[Row]:
    base = contenders[0].samples[warmup:]
    return [_row(batch, contender.setting.name, contender.samples[warmup:], base) for contender in contenders]


def _row(batch: str, name: str, samples: Sequence[Sample], base: Sequence[Sample]) -> Row:
    found = ratios([s.seconds for s in samples], [s.seconds for s in base])
    if found is None:
        raise RuntimeError(f"{name} has no measured step")
    return Row(
        batch,
        name,
        statistics.median(s.seconds for s in samples),
        found.median,
        found.p10,
        found.p90,
        found.best,
        sum(s.waited_seconds for s in samples) / sum(s.seconds for s in samples),
        statistics.mean(s.bytes_read for s in samples),
        statistics.mean(s.bytes_written for s in samples),
    )
