"""The results of the benchmark `train`: statistics of the samples, tables (terminal, plain, Markdown) and JSON.

Machines vary from second to second, so times are compared within a round: each step against plain PyTorch's step of the
same round. The result is the median of these ratios; the minimum is one lucky round. *Quiet* compares the medians of
steps during which other processes used next to no CPU, and best/best the fastest step of each.
"""

from __future__ import annotations

import json
import statistics
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import Provenance
from benchmarks.ratios import Ratios, ratios
from benchmarks.tables import aligned, markdown_table
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Sample
from benchmarks.turns.rounds import QUIET_CORES
from zero_infinity.byte_sizes import format_bytes, format_count, format_seconds

HEADINGS = (
    *("contender", "budget", "s/step", "ratio", "p10-p90", "min", "quiet", "best/best", "CPU", "wait"),
    *("GB read", "written", "peak RSS", "held", "start"),
)
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Quiet:
    """Over the steps during which others left the machine alone."""

    seconds: float  # median
    ratio: float  # of that median to the plain contender's
    num_steps: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender's, over the measured rounds. None where there is nothing to compare with."""

    seconds: float  # median
    wall: Ratios | None
    quiet: Quiet | None
    cpu: Ratios | None
    wait_fraction: float
    read_bytes: float  # a step
    written_bytes: float
    others_cores: float  # what the machine was busy with meanwhile, median


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about one run, as it goes into the JSON file."""

    origin: Provenance
    race: dict[str, object]
    warmup: int
    drain: bool
    contenders: Sequence[Contender]  # the first is plain PyTorch

    @property
    def plain(self) -> Contender:
        return self.contenders[0]

    def measured(self, contender: Contender) -> list[Sample]:
        return contender.samples[self.warmup :]

    def figures(self, contender: Contender) -> Figures | None:
        """None when no measured round was reached."""
        samples, plain = self.measured(contender), self.measured(self.plain)
        if not samples:
            return None
        seconds = sum(s.seconds for s in samples)
        return Figures(
            seconds=statistics.median(s.seconds for s in samples),
            wall=ratios([s.seconds for s in samples], [s.seconds for s in plain]),
            quiet=_quiet(samples, plain),
            cpu=ratios([s.cpu_seconds for s in samples], [s.cpu_seconds for s in plain]),
            wait_fraction=sum(s.waited_seconds for s in samples) / seconds,
            read_bytes=sum(s.bytes_read for s in samples) / len(samples),
            written_bytes=sum(s.bytes_written for s in samples) / len(samples),
            others_cores=statistics.median(s.others_cpu_seconds / s.seconds for s in samples),
        )

    # ------------------------------------------------------------------ exactness

    def differences(self) -> list[str]:
        """Where a contender's numbers are not the plain contender's, bit for bit; one line each."""
        lines = []
        for contender in self.contenders[1:]:
            pairs = zip(self.plain.samples, contender.samples, strict=False)
            wrong = [(step, p.loss, s.loss) for step, (p, s) in enumerate(pairs, 1) if _bits(p.loss) != _bits(s.loss)]
            if wrong:
                step, expected, found = wrong[0]
                lines.append(
                    f"{contender.setting.name}: the loss of step {step} is {found!r}, plain PyTorch's {expected!r} "
                    f"({len(wrong)} of {len(contender.samples)} steps differ)"
                )
            ends = (self.plain.finish_info, contender.finish_info)
            if ends[0] is not None and ends[1] is not None and ends[0].weights != ends[1].weights and not wrong:
                lines.append(f"{contender.setting.name}: every loss is equal, but the final weights differ")
        return lines

    # ------------------------------------------------------------------ forms

    def to_json(self) -> str:
        return json.dumps(
            {
                **asdict(self.origin),
                "race": self.race,
                "warmup": self.warmup,
                "drain": self.drain,
                "differences": self.differences(),
                "contenders": [self._contender_json(contender) for contender in self.contenders],
            }
        )

    def _contender_json(self, contender: Contender) -> dict[str, object]:
        figures = self.figures(contender)
        return {
            **asdict(contender.setting),
            "error": contender.error,
            "start": asdict(contender.start_info) if contender.start_info else None,
            "finish": asdict(contender.finish_info) if contender.finish_info else None,
            "figures": asdict(figures) if figures else None,
            "samples": [asdict(sample) for sample in contender.samples],
        }

    def caption(self) -> str:
        """What was run, in a line or two."""
        found = [f.others_cores for c in self.contenders if (f := self.figures(c)) is not None]
        start = next((c.start_info for c in self.contenders if c.start_info), None)
        size = f"{format_count(start.num_parameters)} parameters, " if start else ""
        race = self.race
        rounds = max((len(self.measured(c)) for c in self.contenders), default=0)
        turns = "updates drained in each step's time" if self.drain else "stopped between turns"
        others = f"; others used {statistics.median(found):.2f} cores" if found else ""
        return (
            f"{size}{race['layers']} layers x {race['hidden']}, batch {race['batch']} x {race['seq']}, fp32, AdamW; "
            f"{rounds} rounds after {self.warmup} of warm-up, {turns}{others}"
        )

    def verdict(self) -> str:
        """What can be said of exactness when nothing differs, in a line."""
        compared = [len(c.samples) for c in self.contenders if c.samples]
        if not self.plain.samples or len(compared) < 2:
            return "no two contenders took a step: nothing to compare"
        return f"losses of {min(compared)} steps and final weights of {len(compared)} contenders: equal, bit for bit"

    def rows(self) -> list[list[str]]:
        return [self._row(contender) for contender in self.contenders]

    def _row(self, contender: Contender) -> list[str]:
        setting, figures, finish, start = (
            contender.setting,
            self.figures(contender),
            contender.finish_info,
            contender.start_info,
        )
        row = [setting.name, format_bytes(setting.memory) if setting.memory is not None else _NONE]
        if figures is None:
            row += [_NONE] * 10
        else:
            row += [
                f"{figures.seconds:.2f}",
                *_wall_cells(figures.wall, figures.quiet),
                f"{figures.cpu.median:.3f}" if figures.cpu else _NONE,
                f"{figures.wait_fraction:.1%}",
                f"{figures.read_bytes / 1e9:.2f}",
                f"{figures.written_bytes / 1e9:.2f}",
            ]
        row.append(format_bytes(finish.peak_rss) if finish else _NONE)
        row.append(format_bytes(finish.memory_peak) if finish and not setting.is_plain else _NONE)
        row.append(format_seconds(start.build_seconds + start.prepare_seconds) if start else _NONE)
        return row

    def errors(self) -> list[str]:
        return [
            f"{c.setting.name}: {c.error} (after {len(c.samples)} steps)"
            for c in self.contenders
            if c.error is not None
        ]

    def print(self, console: Console) -> None:
        """A table on a terminal, aligned lines elsewhere."""
        if not console.is_terminal:
            print(f"{self.caption()}\n{aligned([list(HEADINGS), *self.rows()])}", flush=True)
        else:
            table = Table(title=self.caption(), title_justify="left")
            for number, heading in enumerate(HEADINGS):
                table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
            for row in self.rows():
                table.add_row(*row)
            console.print(table)
        for line in self.errors():
            console.print(f"failed: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        for line in self.differences():
            console.print(f"not equal: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        if not self.differences():
            console.print(self.verdict(), markup=False, highlight=False, soft_wrap=True)

    def to_markdown(self) -> str:
        lines = [
            f"`{self.origin.command}`",
            f"{self.caption()}. {self.origin.in_words()}.",
            markdown_table(HEADINGS, self.rows()),
            "\n".join(self.differences()) or self.verdict() + ".",
        ]
        return "\n\n".join(lines + [f"Failed: {line}" for line in self.errors()]) + "\n"


def _quiet(samples: Sequence[Sample], plain: Sequence[Sample]) -> Quiet | None:
    ours, theirs = (
        [s.seconds for s in some if s.others_cpu_seconds <= QUIET_CORES * s.seconds] for some in (samples, plain)
    )
    if not ours or not theirs:
        return None
    seconds = statistics.median(ours)
    return Quiet(seconds, seconds / statistics.median(theirs), len(ours))


def _wall_cells(wall: Ratios | None, quiet: Quiet | None) -> list[str]:
    calm = f"{quiet.ratio:.3f} ({quiet.num_steps})" if quiet is not None else _NONE
    if wall is None:
        return [_NONE, _NONE, _NONE, calm, _NONE]
    return [f"{wall.median:.3f}", f"{wall.p10:.2f}-{wall.p90:.2f}", f"{wall.minimum:.3f}", calm, f"{wall.best:.3f}"]


def _bits(value: float) -> bytes:
    """So that NaN equals NaN, and 0.0 is not -0.0."""
    return struct.pack("<d", value)
