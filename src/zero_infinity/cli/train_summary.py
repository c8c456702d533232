"""The summary of `train`: states relative to memory, time, exposed wait, bytes moved and drive wear."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from zero_infinity.byte_sizes import format_bytes, format_count, format_rate, format_seconds
from zero_infinity.engine_stats import Stats

# Warranted lifetime writes of a 1 TB consumer drive (JEDEC's TBW).
ENDURANCE_BYTES = 600 * 10**12
RECENT_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Per-step figures cover the training steps; totals include loading the model."""

    state_bytes: int
    memory_budget: int
    memory_peak: int
    process_peak: int  # resident set: the engine's memory, activations, Python and torch
    wait_seconds: float
    read_bytes_per_step: float
    write_bytes_per_step: float
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures(_Figures):
    """Figures of one rank."""

    rank: int
    # Stored by this rank, and reserved for collectives and copies.
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    bucket_bytes: int
    copy_bytes: int
    # To other ranks, by kind of collective.
    sent_bytes_per_step: dict[str, float]
    exchanges_per_step: dict[str, float]
    sent_bytes: dict[str, int]
    exchanges: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(_Figures):
    """One run.

    With several ranks: states, budget and `memory_peak` are those of the first rank, drive bytes are summed, the wait
    is the mean and `process_peak` the maximum. `by_rank` has the figures of each.
    """

    steps: int
    parameters: int
    first_loss: float | None
    last_loss: float | None
    recent_loss: float | None  # mean of the last `RECENT_STEPS`: the loss varies between batches
    tokens_per_second: float
    seconds: float
    interrupted_by: str | None
    stage: int = 3
    last_step: int = 0  # including steps before a resume
    by_rank: tuple[RankFigures, ...] = ()

    @property
    def ranks(self) -> int:
        return max(len(self.by_rank), 1)

    @property
    def state_ratio(self) -> float:
        return self.state_bytes / self.memory_budget

    @property
    def step_seconds(self) -> float:
        return self.seconds / max(self.steps, 1)

    @property
    def wait_fraction(self) -> float:
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def wear(self) -> float:
        """Fraction of `ENDURANCE_BYTES` that this run wrote."""
        return self.write_bytes / ENDURANCE_BYTES

    @property
    def steps_of_endurance(self) -> int | None:
        """Number of such steps that write `ENDURANCE_BYTES`; None if nothing is written."""
        return int(ENDURANCE_BYTES / self.write_bytes_per_step) if self.write_bytes_per_step else None

    def print_json(self) -> None:
        names = ("ranks", "state_ratio", "step_seconds", "wait_fraction", "wear", "steps_of_endurance")
        derived = {"endurance_bytes": ENDURANCE_BYTES, **{name: getattr(self, name) for name in names}}
        print(json.dumps({"event": "summary", **asdict(self), **derived}), flush=True)

    def print(self, console: Console) -> None:
        """A table on a terminal, aligned lines elsewhere."""
        rows = self._rows()
        if not console.is_terminal:
            width = max(len(name) for name, _ in rows)
            print("\n".join(f"{name:<{width}}  {value}" for name, value in rows), flush=True)
            return
        table = Table(show_header=False, title="zero-infinity train", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("parameters", f"{format_count(self.parameters)} ({self.parameters:,})"),
            ("loss", self._loss_row()),
            ("states", f"{format_bytes(self.state_bytes)}{self._where}: {self.state_ratio:.1f} x the memory budget"),
            ("memory held", f"{self._memory_row()}, of {format_bytes(self.memory_budget)}"),
            ("process", f"{format_bytes(self.process_peak)} resident at most (with torch, activations and start-up)"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s, {format_seconds(self.step_seconds)} per step"),
            ("time", f"{format_seconds(self.seconds)} for {self.steps} steps"),
            ("exposed wait", f"{format_seconds(self.wait_seconds)}, {self.wait_fraction:.1%} of the time"),
        ]
        if self.read_bytes or self.write_bytes:
            rows += self._drive_rows()
        else:
            rows.append(("NVMe", "nothing moved"))
        if self.ranks > 1:
            rows += self._rank_rows()
        return rows

    @property
    def _where(self) -> str:
        return " on this rank" if self.ranks > 1 else ""

    def _memory_row(self) -> str:
        held = f"{format_bytes(self.memory_peak)} at most"
        if self.ranks == 1:
            return held
        return f"{held} on this rank, {format_bytes(max(f.memory_peak for f in self.by_rank))} on the fullest"

    def _rank_rows(self) -> list[tuple[str, str]]:
        names = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
        names |= {"buckets": "bucket", "copies": "copy"}
        kinds = {kind: [getattr(f, f"{name}_bytes") for f in self.by_rank] for kind, name in names.items()}
        rows = [
            ("ranks", f"{self.ranks}, stage {self.stage}"),
            ("on each rank", ", ".join(f"{kind} {_range(sizes)}" for kind, sizes in kinds.items() if any(sizes))),
        ]
        for kind in dict.fromkeys(kind for figures in self.by_rank for kind in figures.sent_bytes_per_step):
            sent = [int(figures.sent_bytes_per_step.get(kind, 0)) for figures in self.by_rank]
            calls = max(figures.exchanges_per_step.get(kind, 0) for figures in self.by_rank)
            rows.append((f"{kind} per step", f"{_range(sent)} sent by each rank, in {calls:.0f} collectives"))
        return rows

    def _loss_row(self) -> str:
        if self.first_loss is None or self.recent_loss is None:
            return "no steps"
        recent = min(self.steps, RECENT_STEPS)
        return f"{self.first_loss:.4f} at first, {self.recent_loss:.4f} on average of the last {recent} steps"

    def _drive_rows(self) -> list[tuple[str, str]]:
        read, written = self.read_bytes_per_step, self.write_bytes_per_step
        rates = f"{format_rate(read / self.step_seconds)} and {format_rate(written / self.step_seconds)}"
        wear = f"{format_bytes(self.write_bytes)} written, {self.wear:.2g} of a drive's {ENDURANCE_BYTES // 10**12} TBW"
        if self.steps_of_endurance is not None:
            wear += f"; {format_count(self.steps_of_endurance)} steps use it up"
        return [
            ("NVMe per step", f"{format_bytes(int(read))} read, {format_bytes(int(written))} written ({rates})"),
            ("wear", wear),
        ]


def figures_of(rank: int, before: Stats, after: Stats, *, steps: int, process_peak: int) -> RankFigures:
    """Figures of a rank from its statistics before the first step and after the last."""
    num_steps = max(steps, 1)
    same = ("state_bytes", "memory_budget", "memory_peak", "sent_bytes")
    stored = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "bucket_bytes", "copy_bytes")
    return RankFigures(
        rank=rank,
        process_peak=process_peak,
        wait_seconds=after.waited_seconds - before.waited_seconds,
        read_bytes_per_step=(after.bytes_read - before.bytes_read) / num_steps,
        write_bytes_per_step=(after.bytes_written - before.bytes_written) / num_steps,
        read_bytes=after.bytes_read,
        write_bytes=after.bytes_written,
        sent_bytes_per_step=_per_step(before.sent_bytes, after.sent_bytes, num_steps),
        exchanges_per_step=_per_step(before.num_exchanges, after.num_exchanges, num_steps),
        exchanges=after.num_exchanges,
        **{name: getattr(after, name) for name in (*same, *stored)},
    )


