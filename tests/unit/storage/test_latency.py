"""Percentiles from logarithmic buckets, against sorting."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.storage.io_types import LatencyHistogram


@given(st.lists(st.floats(2e-6, 3000.0), min_size=1, max_size=200))
def test_percentiles_are_right_to_a_few_percent(times: list[float]) -> None:
    histogram = LatencyHistogram()
    for seconds in times:
        histogram.add(seconds)
    found = histogram.percentiles()
    ordered = sorted(times)
    for fraction, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        exact = ordered[max(1, math.ceil(len(times) * fraction)) - 1]
        assert value == pytest.approx(exact, rel=0.03)
    assert found.max == ordered[-1]


def test_times_out_of_range_are_kept_at_the_ends() -> None:
    histogram = LatencyHistogram()
    assert histogram.percentiles().p99 == 0.0
    histogram.add(0.0)
    assert histogram.percentiles().p50 == 0.0
    histogram.add(1e9)
    assert histogram.percentiles().max == 1e9
