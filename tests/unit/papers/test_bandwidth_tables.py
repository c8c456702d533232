from __future__ import annotations

from zero_infinity.papers import bandwidth_tables, catalogue


def test_the_talk_s_tables_need_the_talk_s_profile() -> None:
    for name in ("bandwidth-partitioned", "bandwidth-sufficient"):
        num_equal, num_compared = catalogue.make(name).num_agreeing
        assert num_equal == num_compared > 0


def test_what_is_needed_is_compared_with_the_printed_figures() -> None:
    exhibit = bandwidth_tables.required()
    assert [cell.printed for cell in exhibit.cells] == ["70", "1500", "2", "1"]
    # The talk rounds up: what it prints is enough.
    assert all((cell.ours or 0) <= (cell.published or 0) for cell in exhibit.cells)
