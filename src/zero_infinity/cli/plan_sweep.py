"""`zero-infinity plan --sweep`: one plan for every combination of some options, as a table, CSV, JSON or picture.

Owns the options that can be swept and what a row has. A combination that does not fit is a row that says so.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zero_infinity.byte_sizes import format_bytes, format_seconds
from zero_infinity.cli import plan_arguments
from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner.hardware import Hardware, TierKind
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.plan import Plan, make_plan

_MAX_POINTS = 10_000
_OPTIONS: dict[str, Callable[[str], object]] = {
    "batch": float,
    "accumulation": int,
    "seq": int,
    "interval": int,
    "stage": int,
    "lora": int,
    "nodes": int,
    "gpus": int,
    "memory": str,
    "device-memory": str,
    "optimizer": str,
    "dtype": str,
    "model": str,
    "hardware": str,
}
COLUMNS = (
    *("seconds", "seconds_low", "seconds_high", "tokens_per_second", "compute_seconds", "wait_seconds", "bottleneck"),
    *("read_bytes", "written_bytes", "device_bytes", "host_bytes", "storage_bytes", "problem"),
)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination: the values of its options, and its figures by column; None where it does not fit."""

    values: tuple[object, ...]
    figures: dict[str, object]


def add_options(parser: argparse.ArgumentParser) -> None:
    sweep = parser.add_argument_group("many plans")
    sweep.add_argument(
        "--sweep", action="append", metavar="OPTION=V,V,...", help=f"one plan for each value; several make every "
        f"combination. Options: {', '.join(_OPTIONS)}",
    )  # fmt: skip
    sweep.add_argument("--csv", type=Path, metavar="FILE", help="write the sweep as CSV")
    sweep.add_argument("--picture", type=Path, metavar="FILE", help="draw tokens/s over the first option (.png, .svg)")


def parse(texts: Sequence[str]) -> dict[str, list[object]]:
    """The values of each option that is swept."""
    swept: dict[str, list[object]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--")
        if name not in _OPTIONS or not values:
            raise ConfigError(
                f"--sweep {text!r} is not valid; accepted: OPTION=V,V,... with one of {', '.join(_OPTIONS)}\n"
                "  fix:   --sweep batch=1,2,4"
            )
        try:
            swept[name] = [_OPTIONS[name](value) for value in values.split(",")]
        except ValueError:
            raise ConfigError(f"--sweep {text!r}: these are not numbers\n  fix:   --sweep batch=1,2,4") from None
    points = 1
    for found in swept.values():
        points *= len(found)
    if points > _MAX_POINTS:
        raise ConfigError(f"--sweep makes {points:,} plans; at most {_MAX_POINTS:,}\n  fix:   fewer values")
    return swept


def rows_of(args: argparse.Namespace, swept: dict[str, list[object]]) -> Iterator[SweepRow]:
    """One row for each combination, in order; the last option changes fastest."""
    models = _Models()
    for values in itertools.product(*swept.values()):
        point = copy.copy(args)
        for name, value in zip(swept, values, strict=True):
            setattr(point, name.replace("-", "_"), value)
        yield SweepRow(values, _figures(point, models))


class _Models:
    """Models are made once for all plans that share one."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], ModelShape] = {}

    def of(self, point: argparse.Namespace, hardware: Hardware) -> ModelShape:
        names = ("model", "seq", "lora", "quantised", "optimizer")
        key = (plan_arguments.is_half(point, hardware), *(getattr(point, name) for name in names))
        if key not in self._made:
            self._made[key] = plan_arguments.model_of(point, hardware)
        return self._made[key]


def _figures(point: argparse.Namespace, models: _Models) -> dict[str, object]:
    hardware = plan_arguments.hardware_of(point)
    try:
        plan = make_plan(models.of(point, hardware), hardware, plan_arguments.job_of(point, hardware))
    except (CapacityError, ConfigError) as error:
        return {**dict.fromkeys(COLUMNS), "problem": str(error).partition("\n")[0]}
    return figures_of(plan)


def figures_of(plan: Plan) -> dict[str, object]:
    """What a row, and the page, have of a plan."""
    outcome, between = plan.outcome, plan.time_range
    held = dict.fromkeys(TierKind, 0)
    for use in plan.tiers:
        held[use.tier.kind] += use.num_bytes
    return {
        "seconds": outcome.seconds,
        "seconds_low": between.low,
        "seconds_high": between.high,
        "tokens_per_second": outcome.tokens_per_second,
        "compute_seconds": outcome.compute_seconds,
        "wait_seconds": outcome.wait_seconds,
        "bottleneck": outcome.bottleneck,
        "read_bytes": outcome.read_bytes * plan.inputs.num_devices,
        "written_bytes": plan.written_per_node,
        "device_bytes": held[TierKind.DEVICE],
        "host_bytes": held[TierKind.HOST],
        "storage_bytes": held[TierKind.STORAGE],
        "problem": None,
    }


def show(args: argparse.Namespace) -> int:
    """Make the plans and write them as asked for."""
    if args.picture is not None and len(args.sweep) > 2:
        raise ConfigError("--picture draws one or two options\n  fix:   fewer --sweep")
    swept = parse(args.sweep)
    rows = list(rows_of(args, swept))
    if args.csv is not None:
        _write_csv(args.csv, swept, rows)
    if args.picture is not None:
        _draw(args.picture, swept, rows)
    if args.json:
        import json

        print(json.dumps([{**dict(zip(swept, row.values, strict=True)), **row.figures} for row in rows], indent=1))
    else:
        _print(Console(), swept, rows)
    return 0


def _print(console: Console, swept: dict[str, list[object]], rows: list[SweepRow]) -> None:
    table = Table(*swept, "step", "tokens/s", "waits", "bottleneck", "NVMe r/w")
    for row in rows:
        values = [f"{value:g}" if isinstance(value, float) else str(value) for value in row.values]
        figures = row.figures
        if figures["problem"] is not None:
            table.add_row(*values, "does not fit", "", "", str(figures["problem"]), "")
            continue
        seconds, waits = float(str(figures["seconds"])), float(str(figures["wait_seconds"]))
        table.add_row(
            *values,
            format_seconds(seconds),
            f"{float(str(figures['tokens_per_second'])):,.1f}",
            f"{waits / seconds:.0%}",
            str(figures["bottleneck"]),
            f"{format_bytes(int(str(figures['read_bytes'])))} / {format_bytes(int(str(figures['written_bytes'])))}",
        )
    console.print(table)


def _write_csv(path: Path, swept: dict[str, list[object]], rows: list[SweepRow]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*swept, *COLUMNS])
            writer.writerows([*row.values, *(row.figures[name] for name in COLUMNS)] for row in rows)
    except OSError as error:
        raise ConfigError(f"--csv {path}: cannot be written: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)


def _draw(path: Path, swept: dict[str, list[object]], rows: list[SweepRow]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--picture needs matplotlib\n  fix:   pip install matplotlib, or --csv") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    first, *others = swept
    lines: dict[tuple[object, ...], list[tuple[str, float]]] = {}
    for row in rows:
        speed = row.figures["tokens_per_second"]
        if isinstance(speed, float):
            lines.setdefault(row.values[1:], []).append((f"{row.values[0]}", speed))
    for values, points in lines.items():
        label = ", ".join(f"{name} {value}" for name, value in zip(others, values, strict=True)) or None
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set_xlabel(first)
    axes.set_ylabel("tokens/s")
    if others:
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from None
    print(f"written: {path}", file=sys.stderr)
