"""Draw docs/results/overview.svg, the chart of README.md, from the benchmark results in docs/results.

    python docs/draw_overview.py

Left: the largest model that each system trains within a memory limit (capacity.json). Right: step time against peak
memory (peers.json, the contest with the small batch).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = RESULTS / "overview.svg"
OURS, OTHERS, PLAIN = "#1f6fb4", "#a8a8a8", "#404040"
CONTEST = 1  # 6 layers x 1024, batch 1 x 64: moving the states takes longer than computing
SHORT = {
    "this library": "zero-infinity",
    "FSDP2, CPU offload": "FSDP2 (CPU offload)",
    "by hand: mapped files": "memory-mapped files",
    "DeepSpeed, all in RAM": "DeepSpeed (RAM)",
    "DeepSpeed, optimizer on NVMe": "DeepSpeed (optimizer on NVMe)",
    "DeepSpeed, all on NVMe": "DeepSpeed (NVMe)",
}
OUR_BUDGETS = ("fits", "1/2", "1/8")
# Key of a contender -> its label, and where the label goes, in points from its dot.
DOTS = {
    "plain": ("plain PyTorch, memory-mapped files", (6, 6)),
    "mapped": ("", (0, 0)),  # on the dot of plain PyTorch
    "fits": ("zero-infinity, all in RAM", (6, -14)),
    "1/2": ("zero-infinity,\nNVMe, 1/2 in RAM", (-24, -27)),
    "1/8": ("zero-infinity,\nNVMe, 1/8 in RAM", (-8, 9)),
    "ds-cpu": ("DeepSpeed (RAM)", (-30, -16)),
    "ds-params": ("DeepSpeed (NVMe)", (-36, 9)),
    "ds-pipe": ("DeepSpeed\n(NVMe, pipelined)", (-22, -27)),
    "fsdp2": ("FSDP2 (CPU offload)", (-24, 9)),
}


def main() -> None:
    capacity = json.loads((RESULTS / "capacity.json").read_text(encoding="utf-8"))
    peers = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "overview", "font.size": 9.5})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 3.9), width_ratios=(1, 1.05), layout="constrained")
    _draw_capacity(left, capacity)
    _draw_peers(right, peers["contests"][CONTEST])
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"wrote {PICTURE}")


def _draw_capacity(axes: Axes, result: dict[str, Any]) -> None:
    """One bar a system, longest first."""
    rows = sorted((one["largest"]["num_parameters"], one["name"]) for one in result["capacities"] if one["largest"])
    sizes = [size / 1e6 for size, _ in rows]
    colors = [OURS if name == "this library" else PLAIN if name == "plain PyTorch" else OTHERS for _, name in rows]
    bars = axes.barh([SHORT.get(name, name) for _, name in rows], sizes, color=colors, height=0.7)
    axes.bar_label(bars, [f"{size:,.0f}M" for size in sizes], padding=3)
    axes.set_xlim(0, max(sizes) * 1.16)
    axes.set_xlabel("parameters (millions), longer is better")
    axes.set_title(f"Largest model trained within {result['limit'] / 2**30:.0f} GiB of memory", fontsize=10.5)
    _clean(axes)


def _draw_peers(axes: Axes, contest: dict[str, Any]) -> None:
    """One dot a system; the budgets of this library are joined by a line."""
    found = {one["key"]: one["figures"] for heat in contest["heats"] for one in heat if one["figures"]}
    line = [_place(found[key]) for key in OUR_BUDGETS]
    axes.plot([x for x, _ in line], [y for _, y in line], color=OURS, linewidth=1.2, zorder=1)
    for key, (label, offset) in DOTS.items():
        x, y = _place(found[key])
        color = PLAIN if key == "plain" else OURS if key in OUR_BUDGETS else OTHERS
        axes.scatter(x, y, s=46, color=color, zorder=2)
        axes.annotate(label, (x, y), xytext=offset, textcoords="offset points", fontsize=8.5)
    race = contest["race"]
    axes.set_xlim(0, 3.5)
    axes.set_ylim(0, 3.8)
    axes.set_xlabel("peak memory of the process (GiB)")
    axes.set_ylabel("step time, plain PyTorch = 1")
    model = f"{contest['num_parameters'] / 1e6:.0f}M parameters, batch {race['batch']} x {race['seq']}"
    axes.set_title(f"{model}: lower left is better", fontsize=10.5)
    _clean(axes)


def _place(figures: dict[str, Any]) -> tuple[float, float]:
    return figures["peak_rss"] / 2**30, figures["wall"]["median"]


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
