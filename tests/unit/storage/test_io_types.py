"""The order of priorities is what the queue sorts by."""

from __future__ import annotations

from zero_infinity.storage.io_types import Priority


def test_demanded_runs_before_prefetches_and_those_before_write_backs() -> None:
    assert sorted(Priority) == [Priority.DEMANDED, Priority.PREFETCH, Priority.WRITE_BACK]
