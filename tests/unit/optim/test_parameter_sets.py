"""Sets of parameters as numbers, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.optim.parameter_sets import ParameterSets
from zero_infinity.params.unit import ManagedParameter

NAMES = [f"p{number}" for number in range(150)]  # stand for parameters: only their places count
SETS = ParameterSets(cast(Sequence[ManagedParameter], NAMES))


def of(members: set[str]) -> set[ManagedParameter]:
    return cast(set[ManagedParameter], members)


@given(st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES))), min_size=1, max_size=3))
def test_the_union_over_ranks_is_unpacked(ranks: list[tuple[set[str], set[str]]]) -> None:
    said = [SETS.pack(of(first)) + SETS.pack(of(second)) for first, second in ranks]
    for number in range(2):
        union = set().union(*(sets[number] for sets in ranks))
        assert list(SETS.unpack(said, number)) == [name for name in NAMES if name in union]


def test_a_number_fits_in_a_signed_word() -> None:
    words = SETS.pack(of(set(NAMES)))
    assert len(words) == SETS.num_words == 3
    assert max(words) < 2**63
