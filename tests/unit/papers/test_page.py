from __future__ import annotations

import csv
from pathlib import Path

from zero_infinity.papers.exhibit import Cell, Exhibit
from zero_infinity.papers.page import write

CELLS = (Cell(("a < b",), 2.0, "2"), Cell(("c",), 3.0, "2", note="a & b"))


def test_every_exhibit_is_a_file_and_a_section(tmp_path: Path) -> None:
    exhibits = [Exhibit(name, "A <title>", "A source", ("key",), "GB", CELLS) for name in ("one", "two")]
    page = write(tmp_path, exhibits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "one.csv", "two.csv"]
    rows = list(csv.reader((tmp_path / "one.csv").read_text().splitlines()))
    assert rows == [
        ["key", "ours (GB)", "published", "deviation", "note"],
        ["a < b", "2.0", "2", "0.0000", ""],
        ["c", "3.0", "2", "0.5000", "a & b"],
    ]
    text = page.read_text()
    assert '<section id="two">' in text
    assert "A &lt;title&gt;" in text
    assert "a &amp; b" in text
    assert "<img" not in text  # nothing is drawn of an exhibit without a plot
