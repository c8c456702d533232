"""The results of the benchmark `peers`: statistics of the samples, tables and JSON."""

from __future__ import annotations

import difflib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import Provenance
from benchmarks.ratios import Ratios, ratios
from benchmarks.tables import aligned
from benchmarks.turns.contender import Contender
from benchmarks.turns.messages import Race
from zero_infinity.byte_sizes import format_bytes, format_count, format_seconds

HEADINGS = (
    *("", "s/step", "ratio", "p10-p90", "best/best", "CPU s", "peak RSS", "GB read", "written", "start"),
    *("lines", "losses"),
)
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Building:
    """What it took to compile a peer's extensions, before the first start."""

    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender: who it is and what it did."""

    key: str
    script: str
    is_ours: bool
    contender: Contender


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Of one contender, over the measured rounds of its heat."""

    seconds: float  # median of a step
    wall: Ratios
    cpu_seconds: float  # a step, of the tree of processes
    read_bytes: float  # a step
    written_bytes: float
    peak_rss: int
    start_seconds: float
    loss_difference: float  # the largest of a step, relative to plain PyTorch's loss


@dataclass(frozen=True, slots=True)
class Contest:
    """Everybody who trains one model with one batch size. In each heat the first is plain PyTorch."""

    race: Race
    warmup: int
    heats: Sequence[Sequence[Entry]]

    def figures(self, entry: Entry, plain: Entry) -> PeerFigures | None:
        """None when it or plain PyTorch took no measured step."""
        contender = entry.contender
        ours, theirs = contender.samples[self.warmup :], plain.contender.samples[self.warmup :]
        wall = ratios([s.seconds for s in ours], [s.seconds for s in theirs]) if ours and theirs else None
        if wall is None:
            return None
        first, last = contender.usages[self.warmup], contender.usages[len(contender.samples)]
        pairs = list(zip(contender.samples, plain.contender.samples, strict=False))
        return PeerFigures(
            seconds=statistics.median(s.seconds for s in ours),
            wall=wall,
            cpu_seconds=(last.cpu_seconds - first.cpu_seconds) / len(ours),
            read_bytes=(last.read_bytes - first.read_bytes) / len(ours),
            written_bytes=(last.written_bytes - first.written_bytes) / len(ours),
            peak_rss=max(usage.peak_rss for usage in contender.usages),
            start_seconds=contender.start_seconds or 0.0,
            loss_difference=max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs),
        )

    def entries(self) -> list[tuple[Entry, PeerFigures | None]]:
        """Plain PyTorch once, then everybody."""
        return [
            (entry, self.figures(entry, heat[0]))
            for number, heat in enumerate(self.heats)
            for entry in (heat if number == 0 else heat[1:])
        ]

    def our_faults(self) -> list[str]:
        """What must not be: an error or another loss of plain PyTorch or this library."""
        found = []
        for heat in self.heats:
            for entry in heat:
                figures = self.figures(entry, heat[0])
                if not (entry.is_ours or entry.script == "plain"):
                    continue
                if entry.contender.error is not None:
                    found.append(f"{entry.contender.setting.name}: {entry.contender.error}")
                elif figures is not None and figures.loss_difference != 0:
                    found.append(f"{entry.contender.setting.name}: its losses are not plain PyTorch's")
        return found

    def errors(self) -> list[str]:
        return [
            f"{entry.contender.setting.name}: failed after step {len(entry.contender.samples)}: {entry.contender.error}"
            for heat in self.heats
            for entry in heat
            if entry.contender.error is not None
        ]

    # ------------------------------------------------------------------ forms

    def to_json(self) -> dict[str, object]:
        return {
            "race": asdict(self.race),
            "num_parameters": self._num_parameters(),
            "heats": [[self._entry_json(entry, heat[0]) for entry in heat] for heat in self.heats],
        }

    def _entry_json(self, entry: Entry, plain: Entry) -> dict[str, object]:
        figures = self.figures(entry, plain)
        return {
            "key": entry.key,
            **asdict(entry.contender.setting),
            "nvme": entry.contender.setting.nvme is not None,
            "error": entry.contender.error,
            "changed_lines": changed_lines(entry.script),
            "num_steps": len(entry.contender.samples),
            "figures": asdict(figures) if figures else None,
            "seconds": [round(sample.seconds, 4) for sample in entry.contender.samples],
            "losses": [sample.loss for sample in entry.contender.samples],
        }

    def caption(self) -> str:
        race = self.race
        size = f"{format_count(count)} parameters, " if (count := self._num_parameters()) else ""
        rounds = race.num_steps - self.warmup
        return (
            f"{size}{race.layers} layers x {race.hidden}, batch {race.batch} x {race.seq}, fp32, AdamW; "
            f"{rounds} rounds after {self.warmup} of warm-up, {len(self.heats)} heats"
        )

    def _num_parameters(self) -> int | None:
        starts = (entry.contender.start_info for heat in self.heats for entry in heat)
        return next((start.num_parameters for start in starts if start is not None), None)

    def print(self, console: Console) -> None:
        rows = [_row(entry, figures) for entry, figures in self.entries()]
        if console.is_terminal:
            table = Table(title=self.caption(), title_justify="left")
            for number, heading in enumerate(HEADINGS):
                table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        else:
            print(f"{self.caption()}\n{aligned([list(HEADINGS), *rows])}", flush=True)
        for line in (*self.errors(), *(f"not as it must be: {fault}" for fault in self.our_faults())):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class PeersReport:
    """Everything about one run."""

    origin: Provenance
    building: Building | None
    contests: Sequence[Contest]

    def to_json(self) -> str:
        content = {
            **asdict(self.origin),
            "building": asdict(self.building) if self.building else None,
            "contests": [contest.to_json() for contest in self.contests],
        }
        return json.dumps(content, indent=1)

    def print(self, console: Console) -> None:
        for contest in self.contests:
            contest.print(console)
        if self.building is not None:
            took = f"took {format_seconds(self.building.seconds)}"
            told = took if self.building.error is None else f"failed: {self.building.error}"
            line = f"compiling DeepSpeed's extensions, before its first start, {told}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _row(entry: Entry, figures: PeerFigures | None) -> list[str]:
    name, lines = entry.contender.setting.name, str(changed_lines(entry.script))
    if figures is None:
        return [name, *[_NONE] * 9, lines, _NONE]
    wall = figures.wall
    return [
        name,
        f"{figures.seconds:.2f}",
        f"{wall.median:.2f}",
        f"{wall.p10:.2f}-{wall.p90:.2f}",
        f"{wall.best:.2f}",
        f"{figures.cpu_seconds:.1f}",
        format_bytes(figures.peak_rss),
        f"{figures.read_bytes / 1e9:.2f}",
        f"{figures.written_bytes / 1e9:.2f}",
        format_seconds(figures.start_seconds),
        lines,
        "equal" if figures.loss_difference == 0 else f"within {figures.loss_difference:.0e}",
    ]


def changed_lines(script: str) -> int:
    """How many lines of the plain script are others, or more, in this one; its first line says what it is."""
    plain, other = (_code(name) for name in ("plain", script))
    codes = difflib.SequenceMatcher(None, plain, other, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in codes if tag != "equal")


def _code(script: str) -> list[str]:
    text = files("benchmarks.peers.scripts").joinpath(f"{script}.py").read_text(encoding="utf-8")
    return [line for line in text.splitlines()[1:] if line.strip()]
