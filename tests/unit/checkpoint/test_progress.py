from __future__ import annotations

from zero_infinity.checkpoint.progress import ProgressMeter


def test_bytes_are_added_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    meter = ProgressMeter(lambda done, total: seen.append((done, total)), 10)
    for _ in range(3):
        meter.add(4)
    assert seen == [(4, 10), (8, 10), (10, 10)]
    ProgressMeter(None).add(3)
