"""The chart of the benchmark `ablations`: the cost of leaving a part out, by links and batch size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_infinity.byte_sizes import format_rate

_SHADES = ("#9ecae1", "#4292c6", "#08519c", "#08306b")


def draw(content: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg; nothing when matplotlib is missing or there is nothing to show."""
    try:
        import matplotlib
    except ImportError:
        return []
    cells = content["cells"]
    found = {
        (cell["bytes_per_second"], cell["race"]["batch"], row["name"]): row["ratio"]
        for cell in cells
        for row in cell["rows"]
        if row["ratio"] and row["name"] != row["against"]
    }
    if not found:
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    # In the order in which they first come.
    links = list(dict.fromkeys(link for link, _, _ in found))
    batches = list(dict.fromkeys(batch for _, batch, _ in found))
    names = list(dict.fromkeys(name for _, _, name in found))
    against = {row["name"]: row["against"] for cell in cells for row in cell["rows"]}
    height = 0.8 / len(batches)
    figure = Figure(figsize=(4.6 + 2.8 * len(links), 1.0 + 0.62 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for panel, link in zip(panels, links, strict=True):
        for number, batch in enumerate(batches):
            here = [(place, found.get((link, batch, name))) for place, name in enumerate(names)]
            bars = [(place + (number - (len(batches) - 1) / 2) * height, ratio) for place, ratio in here if ratio]
            panel.barh(
                [place for place, _ in bars],
                [ratio["median"] for _, ratio in bars],
                height,
                color=_SHADES[number % len(_SHADES)],
                label=f"batch {batch}",
                xerr=[
                    [ratio["median"] - ratio["p10"] for _, ratio in bars],
                    [ratio["p90"] - ratio["median"] for _, ratio in bars],
                ],
                error_kw={"elinewidth": 0.7, "ecolor": "0.3"},
            )
        panel.axvline(1.0, color="0.3", linewidth=0.8)
        panel.set_title("links as they are" if link is None else f"emulated links of {format_rate(link)}", fontsize=9)
        panel.set_xlabel("time of a step, without the change = 1", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), [f"{name}\n(against {against[name]})" for name in names], fontsize=8)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(batches), fontsize=9, frameon=False)
    files = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=130)
    return files
