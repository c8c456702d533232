"""The benchmark `growth`: how step time, memory, start and traffic change when one thing grows.

Depth, width, budget, batch and number of ranks grow one at a time, starting from one small model whose states live on
NVMe. The points of an axis are measured with their steps interleaved. Next to each figure is its expected value: the
first point's value, scaled by what the axis does to it, or a bound. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.growth import plot
from benchmarks.provenance import provenance
from benchmarks.tables import aligned
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import STATE_BYTES, Race, Setting
from benchmarks.turns.options import add_race, add_turns, swap_directory
from benchmarks.turns.rounds import compete
from zero_infinity.byte_sizes import format_bytes, format_seconds
from zero_infinity.cli import signals
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.models.presets import Shape

_HEADS = 4
_LR = 3e-4
# Bytes that autograd keeps of a layer, for a token and a unit of width: 17 tensors of the hidden size, in float32. Two
# inputs of norms and their outputs, 3 + 1 of attention, its output in another order, 4 + 4 of the MLP.
_SAVED_BYTES = 4 * 17
_FRACTION = 1 / 4  # of the middle model's states: the budget, wherever it is not the budget that grows
_EPILOG = "example: python -m benchmarks growth --nvme /mnt/nvme --out bench-out"


@dataclass(frozen=True, slots=True)
class Point:
    """One contender. `memory` is of each rank, and `batch` of all together."""

    axis: str
    value: float  # on the axis
    layers: int
    hidden: int
    batch: int
    seq: int
    memory: int
    ranks: int = 1

    @property
    def num_parameters(self) -> int:
        return Shape(self.layers, self.hidden, _HEADS, self.seq).num_parameters

    @property
    def state_bytes(self) -> int:
        """Of each rank."""
        return STATE_BYTES * self.num_parameters // self.ranks

    @property
    def engine_bytes(self) -> int:
        """What the engines of all ranks hold at most: their budgets, or states and gradients where these take less."""
        return self.ranks * min(self.memory, self.state_bytes * (STATE_BYTES + 4) // STATE_BYTES)

    @property
    def activation_bytes(self) -> int:
        """Of all ranks."""
        return _SAVED_BYTES * self.layers * self.hidden * self.batch * self.seq


@dataclass(frozen=True, slots=True)
class Grown:
    """What one point measured; the traffic is that of one rank, in a step."""

    seconds: float
    best_seconds: float
    held_bytes: int
    peak_rss: int  # of all ranks together
    start_seconds: float  # building the model and zi.prepare
    moved_bytes: float  # read and written


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("growth", help="how time, memory and traffic grow with the model", epilog=_EPILOG)
    add_turns(parser, steps=6, warmup=3)
    add_race(parser, layers=8, hidden=512, batch=None, seq=128)
    parser.add_argument("--axes", default=",".join(AXES), metavar="LIST", help=f"which ones ({','.join(AXES)})")
    parser.set_defaults(run=run)


def points(axis: str, layers: int, hidden: int, seq: int) -> list[Point]:
    """Those of one axis; in the middle is `layers` x `hidden`, a batch of 4, and a quarter of its states."""
    states = STATE_BYTES * Shape(layers, hidden, _HEADS, seq).num_parameters
    memory = int(_FRACTION * states)
    if axis == "depth":
        sizes = [max(1, layers * part // 4) for part in (1, 2, 4, 8)]
        return [Point(axis, n, n, hidden, 4, seq, memory) for n in sizes]
    if axis == "width":
        widths = [max(1, hidden * part // 4 // 64) * 64 for part in (2, 3, 4, 6)]
        return [Point(axis, n, layers, n, 4, seq, memory) for n in sorted(set(widths))]
    if axis == "budget":
        parts = (1 / 8, 1 / 4, 1 / 2, 1, 2)
        return [Point(axis, part, layers, hidden, 4, seq, int(part * states)) for part in parts]
    if axis == "batch":
        return [Point(axis, n, layers, hidden, n, seq, memory) for n in (1, 2, 4, 8, 16)]
    # A rank's part of the states gets smaller, the copies of whole layers that it computes with do not.
    copies = 8 * 4 * 4 * hidden**2
    return [Point(axis, n, layers, hidden, 12, seq, memory // n + copies, n) for n in (1, 2, 3, 4)]


AXES = ("depth", "width", "budget", "batch", "ranks")


def laws(line: Sequence[Point], first: Grown) -> list[Grown]:
    """What each point should measure, going by the axis's first."""
    base = line[0]
    result = []
    for point in line:
        size = point.num_parameters / base.num_parameters
        tokens = point.batch / base.batch
        moved = first.moved_bytes * size / point.ranks
        if point.axis in ("budget", "depth", "width"):
            # What is not in memory has to come and go once a step; the least that any system can move.
            moved = 2.0 * max(0, point.state_bytes - point.memory)
        # What a process takes without either: Python, torch, the text.
        process = first.peak_rss - base.engine_bytes - base.activation_bytes
        result.append(
            Grown(
                seconds=first.seconds * size * tokens,
                best_seconds=first.best_seconds * size * tokens,
                held_bytes=point.memory,
                peak_rss=point.ranks * process + point.engine_bytes + point.activation_bytes,
                start_seconds=first.start_seconds * size,
                moved_bytes=moved,
            )
        )
    return result


