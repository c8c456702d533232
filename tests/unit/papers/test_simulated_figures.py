from __future__ import annotations

import pytest

from zero_infinity.papers import catalogue, infinity_paper


@pytest.mark.long
def test_simulated_5t_10t_20t_are_within_table_4() -> None:
    """Without overlap, as the table's own analysis assumes; what overlapping would give is shown beside."""
    exhibit = catalogue.make("infinity-figure5a")
    ours = {cell.keys: cell.ours or 0 for cell in exhibit.cells}
    for model, row in infinity_paper.TABLE_4.items():
        low, high = float(row[6]), float(row[7])
        assert low <= ours["one after the other", model] <= high
        assert ours["overlapped", model] >= ours["one after the other", model]


@pytest.mark.parametrize("name", ["infinity-figure6c", "infinity-figure6d", "infinity-figure6e"])
def test_ablations_go_the_way_of_the_paper_s(name: str) -> None:
    exhibit = catalogue.make(name)
    if name == "infinity-figure6c":
        split, owned = (
            [cell.ours or 0 for cell in exhibit.cells if cell.keys[0].startswith(n)] for n in ("ZeRO-Inf", "ZeRO-Off")
        )
        assert all(s <= o for s, o in zip(split, owned, strict=True))
        return
    gains = [cell.ours or 0 for cell in exhibit.cells]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= 1 for gain in gains)
