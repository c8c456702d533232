from __future__ import annotations

import io

import pytest
from rich.console import Console

from zero_infinity.papers.exhibit import Cell, Exhibit
from zero_infinity.papers.terminal import as_json, deviation, number, show, summary

CELLS = (Cell(("a",), 2.0, "2"), Cell(("b",), 3.0, "2", note="a [note]"), Cell(("c",), None, "2"))
EXHIBIT = Exhibit("name", "A title", "A source", ("key",), "GB", CELLS, notes=("One more thing.",))
MEASURED = Exhibit("name", "A title", "A source", ("key",), "GB", CELLS, measured=True)


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (1.23456, "1.235"), (12345.6, "12,346"), (0.0, "0")])
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_deviations_are_percent_and_equal_ones_a_sign() -> None:
    assert [deviation(EXHIBIT, cell) for cell in CELLS] == ["=", "+50.0%", ""]
    assert [deviation(MEASURED, cell) for cell in CELLS] == ["+0.0%", "+50.0%", ""]


def test_the_summary_counts_or_says_that_numbers_are_measured() -> None:
    assert summary(EXHIBIT) == "1 of 2 published numbers are ours to the digit; the largest deviation is 50.0%"
    assert summary(MEASURED) == "against measurements; the largest deviation is 50.0%"


def test_a_table_shows_every_cell_and_note() -> None:
    console = Console(file=io.StringIO(), width=120)
    show(console, EXHIBIT)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("A title", "ours, GB", "+50.0%", "a [note]", "A source", "One more thing."):
        assert part in text


def test_json_has_every_cell() -> None:
    data = as_json(EXHIBIT)
    assert data["cells"][1] == {"keys": ["b"], "ours": 3.0, "published": 2.0, "deviation": 0.5, "note": "a [note]"}
    assert data["notes"] == ["One more thing."]