def run(args: argparse.Namespace) -> int:
    chosen = [axis for axis in AXES if axis in args.axes.split(",")]
    with signals.watched(), swap_directory(args.nvme) as nvme:
        origin = provenance(nvme)
        found = []
        with status_lines() as say:
            for axis in chosen:
                line = points(axis, args.layers, args.hidden, args.seq)
                contenders = [_contender(point, nvme, args) for point in line]
                say(f"{axis}: {', '.join(c.setting.name for c in contenders)}")
                compete(contenders, args.warmup + args.steps, say, drain=True, patience=args.patience)
                found.append(_axis_json(line, contenders, args.warmup))
    content = {**asdict(origin), "warmup": args.warmup, "axes": found}
    text = json.dumps(content, indent=1)
    if args.json:
        print(text)
    else:
        _print(found)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        stem: Path = args.out / "growth"
        stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        drawn = plot.draw(content, stem)
        print(f"written: {stem}.json{''.join(f', {file.suffix}' for file in drawn)}", file=sys.stderr)
    return 1 if any(point["error"] for axis in found for point in axis["points"]) else 0


def _contender(point: Point, nvme: str, args: argparse.Namespace) -> Contender:
    race = Race(
        layers=point.layers,
        hidden=point.hidden,
        heads=_HEADS,
        batch=point.batch,
        seq=point.seq,
        seed=0,
        lr=_LR,
        num_steps=args.warmup + args.steps,
    )
    setting = Setting(f"{point.axis} {point.value:g}", point.memory, nvme, ranks=point.ranks)
    return Contender(race, setting, timeout=args.timeout)


def _axis_json(
    line: Sequence[Point], contenders: Sequence[Contender], warmup: int
) -> dict[str, list[dict[str, object]]]:
    measured = [_grown(contender, warmup) for contender in contenders]
    first = measured[0]
    expected = laws(line, first) if first is not None else [None] * len(line)
    return {
        "points": [
            {
                **asdict(point),
                "state_bytes": point.state_bytes,
                "error": contender.error,
                "measured": asdict(grown) if grown else None,
                "expected": asdict(law) if law else None,
            }
            for point, contender, grown, law in zip(line, contenders, measured, expected, strict=True)
        ]
    }


def _grown(contender: Contender, warmup: int) -> Grown | None:
    samples, start, finish = contender.samples[warmup:], contender.start_info, contender.finish_info
    if not samples or start is None or finish is None:
        return None
    return Grown(
        seconds=statistics.median(s.seconds for s in samples),
        best_seconds=min(s.seconds for s in samples),
        held_bytes=finish.memory_peak,
        peak_rss=max(usage.peak_rss for usage in contender.usages),
        start_seconds=start.build_seconds + start.prepare_seconds,
        moved_bytes=statistics.fmean(s.bytes_read + s.bytes_written for s in samples),
    )


def _print(axes: list[dict[str, list[dict[str, object]]]]) -> None:
    rows = [
        ["axis", "", "s/step", "law", "held", "budget", "peak RSS", "law", "start", "law", "MB moved", "law or least"]
    ]
    for axis in axes:
        for point in axis["points"]:
            name = [str(point["axis"]), f"{point['value']:g}"]
            measured, law = point["measured"], point["expected"]
            if not isinstance(measured, dict) or not isinstance(law, dict):
                rows.append([*name, *["-"] * 10])
                continue
            rows.append(
                [
                    *name,
                    f"{measured['seconds']:.3f}",
                    f"{law['seconds']:.3f}",
                    format_bytes(measured["held_bytes"]),
                    format_bytes(law["held_bytes"]),
                    format_bytes(measured["peak_rss"]),
                    format_bytes(law["peak_rss"]),
                    format_seconds(measured["start_seconds"]),
                    format_seconds(law["start_seconds"]),
                    f"{measured['moved_bytes'] / 1e6:.0f}",
                    f"{law['moved_bytes'] / 1e6:.0f}",
                ]
            )
    console = Console()
    console.print(aligned(rows), markup=False, highlight=False, soft_wrap=True)
    for axis in axes:
        for point in axis["points"]:
            if point["error"]:
                console.print(f"failed: {point['axis']} {point['value']:g}: {point['error']}", markup=False)
