from __future__ import annotations

import pytest

from zero_infinity.papers import zero_paper


def test_zero_table_1_is_ours_to_the_digit() -> None:
    exhibit = zero_paper.table_1()
    assert exhibit.num_agreeing == (54, 54)
    cut_off = {(cell.keys, cell.printed) for cell in exhibit.cells if cell.cut_off}
    assert cut_off == {
        (("128B P_os", "1024"), "513"),
        (("128B P_os+g", "1024"), "257"),
        (("1T P_os", "64"), "4187"),
        (("1T P_os+g", "64"), "2218"),
        (("1T P_os", "256"), "4046"),
        (("1T P_os+g", "256"), "2054"),
        (("1T P_os", "1024"), "4011"),
        (("1T P_os+g", "1024"), "2013"),
    }
    assert all(cell.note for cell in exhibit.cells if cell.cut_off)


def test_zero_table_2_differs_only_where_the_first_row_was_rounded() -> None:
    analysis = [cell for cell in zero_paper.table_2().cells if "measured" not in cell.keys[0]]
    assert len(analysis) == 20
    differing = [cell for cell in analysis if not cell.agrees]
    assert all(cell.note.startswith("printed") for cell in differing)
    assert all(abs(cell.deviation or 0) < 0.025 for cell in differing)
    measured = {cell.keys: cell for cell in zero_paper.table_2().cells if "measured" in cell.keys[0]}
    assert all((cell.published or 0) < (cell.ours or 0) for cell in measured.values())


def test_zero_figure_1() -> None:
    assert zero_paper.figure_1().num_agreeing == (4, 4)


def test_what_the_text_states_of_residual_states() -> None:
    cells = {cell.keys[0]: cell for cell in zero_paper.residual().cells}
    assert cells["activations of 1.5B, GB"].deviation == pytest.approx(0, abs=0.01)
    assert cells["fused buffer of 1.5B, GB"].agrees
    # Both numbers of section 6.1 are half of what 16-bit checkpoints take.
    assert cells["checkpoints of 100B, GB"].deviation == pytest.approx(1, abs=0.05)
    assert all(cell.agrees for name, cell in cells.items() if name.endswith("Psi"))