def summarize(
    by_rank: Sequence[RankFigures],
    *,
    parameters: int,
    losses: tuple[float, ...],
    first_step: int,
    tokens: int,
    seconds: float,
    stage: int,
    interrupted_by: str | None,
) -> Summary:
    """Combine the figures of all ranks."""
    steps = len(losses)
    summed = ("read_bytes_per_step", "write_bytes_per_step", "read_bytes", "write_bytes")
    return Summary(
        steps=steps,
        parameters=parameters,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        recent_loss=fmean(losses[-RECENT_STEPS:]) if losses else None,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        seconds=seconds,
        **{name: getattr(by_rank[0], name) for name in ("state_bytes", "memory_budget", "memory_peak")},
        process_peak=max(figures.process_peak for figures in by_rank),
        wait_seconds=fmean(figures.wait_seconds for figures in by_rank),
        **{name: sum(getattr(figures, name) for figures in by_rank) for name in summed},
        interrupted_by=interrupted_by,
        stage=stage,
        last_step=first_step + steps,
        by_rank=tuple(by_rank),
    )


def _per_step(before: dict[str, int], after: dict[str, int], steps: int) -> dict[str, float]:
    """The increase per step by kind, without kinds that did not change."""
    added = {kind: number - before.get(kind, 0) for kind, number in after.items()}
    return {kind: number / steps for kind, number in added.items() if number}


def _range(sizes: Sequence[int]) -> str:
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"
