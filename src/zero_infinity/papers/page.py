"""Writes exhibits to a directory: a CSV file and a chart each, and an index page with all of them."""

from __future__ import annotations

import csv
import html
from collections.abc import Sequence
from pathlib import Path

from zero_infinity.papers.exhibit import Exhibit
from zero_infinity.papers.plot import draw
from zero_infinity.papers.terminal import deviation, number, summary

_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0 }
td, th { padding: .15rem .6rem; border-bottom: 1px solid #e3e3e3; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto } section { margin: 2.5rem 0 } .s { color: #666 }
summary { cursor: pointer; color: #06c }
"""


def write(directory: Path, exhibits: Sequence[Exhibit]) -> Path:
    """Write all files into a directory that exists; returns the index page."""
    drawn: dict[str, bool] = {}
    for exhibit in exhibits:
        _write_csv(directory / f"{exhibit.name}.csv", exhibit)
        drawn[exhibit.name] = bool(draw(exhibit, directory / exhibit.name))
    page = directory / "index.html"
    page.write_text(_index(exhibits, drawn), encoding="utf-8")
    return page


def _write_csv(path: Path, exhibit: Exhibit) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*exhibit.key_names, f"ours ({exhibit.unit})", "published", "deviation", "note"])
        for cell in exhibit.cells:
            off = "" if cell.deviation is None else f"{cell.deviation:.4f}"
            writer.writerow([*cell.keys, cell.ours, cell.printed, off, cell.note])


def _index(exhibits: Sequence[Exhibit], drawn: dict[str, bool]) -> str:
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
