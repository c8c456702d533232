from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.policy.alignment import ALIGNMENT, GRAIN, round_up, round_up_elements


@given(st.integers(0, 2**50), st.integers(1, 2**30))
def test_rounding_up_gives_the_next_multiple(number: int, multiple: int) -> None:
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - number < multiple


def test_bytes_are_whole_pages_and_elements_whole_grains() -> None:
    assert [round_up(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
    assert [round_up_elements(n) for n in (0, 1, GRAIN, GRAIN + 1)] == [0, GRAIN, GRAIN, 2 * GRAIN]
