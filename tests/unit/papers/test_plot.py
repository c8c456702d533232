from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zero_infinity.papers.exhibit import Cell, Exhibit, Plot, PlotKind
from zero_infinity.papers.plot import draw

CELLS = tuple(Cell((series, str(x)), x * 2.0, "3", x=float(x)) for series in ("a", "b") for x in (1, 2, 4))
EXHIBIT = Exhibit("name", "A title", "A source", ("series", "x"), "GB", CELLS)


@pytest.mark.parametrize("kind", PlotKind)
def test_a_chart_is_an_svg_and_a_png(kind: PlotKind, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    exhibit = replace(EXHIBIT, plot=Plot(kind, "nodes", "gigabytes", log_x=True, log_y=True))
    svg, png = draw(exhibit, tmp_path / "figure1.5")
    assert (svg.name, png.name) == ("figure1.5.svg", "figure1.5.png")
    assert svg.stat().st_size > 1000
    assert png.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw(EXHIBIT, tmp_path / "no plot") == []
    cells = tuple(replace(cell, x=None) for cell in CELLS)
    plot = Plot(PlotKind.LINES, "nodes", "gigabytes")
    assert draw(replace(EXHIBIT, cells=cells, plot=plot), tmp_path / "no points") == []
    assert not list(tmp_path.iterdir())
