"""Draws an exhibit of `zero-infinity paper`. matplotlib is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero_infinity.papers.exhibit import Cell, Exhibit, Plot, PlotKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LEGEND = 12


def draw(exhibit: Exhibit, stem: Path) -> list[Path]:
    """Write `stem`.svg and `stem`.png; nothing when matplotlib is missing or there is nothing to draw."""
    cells = [cell for cell in exhibit.cells if cell.x is not None and cell.ours is not None]
    if exhibit.plot is None or not cells:
        return []
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    if exhibit.plot.kind is PlotKind.BARS:
        _draw_bars(axes, cells)
    else:
        _draw_lines(axes, cells)
    _label(axes, exhibit, exhibit.plot)
    # Named one by one: with_suffix would take the ".5" of a name for a suffix.
    files = [stem.parent / f"{stem.name}.{suffix}" for suffix in ("svg", "png")]
    for file in files:
        figure.savefig(file, dpi=140, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _series(cells: list[Cell]) -> dict[str, list[Cell]]:
    series: dict[str, list[Cell]] = {}
    for cell in cells:
        series.setdefault(cell.keys[0], []).append(cell)
    return series


def _draw_lines(axes: Axes, cells: list[Cell]) -> None:
    for name, members in _series(cells).items():
        x = [c.x for c in members if c.x is not None]
        ours = [c.ours for c in members if c.ours is not None]
        (line,) = axes.plot(x, ours, marker=".", linewidth=1.3, label=name)
        published = [(c.x, c.published) for c in members if c.x is not None and c.published is not None]
        axes.plot(
            [px for px, _ in published],
            [py for _, py in published],
            linestyle="none",
            marker="o",
            markerfacecolor="none",
            color=line.get_color(),
        )
    axes.plot([], [], linestyle="none", marker="o", markerfacecolor="none", color="0.3", label="published")


def _draw_bars(axes: Axes, cells: list[Cell]) -> None:
    """Groups of bars where there are several series; the published number is a ring at its bar."""
    series = _series(cells)
    grouped = len(series) < len(cells)
    groups = series if grouped else {"ours": cells}
    width = 0.8 / len(groups)
    for number, (name, members) in enumerate(groups.items()):
        shift = number * width
        axes.bar([float(c.x or 0) + shift for c in members], [c.ours or 0 for c in members], width, label=name)
        published = [c for c in members if c.published is not None]
        axes.plot(
            [float(c.x or 0) + shift for c in published],
            [c.published or 0 for c in published],
            linestyle="none",
            marker="o",
            markerfacecolor="white",
            color="0.2",
        )
    axes.plot([], [], linestyle="none", marker="o", markerfacecolor="white", color="0.2", label="published")
    names = {float(c.x or 0): c.keys[-1] if grouped else c.keys[0] for c in cells}
    axes.set_xticks(
        [x + 0.4 - width / 2 for x in names],
        list(names.values()),
        rotation=20 if max(map(len, names.values())) > 8 else 0,
        ha="right" if len(names) > 7 else "center",
    )


def _label(axes: Axes, exhibit: Exhibit, plot: Plot) -> None:
    from matplotlib.ticker import LogFormatter

    if plot.log_x and plot.kind is PlotKind.LINES:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if plot.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))  # "30" rather than a power of ten
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.set_title(f"{exhibit.title}\n{exhibit.source}", fontsize=10)
    axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.5)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:_MAX_LEGEND], labels[:_MAX_LEGEND], frameon=False, fontsize=8)
