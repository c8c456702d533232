"""What `zero-infinity paper` shows: a paper's table or figure, our number for each cell beside the printed one.

Data and arithmetic only: how it is printed, written and drawn is elsewhere. In long form, one row a cell, so that every
exhibit is shown by the same code.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal


class PlotKind(enum.StrEnum):
    LINES = "lines"
    BARS = "bars"


@dataclass(frozen=True, slots=True)
class Plot:
    """How the cells are drawn: one series for each value of the first key, over the cells' x."""

    kind: PlotKind
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One number. `printed` is the paper's, as it stands there; `ours` is None where our model says: does not fit."""

    keys: tuple[str, ...]
    ours: float | None
    printed: str | None = None
    note: str = ""
    x: float | None = None  # where it is drawn; None: not at all

    @property
    def published(self) -> float | None:
        return float(self.printed) if self.printed is not None else None

    @property
    def deviation(self) -> float | None:
        """Ours against the paper's: +0.1 is 10% more."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published - 1

    @property
    def agrees(self) -> bool | None:
        """Whether ours is the printed number when it is written with as many digits, rounded or cut off."""
        if self.ours is None or self.printed is None:
            return None
        return Decimal(self.printed) in (self._written(ROUND_HALF_UP), self._written(ROUND_FLOOR))

    @property
    def cut_off(self) -> bool:
        """Whether the printed number was cut off where rounding gives another."""
        return bool(self.agrees) and Decimal(self.printed or "0") != self._written(ROUND_HALF_UP)

    def _written(self, rounding: str) -> Decimal:
        digit = Decimal(1).scaleb(Decimal(self.printed or "0").as_tuple().exponent)  # type: ignore[arg-type]
        # Twelve digits: beyond them a float's own error would decide between 41.2 and 41.3.
        return Decimal(f"{self.ours:.12g}").quantize(digit, rounding=rounding)


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A table or a figure."""

    name: str
    title: str
    source: str
    key_names: tuple[str, ...]
    unit: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    plot: Plot | None = None
    measured: bool = False  # the published numbers are measurements, which no equation gives to the digit

    @property
    def largest_deviation(self) -> float | None:
        deviations = [abs(cell.deviation) for cell in self.cells if cell.deviation is not None]
        return max(deviations) if deviations else None

    @property
    def num_agreeing(self) -> tuple[int, int]:
        """Cells that are what is printed, and cells that can be."""
        if self.measured:
            return 0, 0
        compared = [cell.agrees for cell in self.cells if cell.agrees is not None]
        return sum(compared), len(compared)
