"""Progress of `train`, `export` and `bench`: bars on a terminal, plain lines elsewhere, JSON lines with --json.

Owns the look of a step, of a transfer (saving, loading, exporting) and of a measurement. It does not know how a step is
measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass

from rich import progress as rich_progress
from rich.console import Console

from zero_infinity.byte_sizes import format_bytes, format_rate, format_seconds

# Between two updates of a transfer: on a terminal, and as lines.
_REFRESH_SECONDS = 0.1
_LINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. Rates are per second of this step, summed over all ranks."""

    step: int
    steps: int
    loss: float
    seconds: float
    tokens_per_second: float
    memory_held: int
    memory_budget: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    wait_fraction: float  # of the step: the compute thread waited for a block or for the update
    seconds_left: float
    ranks: int = 1
    memory_held_most: int = 0  # on the rank that holds most; `memory_held` is this rank's

    @property
    def loss_line(self) -> str:
        return f"step {self.step:>{len(str(self.steps))}}/{self.steps}  loss {self.loss:7.4f}"

    @property
    def figures(self) -> tuple[str, ...]:
        most = f", the most {format_bytes(self.memory_held_most)}," if self.ranks > 1 else ""
        return (
            f"{self.tokens_per_second:,.0f} tokens/s",
            f"memory {format_bytes(self.memory_held)}{most} of {format_bytes(self.memory_budget)}",
            f"NVMe {format_rate(self.read_bytes_per_second)} / {format_rate(self.write_bytes_per_second)}",
            f"wait {self.wait_fraction:.0%}  left {_format_left(self.seconds_left)}",
        )

    def is_logged(self, every: int) -> bool:
        return self.step in (1, self.steps) or self.step % every == 0


class Transfer:
    """The callback of a save, load or export: takes bytes done and total, and shows them every `seconds`.

    rich measures the rate from the first call on: what comes before the first byte (reading headers, importing
    transformers) does not count.
    """

    def __init__(
        self, bars: rich_progress.Progress, act: str, seconds: float, show: Callable[[rich_progress.Task], None]
    ) -> None:
        self._bars = bars
        self._seconds = seconds
        self._show = show
        self._last = bars.get_time()
        self.task_id = bars.add_task(act, total=None, figures="")

    def __call__(self, done: int, total: int) -> None:
        self._bars.update(self.task_id, completed=done, total=total)
        now = self._bars.get_time()
        if now - self._last >= self._seconds:
            self._last = now
            self._show(next(task for task in self._bars.tasks if task.id == self.task_id))


class Progress:
    """Shows nothing: used by all ranks but the first, and the base of the other kinds."""

    def say(self, text: str) -> None:
        """Print a line about something other than a step."""

    def show(self, step: Step) -> None:
        """Show a finished step; only inside `live()`."""

    def live(self) -> AbstractContextManager[object]:
        """The context in which steps are shown."""
        return nullcontext()

    def transfer(self, act: str) -> AbstractContextManager[Transfer | None]:  # noqa: ARG002
        """The callback for a save, load or export; None if it is not shown."""
        return nullcontext()


class JsonProgress(Progress):
    """One JSON object per line and step, and nothing else."""

    def show(self, step: Step) -> None:
        print(json.dumps({"event": "step", **asdict(step)}), flush=True)


class PlainProgress(Progress):
    """A line every `every` steps, and for the first and the last."""

    def __init__(self, every: int, get_time: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._get_time = get_time

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, step: Step) -> None:
        if step.is_logged(self._every):
            self.say("  ".join((step.loss_line, *step.figures)))

    def transfer(self, act: str) -> AbstractContextManager[Transfer | None]:
        bars = rich_progress.Progress(disable=True, get_time=self._get_time)  # measures the rate, draws nothing
        return nullcontext(
            Transfer(bars, act, _LINE_SECONDS, lambda task: self.say(f"{act}: {'  '.join(_transfer_figures(task))}"))
        )


class TerminalProgress(Progress):
    """A bar with the last step's figures, and above it a line with the loss every `every` steps."""

    def __init__(self, console: Console, every: int) -> None:
        self._console = console
        self._every = every
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=30),
            rich_progress.TextColumn("{task.fields[figures]}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._steps = self._bars.add_task("", figures="", visible=False)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def show(self, step: Step) -> None:
        if step.is_logged(self._every):
            self.say(step.loss_line)
        self._bars.update(
            self._steps,
            description=f"step {step.step}/{step.steps}\nloss {step.loss:.4f}",
            completed=step.step,
            total=step.steps,
            figures="\n".join(step.figures),
            visible=True,
            refresh=True,
        )

    def live(self) -> AbstractContextManager[object]:
        return self._bars

    @contextmanager
    def transfer(self, act: str) -> Iterator[Transfer | None]:
        def show(task: rich_progress.Task) -> None:
            self._bars.update(task.id, figures="\n".join(_transfer_figures(task)), refresh=True)

        with nullcontext() if self._bars.live.is_started else self._bars:
            transfer = Transfer(self._bars, act, _REFRESH_SECONDS, show)
            try:
                yield transfer
            finally:
                self._bars.remove_task(transfer.task_id)


def choose(*, as_json: bool, every: int, make_console: Callable[[], Console] = Console) -> Progress:
    """The kind that suits the output."""
    if as_json:
        return JsonProgress()
    console = make_console()
    return TerminalProgress(console, every) if console.is_terminal else PlainProgress(every)


def _transfer_figures(task: rich_progress.Task) -> tuple[str, str]:
    return (
        f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}  "
        f"{(task.speed or 0) / 1e6:,.0f} MB/s",
        f"process memory {format_bytes(_process_bytes())}  left {_format_left(task.time_remaining or 0)}",
    )


def _format_left(seconds: float) -> str:
    return format_seconds(round(seconds)) if seconds >= 1 else "0 s"


def _process_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def status_lines() -> Iterator[Callable[[str], None]]:
    """Shows the current measurement on stderr: a status line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update
