"""How a save, a load or an export is shown while it runs: how far it is, how fast, what it holds, and what is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table

from zero_infinity.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class TransferDisplay:
    """So many bytes of so many; the last `timed` of them took so many seconds."""

    act: str  # "saving"
    done: int
    total: int
    timed: int
    seconds: float
    process_bytes: int  # in memory

    @property
    def cells(self) -> dict[str, str]:
        rate = self.timed / self.seconds if self.seconds else 0.0
        left = (self.total - self.done) / rate if rate else 0.0
        return {
            "done": f"{format_bytes(self.done)} of {format_bytes(self.total)}",
            "rate": f"{rate / 1e6:,.0f} MB/s",
            "process memory": format_bytes(self.process_bytes),
            "left": format_seconds(round(left)) if left >= 1 else "0 s",
        }

    @property
    def line(self) -> str:
        cells = self.cells
        return (
            f"{self.act}: {cells['done']}  {cells['rate']}  process memory {cells['process memory']}  "
            f"left {cells['left']}"
        )

    @property
    def display(self) -> Group:
        table = Table(*self.cells, box=None, pad_edge=False, header_style="dim")
        table.add_row(*self.cells.values())
        bar = Table.grid(padding=(0, 1))
        bar.add_row(self.act, ProgressBar(total=max(1, self.total), completed=self.done, width=50))
        return Group(bar, table)


class Shown:
    """Called after every piece; shows one of them every `seconds`."""

    def __init__(self, act: str, seconds: float, show: Callable[[TransferDisplay], None]) -> None:
        self._act = act
        self._seconds = seconds
        self._show = show
        self._last = time.perf_counter()
        self._first: tuple[int, float] | None = None  # what had moved, and when, at the first call

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        # What comes before the first byte (names, headers, the import of transformers) says nothing about the rate.
        before, start = self._first = self._first or (done, now)
        if now - self._last >= self._seconds:
            self._last = now
            self._show(TransferDisplay(self._act, done, total, done - before, now - start, _process_bytes()))


def _process_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
