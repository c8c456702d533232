from __future__ import annotations

import pytest

from zero_infinity.papers import infinity_paper


def test_figure_2a_is_ours_but_for_one_cell() -> None:
    exhibit = infinity_paper.figure_2a()
    assert len(exhibit.cells) == 30
    (odd,) = [cell for cell in exhibit.cells if not cell.agrees]
    assert odd.keys == ("MSWM, GB", "0.10T")
    assert (odd.ours, odd.printed) == (1.5625, "1.95")
    assert odd.note


def test_figure_2b_is_ours_but_for_rounded_gpu_memory() -> None:
    exhibit = infinity_paper.figure_2b()
    assert len(exhibit.cells) == 30
    assert all(cell.keys[0] == "GPU memory, TB" for cell in exhibit.cells if not cell.agrees)
    assert (exhibit.largest_deviation or 0) < 0.025


@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_figure_3_is_at_least_what_the_text_states(part: str) -> None:
    stated = [cell for cell in infinity_paper.figure_3(part).cells if cell.published is not None]
    assert stated
    assert all((cell.ours or 0) >= (cell.published or 0) for cell in stated)


def test_table_4_follows_from_the_equations() -> None:
    for cell in infinity_paper.table_4().cells:
        if "measured" not in cell.keys[0]:
            assert cell.agrees or cell.deviation == pytest.approx(0, abs=0.05), cell
