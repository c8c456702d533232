from __future__ import annotations

from zero_infinity.papers.infinity_scale import figure_1, figure_6a


def test_sources_that_disagree_are_both_told() -> None:
    told = " ".join(note for exhibit in (figure_1(), figure_6a()) for note in exhibit.notes)
    for pair in (("one node", "one GPU"), ("800 V100", "625"), ("16 nodes", "on 8"), ("1.4B", "1.13B")):
        assert all(side in told for side in pair)


def test_bounds_are_above_what_ran() -> None:
    for exhibit in (figure_1(), figure_6a()):
        assert all((cell.ours or 0) >= (cell.published or 0) for cell in exhibit.cells)
