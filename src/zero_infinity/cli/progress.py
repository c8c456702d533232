"""What `train` shows while it runs: a changing display on a terminal, plain lines elsewhere, or JSON lines.

Owns the look of a step. It does not know how its numbers come about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from zero_infinity.cli.transfer_progress import Shown
from zero_infinity.units import format_bytes, format_seconds

# Between two looks at how far a save or a load has come: on a terminal, and as lines.
_REFRESH_SECONDS = 0.1
_LINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it is shown; rates are since the step before, and of all ranks together."""

    step: int
    steps: int
    loss: float
    seconds: float
    tokens_per_second: float
    memory_held: int
    memory_budget: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    wait_fraction: float  # of the time: the training thread stood still for a block or the update
    seconds_left: float
    ranks: int = 1
    memory_held_most: int = 0  # by the rank that holds most; `memory_held` is of this one

    @property
    def transfer(self) -> str:
        return f"{self.read_bytes_per_second / 1e9:.2f} / {self.write_bytes_per_second / 1e9:.2f} GB/s"

    @property
    def memory(self) -> str:
        most = f", the most {format_bytes(self.memory_held_most)}," if self.ranks > 1 else ""
        return f"{format_bytes(self.memory_held)}{most} of {format_bytes(self.memory_budget)}"

    @property
    def left(self) -> str:
        return format_seconds(round(self.seconds_left)) if self.seconds_left >= 1 else "0 s"

    @property
    def line(self) -> str:
        return (
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}  loss {self.loss:7.4f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  memory {self.memory}  NVMe {self.transfer}  "
            f"wait {self.wait_fraction:.0%}  left {self.left}"
        )


class Progress(Protocol):
    """Shows steps."""

    def say(self, text: str) -> None:
        """A line about what happens outside of steps."""

    def show(self, step: Step) -> None:
        """A step is done. Inside `live()` only."""

    def live(self) -> AbstractContextManager[object]:
        """Take the screen while steps are shown."""

    def transfer(self, act: str) -> AbstractContextManager[Shown | None]:
        """What to call while checkpoints are written or read, if that is shown."""


class JsonProgress:
    """One JSON object a line for each step, and nothing else."""

    def say(self, text: str) -> None:
        pass

    def live(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, step: Step) -> None:
        print(json.dumps({"event": "step", **asdict(step)}), flush=True)

    def transfer(self, act: str) -> AbstractContextManager[Shown | None]:  # noqa: ARG002
        return nullcontext()


class NoProgress:
    """Of several ranks the first shows what all do; the others show nothing."""

    def say(self, text: str) -> None:
        pass

    def live(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, step: Step) -> None:
        pass

    def transfer(self, act: str) -> AbstractContextManager[Shown | None]:  # noqa: ARG002
        return nullcontext()


class PlainProgress:
    """A line every `every` steps, and for the first and the last."""

    def __init__(self, every: int) -> None:
        self._every = every

    def say(self, text: str) -> None:
        print(text, flush=True)

    def live(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, step: Step) -> None:
        if _is_logged(step, self._every):
            self.say(step.line)

    def transfer(self, act: str) -> AbstractContextManager[Shown | None]:
        return nullcontext(Shown(act, _LINE_SECONDS, lambda transfer: self.say(transfer.line)))


class TerminalProgress:
    """A bar with the last step's numbers under it, and above it a line with the loss every `every` steps."""

    def __init__(self, console: Console, every: int) -> None:
        self._console = console
        self._every = every
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def show(self, step: Step) -> None:
        if _is_logged(step, self._every):
            self.say(f"step {step.step:>{len(str(step.steps))}}/{step.steps}  loss {step.loss:7.4f}")
        self._live.update(_display(step), refresh=True)

    def live(self) -> AbstractContextManager[object]:
        return self._live

    @contextmanager
    def transfer(self, act: str) -> Iterator[Shown | None]:
        own = Live(console=self._console, auto_refresh=False, transient=True)
        with nullcontext(self._live) if self._live.is_started else own as live:
            yield Shown(act, _REFRESH_SECONDS, lambda transfer: live.update(transfer.display, refresh=True))


def _display(step: Step) -> Group:
    cells: list[tuple[str, str]] = [
        ("loss", f"{step.loss:.4f}"),
        ("tokens/s", f"{step.tokens_per_second:,.0f}"),
        ("memory", step.memory),
        ("NVMe read / write", step.transfer),
        ("wait", f"{step.wait_fraction:.0%}"),
        ("left", step.left),
    ]
    table = Table(*(name for name, _ in cells), box=None, pad_edge=False, header_style="dim")
    table.add_row(*(value for _, value in cells))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(f"step {step.step}/{step.steps}", ProgressBar(total=step.steps, completed=step.step, width=50))
    return Group(bar, table)


def _is_logged(step: Step, every: int) -> bool:
    return step.step in (1, step.steps) or step.step % every == 0


def choose(*, as_json: bool, every: int, make_console: Callable[[], Console] = Console) -> Progress:
    """The one that fits where the output goes."""
    if as_json:
        return JsonProgress()
    console = make_console()
    return TerminalProgress(console, every) if console.is_terminal else PlainProgress(every)
