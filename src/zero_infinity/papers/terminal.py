"""Shows an exhibit as text: a table for the terminal, a line that sums it up, and plain data for JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_infinity.papers.exhibit import Cell, Exhibit


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def deviation(exhibit: Exhibit, cell: Cell) -> str:
    """An equals sign if ours is the printed number, in as many digits."""
    if cell.agrees and not exhibit.measured:
        return "="
    return "" if cell.deviation is None else f"{cell.deviation:+.1%}"


def summary(exhibit: Exhibit) -> str:
    num_equal, num_compared = exhibit.num_agreeing
    largest = exhibit.largest_deviation
    if exhibit.measured:
        return f"against measurements; the largest deviation is {largest or 0:.1%}"
    off = "" if num_equal == num_compared or largest is None else f"; the largest deviation is {largest:.1%}"
    return f"{num_equal} of {num_compared} published numbers are ours to the digit{off}"


def show(console: Console, exhibit: Exhibit) -> None:
    """Print the exhibit as a table."""
    # Title and notes are printed above and below: the table's own title and caption wrap at its width.
    console.print(f"\n[bold]{exhibit.name}[/]: {escape(exhibit.title)}")
    table = Table(*exhibit.key_names)
    for heading in (f"ours, {exhibit.unit}", "published", "deviation"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for cell in exhibit.cells:
        printed = "" if cell.printed is None else cell.printed
        table.add_row(*map(escape, cell.keys), number(cell.ours), printed, deviation(exhibit, cell), escape(cell.note))
    console.print(table)
    for line in (f"{exhibit.source}. {summary(exhibit)}.", *exhibit.notes):
        console.print(escape(line), style="dim")


def as_json(exhibit: Exhibit) -> dict[str, Any]:
    return {
        "name": exhibit.name,
        "title": exhibit.title,
        "source": exhibit.source,
        "unit": exhibit.unit,
        "cells": [
            {
                "keys": list(cell.keys),
                "ours": cell.ours,
                "published": cell.published,
                "deviation": cell.deviation,
                "note": cell.note,
            }
            for cell in exhibit.cells
        ],
        "notes": list(exhibit.notes),
    }
