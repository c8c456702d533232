"""The picture of `bench peers`: time of a step and peak memory, side by side. matplotlib is optional."""

from __future__ import annotations

from pathlib import Path

from zero_infinity.cli.bench_peers_report import PeersReport

_OURS, _OTHERS, _PLAIN = "#1f77b4", "#b0b0b0", "#404040"


def draw(report: PeersReport, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg; nothing when matplotlib is missing or there is nothing to show."""
    try:
        import matplotlib
    except ImportError:
        return []
    bars = []
    for number, heat in enumerate(report.heats):
        for entry in heat if number == 0 else heat[1:]:
            figures = report.figures(entry, heat[0])
            color = _OURS if entry.is_ours else _PLAIN if entry.script == "plain" else _OTHERS
            bars.append((entry.contender.setting.name, figures, color))
    if not any(figures for _, figures, _ in bars):
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 + 0.38 * len(bars)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    places = range(len(bars))
    for axes, values, text in (
        (time, [f.wall.median if f else 0.0 for _, f, _ in bars], "{:.2f}"),
        (memory, [f.peak_rss / 2**30 if f else 0.0 for _, f, _ in bars], "{:.1f}"),
    ):
        axes.barh(places, values, color=[color for _, _, color in bars])
        for place, value in zip(places, values, strict=True):
            axes.annotate(text.format(value) if value else "failed", (value, place), xytext=(3, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    time.set_yticks(places, [name for name, _, _ in bars])
    time.invert_yaxis()
    time.axvline(1.0, color="0.5", linewidth=0.8)
    time.set_xlabel("time of a step, plain PyTorch = 1 (median)")
    memory.set_xlabel("peak RSS, GiB")
    figure.suptitle(report.caption().split(";")[0], fontsize=9)
    files = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files
