"""The chart of the benchmark `growth`: a column for each axis, a row for each figure, next to its expected value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROWS = (
    ("seconds", "s a step", 1.0),
    ("held_bytes", "held, MB", 1e6),
    ("peak_rss", "peak RSS, all ranks, MB", 1e6),
    ("start_seconds", "start, s", 1.0),
    ("moved_bytes", "moved, MB a step", 1e6),
)
_TITLES = {
    "depth": "layers",
    "width": "width",
    "budget": "budget / states",
    "batch": "batch",
    "ranks": "ranks, same batch",
}


def draw(content: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg; nothing when matplotlib is missing or there is nothing to show."""
    try:
        import matplotlib
    except ImportError:
        return []
    axes_found = [
        line for axis in content["axes"] if (line := [p for p in axis["points"] if p["measured"] and p["expected"]])
    ]
    if not axes_found:
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(axes_found) + 0.6, 2 * len(_ROWS)), layout="constrained")
    panels = figure.subplots(len(_ROWS), len(axes_found), squeeze=False)
    legend: dict[str, Any] = {}
    for column, line in enumerate(axes_found):
        name = line[0]["axis"]
        places = [point["value"] for point in line]
        for row, (key, label, unit) in enumerate(_ROWS):
            panel = panels[row][column]
            law = [point["expected"][key] / unit for point in line]
            measured = [point["measured"][key] / unit for point in line]
            bound = key == "held_bytes" or (key == "moved_bytes" and name in ("budget", "depth", "width"))
            style = {"color": "0.55", "linestyle": ":" if bound else "--", "linewidth": 1.5}
            panel.plot(places, law, label="bound" if bound else "law", **style)
            panel.plot(places, measured, color="#1f77b4", marker="o", markersize=4, label="measured")
            if name == "budget":
                panel.set_xscale("log", base=2)
            panel.set_xticks(places, [f"{place:g}" for place in places], fontsize=7)
            panel.minorticks_off()
            panel.tick_params(axis="y", labelsize=7)
            panel.set_ylim(bottom=0, top=1.15 * max(*law, *measured, 1e-9))
            panel.spines[["top", "right"]].set_visible(False)
            if column == 0:
                panel.set_ylabel(label, fontsize=9)
            if row == 0:
                panel.set_title(_TITLES[name], fontsize=9)
            for line_drawn in panel.get_lines():
                legend.setdefault(str(line_drawn.get_label()), line_drawn)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    files = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=130)
    return files
