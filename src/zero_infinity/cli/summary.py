"""What `train` says when it is done: states against memory held, time, exposed wait, bytes moved and wear."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from zero_infinity.runtime.stats import Stats
from zero_infinity.units import format_bytes, format_count, format_rate, format_seconds

# What a 1 TB consumer drive is warranted for: bytes written in its life (JEDEC's TBW).
ENDURANCE_BYTES = 600 * 10**12
RECENT_STEPS = 10


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times and per-step figures are of the training steps; totals include moving the model in."""

    steps: int
    parameters: int
    first_loss: float | None
    last_loss: float | None
    recent_loss: float | None  # the mean of the last `RECENT_STEPS`: batches differ, and one step's loss with them
    tokens_per_second: float
    seconds: float
    state_bytes: int
    memory_budget: int
    memory_peak: int
    process_peak: int  # resident set: the engine's memory, activations, Python and torch
    wait_seconds: float
    read_bytes_per_step: float
    write_bytes_per_step: float
    read_bytes: int
    write_bytes: int
    interrupted_by: str | None

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
        """The part of `ENDURANCE_BYTES` that this run wrote."""
        return self.write_bytes / ENDURANCE_BYTES

    @property
    def steps_of_endurance(self) -> int | None:
        """Steps like these that write `ENDURANCE_BYTES`; None where nothing is written."""
        return int(ENDURANCE_BYTES / self.write_bytes_per_step) if self.write_bytes_per_step else None

    def print_json(self) -> None:
        derived = {
            "state_ratio": self.state_ratio,
            "step_seconds": self.step_seconds,
            "wait_fraction": self.wait_fraction,
            "endurance_bytes": ENDURANCE_BYTES,
            "wear": self.wear,
            "steps_of_endurance": self.steps_of_endurance,
        }
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
            ("states", f"{format_bytes(self.state_bytes)}: {self.state_ratio:.1f} x the memory budget"),
            ("memory held", f"{format_bytes(self.memory_peak)} at most, of {format_bytes(self.memory_budget)}"),
            ("process", f"{format_bytes(self.process_peak)} resident at most (with torch, activations and the start)"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s, {format_seconds(self.step_seconds)} a step"),
            ("time", f"{format_seconds(self.seconds)} for {self.steps} steps"),
            ("exposed wait", f"{format_seconds(self.wait_seconds)}, {self.wait_fraction:.1%} of the time"),
        ]
        if self.read_bytes or self.write_bytes:
            rows += self._drive_rows()
        else:
            rows.append(("NVMe", "nothing moved"))
        return rows

    def _loss_row(self) -> str:
        if self.first_loss is None or self.recent_loss is None:
            return "no step was done"
        recent = min(self.steps, RECENT_STEPS)
        return f"{self.first_loss:.4f} at first, {self.recent_loss:.4f} on average of the last {recent} steps"

    def _drive_rows(self) -> list[tuple[str, str]]:
        read, written = self.read_bytes_per_step, self.write_bytes_per_step
        rates = f"{format_rate(read / self.step_seconds)} and {format_rate(written / self.step_seconds)}"
        wear = f"{format_bytes(self.write_bytes)} written, {self.wear:.2g} of a drive's {ENDURANCE_BYTES // 10**12} TBW"
        if self.steps_of_endurance is not None:
            wear += f"; {format_count(self.steps_of_endurance)} steps use it up"
        return [
            ("NVMe a step", f"{format_bytes(int(read))} read, {format_bytes(int(written))} written ({rates})"),
            ("wear", wear),
        ]


def summarize(
    before: Stats,
    after: Stats,
    *,
    losses: tuple[float, ...],
    tokens: int,
    seconds: float,
    process_peak: int,
    interrupted_by: str | None,
) -> Summary:
    """From the engine's figures before the first step and after the last."""
    steps = len(losses)
    return Summary(
        steps=steps,
        parameters=after.num_parameters,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        recent_loss=fmean(losses[-RECENT_STEPS:]) if losses else None,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        seconds=seconds,
        state_bytes=after.state_bytes,
        memory_budget=after.memory_budget,
        memory_peak=after.memory_peak,
        process_peak=process_peak,
        wait_seconds=after.waited_seconds - before.waited_seconds,
        read_bytes_per_step=(after.bytes_read - before.bytes_read) / max(steps, 1),
        write_bytes_per_step=(after.bytes_written - before.bytes_written) / max(steps, 1),
        read_bytes=after.bytes_read,
        write_bytes=after.bytes_written,
        interrupted_by=interrupted_by,
    )
