"""The size of a chunk, in bytes and in elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.unit_sizes import adam

from zero_infinity.policy.alignment import GRAIN
from zero_infinity.policy.chunk_size import chunk_elements
from zero_infinity.policy.memory_budget import place
from zero_infinity.policy.unit_sizes import ElementBytes

ADAM = ElementBytes(parameter=4, record=8, gradient=4)
MIXED = ElementBytes(parameter=2, record=12, gradient=4)
MIB = 2**20


@pytest.mark.parametrize("budget", [40 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB])
def test_beside_what_is_needed_at_once_there_is_room_for_four_chunks(budget: int) -> None:
    """A chunk grows with the cache, and does not make the least budget grow."""
    found = place([adam(f"{number}", 12 * MIB) for number in range(64)], budget, [], nvme=True)
    assert 12 * MIB + 4 * found.chunk_bytes <= found.cache
    assert found.chunk_bytes <= max(256 << 10, found.cache / 12 + MIB)  # to a whole huge page


@given(st.integers(1, 64 * MIB), st.sampled_from([ADAM, MIXED, ElementBytes(4, record=0, gradient=4)]))
def test_chunks_are_whole_grains_that_fit(chunk_bytes: int, widths: ElementBytes) -> None:
    elements = chunk_elements(chunk_bytes, widths)
    widest = max(widths.record, widths.gradient)
    assert elements % GRAIN == 0
    assert elements == GRAIN or elements * widest <= chunk_bytes
    assert (elements + GRAIN) * widest > chunk_bytes
