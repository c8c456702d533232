"""The chart of the benchmark `train`: step time against the memory budget."""

from __future__ import annotations

from pathlib import Path

from benchmarks.train.report import Report


def draw(report: Report, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg; nothing when matplotlib is missing or there is nothing to show."""
    try:
        import matplotlib
    except ImportError:
        return []
    points = [
        (contender.setting.fraction, figures.wall, contender.setting.name)
        for contender in report.contenders
        if contender.setting.fraction is not None
        and (figures := report.figures(contender)) is not None
        and figures.wall
    ]
    if not points:
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.annotate("plain PyTorch, everything in memory", (0.01, 1.0), xycoords=("axes fraction", "data"), fontsize=8,
                  textcoords="offset points", xytext=(0, -11), color="0.4")  # fmt: skip
    points.sort(key=lambda point: point[0])
    fractions = [fraction for fraction, _, _ in points]
    axes.errorbar(
        fractions,
        [wall.median for _, wall, _ in points],
        yerr=[[wall.median - wall.p10 for _, wall, _ in points], [wall.p90 - wall.median for _, wall, _ in points]],
        marker="o",
        capsize=3,
        label="median, p10 to p90",
    )
    axes.plot(fractions, [wall.best for _, wall, _ in points], marker="x", linestyle=":", label="best/best")
    axes.set_xscale("log", base=2)
    axes.set_xticks(fractions, [name for _, _, name in points])
    axes.minorticks_off()
    axes.set_ylim(bottom=min(0.9, *(wall.p10 for _, wall, _ in points)))
    axes.set_xlabel("memory budget, as a part of the states (12 bytes a parameter)")
    axes.set_ylabel("time of a step, plain PyTorch = 1")
    axes.set_title(report.caption().split(";")[0], fontsize=9)
    axes.legend(frameon=False)
    files = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files
