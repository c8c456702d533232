from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.papers.exhibit import Cell, Exhibit


def test_printed_numbers_may_be_rounded_or_cut_off() -> None:
    assert Cell(("x",), 41.25, "41.3").agrees
    assert not Cell(("x",), 41.25, "41.3").cut_off
    assert Cell(("x",), 513.5, "513").agrees
    assert Cell(("x",), 513.5, "513").cut_off
    assert Cell(("x",), 515.0, "513").agrees is False
    assert Cell(("x",), None, "513").agrees is None
    assert Cell(("x",), 110.0, "100").deviation == pytest.approx(0.1)


def test_an_exhibit_counts_what_can_be_compared() -> None:
    cells = (Cell(("a",), 2.0, "2"), Cell(("b",), 3.0, "2"), Cell(("c",), 3.0), Cell(("d",), None, "2"))
    exhibit = Exhibit("name", "title", "source", ("key",), "GB", cells)
    assert exhibit.num_agreeing == (1, 2)
    assert exhibit.largest_deviation == pytest.approx(0.5)
    measured = replace(exhibit, measured=True)
    assert measured.num_agreeing == (0, 0)
    assert measured.largest_deviation == pytest.approx(0.5)
