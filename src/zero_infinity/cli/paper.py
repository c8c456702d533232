"""`zero-infinity paper`: tables and figures of the ZeRO papers from our equations, beside the printed numbers.

Owns how an exhibit is printed and written: a table, CSV, SVG, PNG and an index page. The numbers are `plan.paper`'s.
"""

from __future__ import annotations

import argparse
import csv
import html
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_infinity.errors import ConfigError
from zero_infinity.papers import catalogue
from zero_infinity.papers.exhibit import Cell, Exhibit
from zero_infinity.papers.plot import draw

_EPILOG = """\
examples:
  zero-infinity paper zero-table1
  zero-infinity paper all --out paper-out     every exhibit as CSV, SVG and PNG, and index.html
  zero-infinity paper infinity-figure5a --json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "paper",
        help="the ZeRO papers' tables and figures, ours beside theirs",
        description="Recompute tables and figures of the ZeRO and ZeRO-Infinity papers and show the deviation.",
        epilog=_EPILOG + "\nexhibits:\n" + textwrap.fill(", ".join(catalogue.NAMES), 78),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="all", metavar="NAME", help="an exhibit (default: all of them)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write CSV, SVG, PNG and index.html there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = catalogue.NAMES if args.name == "all" else (args.name,)
    if args.out is not None:
        _make_directory(args.out)
    exhibits: list[Exhibit] = []
    console = Console()
    for name in names:
        exhibit = catalogue.make(name)
        exhibits.append(exhibit)
        if not args.json:
            _print(console, exhibit)
    if args.json:
        print(json.dumps([_as_json(exhibit) for exhibit in exhibits], indent=2))
    if args.out is not None:
        _write(args.out, exhibits)
        print(f"written: {args.out / 'index.html'}", file=sys.stderr)
    return 0


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}\n  fix:   another directory") from None


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def deviation(exhibit: Exhibit, cell: Cell) -> str:
    """An equals sign where ours is what is printed, in as many digits."""
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


def _print(console: Console, exhibit: Exhibit) -> None:
    # Above and below rather than the table's own title and caption, which wrap at its width.
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


def _as_json(exhibit: Exhibit) -> dict[str, Any]:
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


def _write(directory: Path, exhibits: list[Exhibit]) -> None:
    drawn: dict[str, bool] = {}
    for exhibit in exhibits:
        with (directory / f"{exhibit.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*exhibit.key_names, f"ours ({exhibit.unit})", "published", "deviation", "note"])
            for cell in exhibit.cells:
                off = "" if cell.deviation is None else f"{cell.deviation:.4f}"
                writer.writerow([*cell.keys, cell.ours, cell.printed, off, cell.note])
        drawn[exhibit.name] = bool(draw(exhibit, directory / exhibit.name))
    (directory / "index.html").write_text(_index(exhibits, drawn), encoding="utf-8")


_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0 }
td, th { padding: .15rem .6rem; border-bottom: 1px solid #e3e3e3; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto } section { margin: 2.5rem 0 } .s { color: #666 }
summary { cursor: pointer; color: #06c }
"""


def _index(exhibits: list[Exhibit], drawn: dict[str, bool]) -> str:
    links = "".join(
        f'<tr><td><a href="#{e.name}">{e.name}</a></td><td>{html.escape(e.title)}</td><td>{summary(e)}</td></tr>'
        for e in exhibits
    )
    sections = "".join(_section(exhibit, drawn=drawn[exhibit.name]) for exhibit in exhibits)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>The ZeRO papers, recomputed</title>'
        f"<style>{_STYLE}</style><h1>The ZeRO papers, recomputed</h1><table>{links}</table>{sections}</html>\n"
    )


def _section(exhibit: Exhibit, *, drawn: bool) -> str:
    heads = (*exhibit.key_names, f"ours, {exhibit.unit}", "published", "deviation", "note")
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(key)}</td>" for key in cell.keys)
        + "".join(
            f'<td class="n">{text}</td>'
            for text in (number(cell.ours), html.escape(cell.printed or ""), deviation(exhibit, cell))
        )
        + f"<td>{html.escape(cell.note)}</td></tr>"
        for cell in exhibit.cells
    )
    picture = f'<img src="{exhibit.name}.svg" alt="{html.escape(exhibit.title)}">' if drawn else ""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in exhibit.notes)
    return (
        f'<section id="{exhibit.name}"><h2>{html.escape(exhibit.title)}</h2>'
        f'<p class="s">{html.escape(exhibit.source)}. {summary(exhibit)}. <a href="{exhibit.name}.csv">CSV</a></p>'
        f"{picture}{notes}<details><summary>numbers</summary><table><tr>"
        + "".join(f"<th>{html.escape(head)}</th>" for head in heads)
        + f"</tr>{rows}</table></details></section>"
    )
