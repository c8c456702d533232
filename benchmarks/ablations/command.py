"""The benchmark `ablations`: what each part of the engine is worth, by leaving it out.

Runs a grid of batch sizes and link speeds. A link speed applies to the drive, to the link of an emulated device and to
the link between ranks; slower links are emulated by sleeping, which takes no core. In each cell the variants of a group
train the same model with their steps interleaved. A ratio is relative to the step, in the same round, of the variant
named by `against`. The variants are not settings of the library: see `engine_variants`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.ablations import plot
from benchmarks.provenance import provenance
from benchmarks.ratios import ratios
from benchmarks.tables import aligned
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Race, Setting
from benchmarks.turns.options import add_race, add_turns, race_of, swap_directory
from benchmarks.turns.rounds import compete
from zero_infinity.byte_sizes import format_rate, parse_bytes
from zero_infinity.cli import signals
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import ConfigError

_FRACTION = 1 / 8  # of the states: the budget
_HALF = 1 / 2  # the budget where a cache has something to keep: at 1/8 all memory is for what comes next
_EPILOG = """\
examples:
  python -m benchmarks ablations --nvme /mnt/nvme --out bench-out
  python -m benchmarks ablations --batches 1 --links 200MB/s --steps 4
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """The engine with one thing changed. `against`: what its ratio is to."""

    name: str
    against: str
    options: dict[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    ranks: int = 1
    on_device: bool = False  # an emulated one, with room for half of the parameters
    fraction: float = _FRACTION


WHOLE = Variant("whole engine", "whole engine")
_RECOMPUTED: dict[str, object] = {"checkpoint_activations": True}
ONE_RANK = (
    WHOLE,
    Variant("no prefetch", WHOLE.name, without=("prefetch",)),
    Variant("update after backward", WHOLE.name, {"update": "after_backward"}),
    Variant("tiles (each layer in 4)", WHOLE.name, {"tile_above": "quarter"}),
    Variant("recompute", WHOLE.name, _RECOMPUTED),
    Variant("recompute, inputs offloaded", "recompute", {**_RECOMPUTED, "offload_activations": True}),
)
HALF = (
    Variant("half of the states in RAM", "half of the states in RAM", fraction=_HALF),
    Variant("half in RAM, no cache", "half of the states in RAM", without=("cache",), fraction=_HALF),
)
DEVICE = (
    Variant("on a device", "on a device", on_device=True),
    Variant("on a device, no prefetch", "on a device", without=("prefetch",), on_device=True),
)
TWO_RANKS = (
    Variant("2 ranks, spread", "2 ranks, spread", ranks=2),
    Variant("2 ranks, owner partition", "2 ranks, spread", {"partition": "owner"}, ranks=2),
    Variant("2 ranks, no prefetch", "2 ranks, spread", without=("prefetch",), ranks=2),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "ablations",
        help="what each part of the engine is worth",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_race(parser, layers=6, hidden=512, batch=None, seq=128)
    add_turns(parser, steps=5, warmup=3)
    parser.add_argument("--batches", default="2,8,32", metavar="LIST", help="sequences at once (2,8,32)")
    parser.add_argument("--links", default="real,300MB/s", metavar="LIST", help="speeds of the drive, of the link to a "
                        "device and of that between ranks; real: as they are (real,300MB/s)")  # fmt: skip
    parser.add_argument("--one-rank", action="store_true", help="leave out what takes two ranks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    batches, links = _batches(args.batches), _links(args.links)
    with signals.watched(), swap_directory(args.nvme) as nvme:
        origin = provenance(nvme)
        cells = []
        with status_lines() as say:
            for bytes_per_second in links:
                for batch in batches:
                    args.batch = batch
                    race = race_of(args)
                    two_ranks = () if args.one_rank or batch % 2 else (TWO_RANKS,)
                    for variants in (ONE_RANK, HALF, DEVICE, *two_ranks):
                        say(f"batch {batch}, links {_speed(bytes_per_second)}: {len(variants)} variants")
                        settings = [_setting(variant, race, nvme, bytes_per_second) for variant in variants]
                        contenders = [Contender(race, setting, timeout=args.timeout) for setting in settings]
                        compete(contenders, race.num_steps, say, patience=args.patience)
                        cells.append(_cell(race, bytes_per_second, variants, contenders, args.warmup))
    content = {**asdict(origin), "warmup": args.warmup, "fraction": _FRACTION, "cells": cells}
    text = json.dumps(content, indent=1)
    if args.json:
        print(text)
    else:
        _print(cells)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        stem: Path = args.out / "ablations"
        stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        drawn = plot.draw(content, stem)
        print(f"written: {stem}.json{''.join(f', {file.suffix}' for file in drawn)}", file=sys.stderr)
    return 1 if any(row["error"] for cell in cells for row in cell["rows"]) else 0


def _setting(variant: Variant, race: Race, nvme: str, bytes_per_second: float | None) -> Setting:
    options = dict(variant.options)
    if options.get("tile_above") == "quarter":
        # The largest layers, 4 hidden x hidden with their gradient, in four tiles; smaller ones in fewer.
        options["tile_above"] = 8 * race.hidden**2 + 4096
    memory = int(race.state_bytes * variant.fraction) // variant.ranks
    if variant.ranks > 1:
        memory += 8 * 4 * 4 * race.hidden**2  # copies of whole layers, which do not get smaller with ranks
    return Setting(
        variant.name,
        memory,
        nvme,
        variant.fraction,
        options,
        variant.without,
        bytes_per_second,
        variant.ranks,
        device_memory=2 * race.shape.num_parameters if variant.on_device else None,
    )


def _cell(
    race: Race,
    bytes_per_second: float | None,
    variants: Sequence[Variant],
    contenders: Sequence[Contender],
    warmup: int,
) -> dict[str, Any]:
    by_name = {contender.setting.name: contender.samples for contender in contenders}
    rows = []
    for variant, contender in zip(variants, contenders, strict=True):
        samples, base = contender.samples[warmup:], by_name[variant.against][warmup:]
        wall = ratios([s.seconds for s in samples], [s.seconds for s in base]) if samples and base else None
        losses = [s.loss for s in contender.samples]
        rows.append(
            {
                "name": variant.name,
                "against": variant.against,
                "error": contender.error,
                "seconds": statistics.median(s.seconds for s in samples) if samples else None,
                "ratio": asdict(wall) if wall else None,
                "waited_seconds": statistics.median(s.waited_seconds for s in samples) if samples else None,
                "read_bytes": statistics.fmean(s.bytes_read for s in samples) if samples else None,
                "written_bytes": statistics.fmean(s.bytes_written for s in samples) if samples else None,
                "held_bytes": contender.finish_info.memory_peak if contender.finish_info else None,
                "peak_rss": max((usage.peak_rss for usage in contender.usages), default=None),
                "equal_losses": losses == [s.loss for s in by_name[variant.against]],
            }
        )
    return {"race": asdict(race), "bytes_per_second": bytes_per_second, "rows": rows}


def _print(cells: Sequence[dict[str, Any]]) -> None:
    rows = [["links", "batch", "variant", "s/step", "ratio", "p10-p90", "waited", "MB read", "written", "losses"]]
    for cell in cells:
        for row in cell["rows"]:
            place = [_speed(cell["bytes_per_second"]), str(cell["race"]["batch"]), row["name"]]
            wall = row["ratio"]
            if wall is None:
                rows.append([*place, *["-"] * 7])
                continue
            rows.append(
                [
                    *place,
                    f"{row['seconds']:.3f}",
                    f"{wall['median']:.2f}",
                    f"{wall['p10']:.2f}-{wall['p90']:.2f}",
                    f"{row['waited_seconds']:.3f}",
                    f"{row['read_bytes'] / 1e6:.0f}",
                    f"{row['written_bytes'] / 1e6:.0f}",
                    "equal" if row["equal_losses"] else "differ",
                ]
            )
    console = Console()
    console.print(aligned(rows), markup=False, highlight=False, soft_wrap=True)
    for cell in cells:
        for row in cell["rows"]:
            if row["error"]:
                console.print(f"failed: {row['name']}: {row['error']}", markup=False, soft_wrap=True)


def _speed(bytes_per_second: float | None) -> str:
    return "real" if bytes_per_second is None else format_rate(bytes_per_second)


def _links(text: str) -> list[float | None]:
    return [
        None if part.strip() == "real" else parse_bytes(part.strip().removesuffix("/s")) for part in text.split(",")
    ]


def _batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise ConfigError(f"--batches {text}: integers of at least 1, with commas between them")
    return batches
