"""The chart of the benchmark `peers`: time of a step and peak memory; one row for each contest."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.report import PeersReport

_OURS, _OTHERS, _PLAIN = "#1f77b4", "#b0b0b0", "#404040"


def draw(report: PeersReport, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg; nothing when matplotlib is missing or there is nothing to show."""
    try:
        import matplotlib
    except ImportError:
        return []
    shown = [contest for contest in report.contests if any(figures for _, figures in contest.entries())]
    if not shown:
        return []
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    num_bars = sum(len(contest.entries()) for contest in shown)
    figure = Figure(figsize=(9, 0.6 * len(shown) + 0.36 * num_bars), layout="constrained")
    rows = figure.subplots(len(shown), 2, sharey="row", squeeze=False)
    for contest, (time, memory) in zip(shown, rows, strict=True):
        bars = contest.entries()
        places = range(len(bars))
        colors = [_OURS if e.is_ours else _PLAIN if e.script == "plain" else _OTHERS for e, _ in bars]
        for axes, values, text in (
            (time, [f.wall.median if f else 0.0 for _, f in bars], "{:.2f}"),
            (memory, [f.peak_rss / 2**30 if f else 0.0 for _, f in bars], "{:.1f}"),
        ):
            axes.barh(places, values, color=colors)
            for place, value in zip(places, values, strict=True):
                axes.annotate(text.format(value) if value else "failed", (value, place), xytext=(3, 0),
                              textcoords="offset points", va="center", fontsize=8)  # fmt: skip
            axes.margins(x=0.15)
            axes.spines[["top", "right"]].set_visible(False)
        time.set_yticks(places, [entry.contender.setting.name for entry, _ in bars])
        time.invert_yaxis()
        time.axvline(1.0, color="0.5", linewidth=0.8)
        time.set_title(contest.caption().split(";")[0], fontsize=9, loc="left")
    rows[-1, 0].set_xlabel("time of a step, plain PyTorch = 1 (median)")
    rows[-1, 1].set_xlabel("peak RSS, GiB")
    files = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files
